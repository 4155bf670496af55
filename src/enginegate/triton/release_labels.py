"""Release digests in a configuration that Triton is told and can be asked for.

They stand in an instance group's name. Triton takes a new name without touching the instances
behind it, whereas it reloads every version that serves when a parameter changes: publishing would
load the standby again too. An ensemble has no instances and nothing to reload; its parameters carry
them. Triton's Python backend puts that name on a shell's command line, so it is made of digits,
lower-case letters and hyphens alone.
"""

import re
from collections.abc import Mapping

from enginegate.triton.config import Config

RECORDS = "00"
"""A folder in a model's own that costs the versions that serve nothing (repository/layout.py)."""
_PARAMETER = "enginegate.releases"
_MARKS = re.compile(r"release(-[1-9]\d*-[0-9a-f]{64})+")
_MARK = re.compile(r"-([1-9]\d*)-([0-9a-f]{64})")


def mark(config: Config, digests: Mapping[int, str]) -> None:
    """Write each version's release digest (sha256, 64 hexadecimal digits) into a configuration.

    Without any it stays as it is.

    Raises:
        ValueError: a version or digest is none.
    """
    if not digests:
        return
    text = "release" + "".join(f"-{version}-{digests[version]}" for version in sorted(digests))
    if not _MARKS.fullmatch(text):
        raise ValueError(f"{text!r} does not name releases.")
    message = config.message
    if message.HasField("ensemble_scheduling"):
        message.parameters[_PARAMETER].string_value = text
        return
    group = message.instance_group[0] if message.instance_group else message.instance_group.add()
    group.name = text


def marks(config: Config) -> dict[int, str]:
    """Digests by version that a configuration carries; of one that is not ours, none."""
    names = [group.name for group in config.message.instance_group]
    texts = [*names, config.parameters.get(_PARAMETER, "")]
    return {
        int(version): digest
        for text in texts
        if _MARKS.fullmatch(text)
        for version, digest in _MARK.findall(text)
    }
