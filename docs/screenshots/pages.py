# ruff: noqa: INP001
"""Pictures of decision pages: the example decisions, wide, on a phone, in the dark and in print."""

import tempfile
from pathlib import Path

from docs.screenshots.camera import Camera
from tests.fakes.decision_cases import decision_cases

_PHONE = (400, 900)
_USUAL = ("clear-win", "tie", "failure", "rolled-back")
_DARK = "clear-win"


def take_pages(shown: Camera) -> None:
    """What the four usual decisions look like when their page is opened, and when it is printed."""
    with tempfile.TemporaryDirectory(prefix="pages-") as folder:
        addresses = {}
        for case in decision_cases():
            path = Path(folder) / f"{case.name}.html"
            path.write_text(case.page, encoding="utf-8")
            addresses[case.name] = path.as_uri()
        for name in _USUAL:
            shown.open(addresses[name])
            shown.take(f"decision-{name}", settle_s=0.3)
            shown.take_print(f"decision-{name}-print")
        shown.open(addresses[_DARK], scheme="dark")
        shown.take(f"decision-{_DARK}-dark", settle_s=0.3)
        phones = []
        for address in addresses.values():
            shown.open(address, width=_PHONE[0], height=_PHONE[1])
            phones.append(shown.look(settle_s=0.3))
        shown.write_beside("decision-phone", phones)
