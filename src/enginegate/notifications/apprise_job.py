"""Sends messages through Apprise, as a program: JSON on its input, a line for each on its output.

Its input is a list of ``{"address", "title", "body", "type"}``, its output ``[PLACE, WHY]`` for
each as soon as it is known; WHY is empty where the message was taken, and never holds anything of
the address. -1 as PLACE is about all of them.
"""

import json
import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypedDict

_STATUS = re.compile(r"error=(\d{3})\b")
_MOST_AT_ONCE = 16


class Letter(TypedDict):
    """One message and where it goes; type is Apprise's."""

    address: str
    title: str
    body: str
    type: str


class _Heard(logging.Handler):
    """What Apprise says in each thread, as it tells its callers no more than yes or no."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[int, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        thread = threading.get_ident()
        self.said[thread] = f"{self.said.get(thread, '')}\n{record.getMessage()}"


def main() -> int:
    """Deliver what stands on the input."""
    letters: list[Letter] = json.load(sys.stdin)
    try:
        import apprise  # noqa: F401, PLC0415 - Prefect brings it; the only place that needs it
    except ImportError:
        _answer(-1, "Apprise is not installed here: pip install apprise")
        return 0
    heard = _Heard()
    for name in ("apprise", "urllib3", "requests"):
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.handlers = [heard] if name == "apprise" else [logging.NullHandler()]
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, max(1, len(letters)))) as threads:
        asked = {threads.submit(_send, each, heard): n for n, each in enumerate(letters)}
        for done in as_completed(asked):
            _answer(asked[done], done.result())
    return 0


def _answer(place: int, why: str) -> None:
    sys.stdout.write(f"{json.dumps([place, why])}\n")
    sys.stdout.flush()


def _send(letter: Letter, heard: _Heard) -> str:
    from apprise import Apprise, AppriseAsset, NotifyFormat, NotifyType  # noqa: PLC0415

    heard.said.pop(threading.get_ident(), None)
    # Icons are loaded from a server of Apprise's by whoever reads the message.
    asset = AppriseAsset(
        app_id="Enginegate",
        app_desc="Enginegate",
        app_url="",
        image_url_mask="",
        image_url_logo="",
        # A message may say \n; what Apprise makes of it is no message of ours.
        interpret_escapes=False,
        interpret_emojis=False,
        async_mode=False,
    )
    try:
        messenger = Apprise(asset=asset)
        if not messenger.add(letter["address"]):
            return "Apprise does not take this address"
        taken = messenger.notify(
            title=letter["title"],
            body=letter["body"],
            notify_type=NotifyType(letter["type"]),
            body_format=NotifyFormat.TEXT,
        )
    except Exception as error:  # noqa: BLE001 - any plugin, any fault; its text may hold the address
        return f"Apprise failed with {type(error).__name__}"
    if taken:
        return ""
    said = heard.said.get(threading.get_ident(), "")
    if status := _STATUS.search(said):
        return f"refused with HTTP {status.group(1)}"
    return "could not be reached" if "onnection" in said else "not taken"


if __name__ == "__main__":
    sys.exit(main())
