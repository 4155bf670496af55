"""What a shell script that starts ``tritonserver`` tells it, as far as its text says.

The script is read, never run: only what most such scripts do is understood, and what is not is left
open rather than guessed.
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_FLAG = "--backend-directory"
_LARGEST_BYTES = 100_000
_SELF = r"""["']?(?:\$0|\$\{0\}|\$BASH_SOURCE|\$\{BASH_SOURCE(?:\[0\])?\})["']?"""
_REAL_SELF = re.compile(rf"\$\(\s*(?:readlink\s+-[a-z]+|realpath)\s+(?:--\s+)?{_SELF}\s*\)")
_OWN_FOLDER = re.compile(r"\$\{0%/\*\}")
_PATH = r"""["']?([^"'`$()&;|]+?)["']?"""
_DIRNAME = re.compile(rf"\$\(\s*dirname\s+(?:--\s+)?{_PATH}\s*\)")
_REAL_PATH = re.compile(rf"\$\(\s*(?:readlink\s+-[a-z]+|realpath)\s+(?:--\s+)?{_PATH}\s*\)")
_PWD = re.compile(
    rf"\$\(\s*cd\s+(?:-P\s+)?(?:--\s+)?{_PATH}\s*(?:>\s*/dev/null\s*)?&&\s*pwd(?:\s+-P)?\s*\)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DECLARING = {"export", "readonly", "local"}
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")


def is_script(path: Path) -> bool:
    """Whether a file is a script for an interpreter; false where it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(2) == b"#!"
    return False


def backend_directory(script: Path) -> Path | None:
    """The folder that a script names with ``--backend-directory``; None: none, or not to be read.

    Args:
        script: as it is found on PATH, where it may be a symbolic link.
    """
    found = None
    for words in _commands(script):
        for place, word in enumerate(words):
            name, _, value = word.partition("=")
            if name == _FLAG:
                found = value or "".join(words[place + 1 : place + 2])
    return None if not found or "$" in found or "`" in found else Path(found)


def executed(script: Path) -> Path | None:
    """The other ``tritonserver`` that a script starts; None: none, or not to be read."""
    for words in _commands(script):
        for word in words:
            path = Path(word)
            if path.name == "tritonserver" and path.is_absolute() and path.is_file():
                return path
    return None


def _commands(script: Path) -> Iterator[list[str]]:
    """Every command of a script as words, its variables filled in where they are known."""
    try:
        text = script.read_bytes()[:_LARGEST_BYTES].decode(errors="replace")
    except OSError:
        return
    variables = dict(os.environ)
    for line in text.replace("\\\n", " ").splitlines():
        plain = _expanded(line, script, variables)
        with suppress(ValueError):  # quotes that do not close: no command that can be read
            words = shlex.split(plain, comments=True)
            told = [word for word in words if word not in _DECLARING]
            if len(told) == 1 and (assigned := _ASSIGNMENT.fullmatch(told[0])):
                variables[assigned[1]] = assigned[2]
            yield words


def _expanded(line: str, script: Path, variables: Mapping[str, str]) -> str:
    """A line with its own path, its folder and known variables written out."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3] or "")
        return match[0] if known is None and match[2] is None else known or match[2] or ""

    said = re.sub(r"`([^`]*)`", r"$(\1)", line)
    said = _VARIABLE.sub(value, said)
    said = _REAL_SELF.sub(lambda _: str(script.resolve()), said)
    said = _OWN_FOLDER.sub(lambda _: str(script.parent), said)
    said = re.sub(_SELF, lambda _: str(script), said)
    before = ""
    while said != before:
        before = said
        said = _DIRNAME.sub(lambda match: os.path.dirname(match[1]) or ".", said)  # noqa: PTH120
        said = _REAL_PATH.sub(lambda match: os.path.realpath(match[1]), said)
        said = _PWD.sub(lambda match: os.path.abspath(match[1]), said)  # noqa: PTH100
    return said
