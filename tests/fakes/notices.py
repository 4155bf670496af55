"""Notices as small as tests need them."""

from datetime import UTC, datetime, timedelta

from enginegate.notifications import Notice

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def notice(number, **changes):
    fields = {
        "key": f"key {number}",
        "subject": "watch",
        "place": "/live",
        "model": "digits",
        "mood": "info",
        "title": f"title {number}",
        "body": f"body {number}",
        "at": NOON + timedelta(seconds=number),
    }
    return Notice(**(fields | changes))
