"""Release digests in a model's configuration, so that a server can be asked which releases it has.

The digests are the name of an instance group. Triton takes a new name without touching the
instances behind it, whereas it reloads every version that serves when a parameter changes:
publishing would load the standby again too (as it does for native TensorRT, whose instances cannot
be changed in place: triton/config.py). An ensemble has no instances and nothing to reload, so
its parameters carry the digests. Triton's Python backend puts the name on a shell's command line,
so it is made of digits, lower-case letters and hyphens alone.
"""

import re
from collections.abc import Mapping

from enginegate.triton.config import Config

RECORDS = "00"
"""A folder in a model's folder that Triton takes for no version (repository/store/layout.py)."""
_PARAMETER = "enginegate.releases"
_LABELS = re.compile(r"release(-[1-9]\d*-[0-9a-f]{64})+")
_LABEL = re.compile(r"-([1-9]\d*)-([0-9a-f]{64})")


def write_labels(config: Config, digests: Mapping[int, str]) -> None:
    """Write each version's release digest into a configuration; without digests it stays as it is.

    Raises:
        ValueError: a version is below 1, or a digest is no sha256 of 64 hexadecimal digits.
    """
    if not digests:
        return
    text = "release" + "".join(f"-{version}-{digests[version]}" for version in sorted(digests))
    if not _LABELS.fullmatch(text):
        raise ValueError(f"{text!r} does not name releases.")
    message = config.message
    if message.HasField("ensemble_scheduling"):
        message.parameters[_PARAMETER].string_value = text
        return
    group = message.instance_group[0] if message.instance_group else message.instance_group.add()
    group.name = text


def read_labels(config: Config) -> dict[int, str]:
    """Release digests by version that a configuration carries; empty if none were written."""
    names = [group.name for group in config.message.instance_group]
    texts = [*names, config.parameters.get(_PARAMETER, "")]
    return {
        int(version): digest
        for text in texts
        if _LABELS.fullmatch(text)
        for version, digest in _LABEL.findall(text)
    }
