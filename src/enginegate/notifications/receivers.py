"""Where messages go: Apprise's addresses, which hold secrets, and their way there.

Apprise runs in a process of its own for each delivery. Its log, and that of the libraries below it,
hold parts of addresses; a receiver may answer byte by byte; and neither can be ended within this
process. What comes back is one word for each receiver.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.errors import InputError
from enginegate.notifications.notice import Notice

SETTING = "ENGINEGATE_NOTIFY"
_JOB = Path(__file__).with_name("apprise_job.py")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://.")
_FILE_BEGINS = ("/", "~")
# A suspended promotion or a watch waits for a dead receiver so long, once; Apprise itself starts in
# one second on a quiet machine, in five on a busy one, and gives a connection four.
_DEADLINE_S = 20.0
# The shortest that common messengers take is 2,000, of which the title is a part.
_LONGEST_BODY = 1800
_MOODS = ("failure", "warning", "info", "success")


@dataclass(frozen=True, slots=True)
class Message:
    """What one receiver gets at one time; mood is Apprise's type."""

    title: str
    body: str
    mood: str = "info"


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """Whether a receiver took a message.

    Attributes:
        receiver: its place among the addresses and its kind, never its address.
        why: it did not; empty: it did.
    """

    receiver: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Receivers:
    """Apprise's addresses, which nobody prints.

    Attributes:
        origin: where they were found.
    """

    addresses: tuple[str, ...] = field(repr=False)
    origin: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Each by its place and its kind, e.g. ``1 (slack)``."""
        return tuple(
            f"{place} ({address.partition('://')[0].lower()})"
            for place, address in enumerate(self.addresses, start=1)
        )

    def send(self, messages: Mapping[str, Message]) -> tuple[ReceiverAnswer, ...]:
        """Send each receiver its message, all at the same time; never raises, waits for seconds.

        Args:
            messages: by the receiver's label.
        """
        chosen = [
            (label, address)
            for label, address in zip(self.labels, self.addresses, strict=True)
            if label in messages
        ]
        letters = [
            {
                "address": address,
                "title": messages[label].title,
                "body": messages[label].body,
                "type": messages[label].mood,
            }
            for label, address in chosen
        ]
        said = _run(letters) if letters else {}
        missing = f"no answer in {_DEADLINE_S:.0f} s"
        return tuple(
            ReceiverAnswer(label, said.get(place, said.get(-1, missing)))
            for place, (label, _) in enumerate(chosen)
        )


def receivers_of_environment() -> Receivers | None:
    """Those of ENGINEGATE_NOTIFY: addresses, or the path of a file with them; None: it is not set.

    Raises:
        InputError: the file cannot be read, or something in there is no address.
    """
    text = os.environ.get(SETTING, "").strip()
    if not text:
        return None
    if text.startswith(_FILE_BEGINS):
        path = Path(text).expanduser()
        try:
            return receivers_of_text(path.read_text(), f"{path}, which {SETTING} names")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InputError(f"{SETTING} names {path}, which cannot be read: {why}.") from None
    return receivers_of_text(text, SETTING)


def receivers_of_text(text: str, origin: str) -> Receivers:
    """Addresses with white space between them; a line that begins with # is a comment.

    Raises:
        InputError: something is no address, or there is none. The message does not repeat it.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    addresses = tuple(address for line in lines for address in line.split())
    wrong = [n for n, each in enumerate(addresses, start=1) if not _SCHEME.match(each)]
    if wrong or not addresses:
        which = (
            f"number {wrong[0]} of {len(addresses)} has no KIND:// at its beginning. It is not "
            "repeated here, as it may be a secret."
            if wrong
            else "it holds none."
        )
        raise InputError(
            f"{origin} must hold addresses of Apprise, such as slack://TOKENS or "
            f"mailto://USER:PASSWORD@HOST, with white space between them: {which}"
        )
    return Receivers(addresses, origin)


def combined(notices: Sequence[Notice]) -> Message:
    """One message of all that is to be said, the worst first, then the oldest.

    Raises:
        ValueError: there is nothing to say.
    """
    first, *others = sorted(notices, key=lambda each: (_MOODS.index(each.mood), each.at))
    if not others:
        return Message(first.title, _cut(first.body), first.mood)
    parts = [f"{notice.title}\n{notice.body}" for notice in (first, *others)]
    if sum(map(len, parts)) > _LONGEST_BODY:
        parts = [f"- {notice.title}" for notice in (first, *others)]
        parts.append("`enginegate status` has the rest.")
    return Message(f"{first.title}, and {len(others)} more", _cut("\n\n".join(parts)), first.mood)


def _cut(body: str) -> str:
    return body if len(body) <= _LONGEST_BODY else f"{body[: _LONGEST_BODY - 2]} …"


def _run(letters: Sequence[Mapping[str, str]]) -> dict[int, str]:
    """Why each was not delivered, empty where it was; -1: why none was."""
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
            [sys.executable, "-P", str(_JOB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        return {-1: f"a process for Apprise could not be started: {error.strerror}"}
    with process:
        try:
            out, _ = process.communicate(json.dumps(letters), timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    said = dict(_lines(out))
    if process.returncode > 0 and not said:
        said[-1] = f"Apprise could not be used (its process ended with {process.returncode})"
    return said


def _lines(out: str) -> list[tuple[int, str]]:
    found = []
    for line in out.splitlines():
        try:
            place, why = json.loads(line)
        except ValueError:  # cut by the end of its process
            continue
        found.append((int(place), str(why)))
    return found
