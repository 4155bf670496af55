"""What a look takes from Triton's metrics."""

import socket

from enginegate.triton.live import LiveAddresses
from enginegate.triton.look import _Gauges, _Scrape
from enginegate.triton.metrics import Metrics

_TEXT = """
nv_inference_request_failure{{model="digits",reason="REJECTED",version="2"}} {rejected}
nv_inference_request_failure{{model="digits",reason="CANCELED",version="2"}} {canceled}
nv_inference_request_failure{{model="digits",reason="BACKEND",version="1"}} {other}
nv_inference_pending_request_count{{model="digits",version="1"}} {other}
nv_inference_pending_request_count{{model="digits",version="2"}} 4
"""


def scraped(**values):
    return _Scrape(Metrics.parse(_TEXT.format(**values)))


def test_failures_are_those_of_the_live_version_that_nobody_cancelled():
    """Another version's faults, and callers that hung up, are not the release's."""
    early = scraped(rejected=3, canceled=5, other=7)
    late = scraped(rejected=10, canceled=105, other=207)

    found = _Gauges.of(early, late, "digits", 2)

    assert (found.failed, found.pending_before, found.pending) == (7, 4, 4)
    assert found.unread == ""


def test_metrics_that_are_named_and_do_not_answer_are_told_from_none():
    """Nobody said where they are: nothing to tell. Somebody did: that is said."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = LiveAddresses(grpc="h:1", metrics=f"127.0.0.1:{unused.getsockname()[1]}")
        unnamed, unread = _Scrape.of(LiveAddresses(grpc="h:1")), _Scrape.of(dead)

    assert (unnamed.metrics, unnamed.unread) == (None, "")
    found = _Gauges.of(scraped(rejected=0, canceled=0, other=0), unread, "digits", 2)
    assert "did not answer" in found.unread
    assert (found.failed, found.pending) == (0, None)
