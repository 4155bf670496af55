"""Checks at a live release, as small as tests need them."""

from datetime import UTC, datetime

from enginegate.watch.log import WatchCheck
from tests.fakes.evidence import sha


def watch_check(*findings, number=1, counts=(), **changes):
    fields = {
        "model": "digits",
        "version": 2,
        "release_sha256": sha("b"),
        "number": number,
        "at": datetime(2026, 11, 20, tzinfo=UTC),
        "intensive": True,
        "reading": None,
        "findings": findings,
        "counts": counts,
    }
    return WatchCheck(**(fields | changes))
