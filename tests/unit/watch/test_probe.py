"""What a check takes from Triton's counters and metrics."""

import socket
from types import SimpleNamespace

import pytest

from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.metrics import Metrics
from enginegate.triton.types import Statistics
from enginegate.watch.probe import ProbeResult, _Gauges, _Scrape, take_reading

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


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1"])
@pytest.mark.parametrize("early_is_wrong", [False, True])
def test_counter_that_is_no_count_is_not_believed(value, early_is_wrong):
    """The metrics then count as unread: no failure more is not zero failures more."""
    wrong = scraped(rejected=value, canceled=0, other=0)
    right = scraped(rejected=0, canceled=0, other=0)
    readings = (wrong, right) if early_is_wrong else (right, wrong)

    found = _Gauges.of(*readings, "digits", 2)

    assert "nv_inference_request_failure" in found.unread
    assert (found.failed, found.pending_before, found.pending) == (0, None, None)


def test_counter_of_another_version_may_be_no_count():
    """Only the series of the version that is checked are held against the metrics."""
    found = _Gauges.of(*[scraped(rejected=0, canceled=0, other="NaN")] * 2, "digits", 2)

    assert (found.unread, found.pending) == ("", 4)


@pytest.mark.parametrize(
    ("used", "total", "share"), [("5", "10", 0.5), ("NaN", "10", None), ("5", "NaN", None)]
)
def test_gpu_that_cannot_tell_its_memory_has_no_share(used, total, share):
    """Triton writes NaN for a figure that a GPU does not give."""
    text = f"nv_gpu_memory_used_bytes {used}\nnv_gpu_memory_total_bytes {total}"

    found = _Gauges.of(*[_Scrape(Metrics.parse(text))] * 2, "digits", 2)

    assert (found.gpu_memory_share, found.unread) == (share, "")


@pytest.fixture
def slow_counters(monkeypatch):
    """A server that counts one more answer at each reading after the first."""
    readings = iter(range(1000))

    def statistics(*_):
        count = min(next(readings), 4)
        return Statistics(requests=count, inferences=count, batches={1: count})

    monkeypatch.setattr(TritonClient, "statistics", statistics)


def probe(**changes):
    told = {"sent": 5, "failed": 1, "over": 1, "median_ms": 1, "slowest_ms": 1, "versions": ("2",)}
    return ProbeResult(**{**told, **changes})


@pytest.mark.usefixtures("slow_counters")
def test_answers_that_are_counted_late_are_in_the_look_that_got_them():
    """They must not be missing in this check, nor be taken for live requests in the next."""
    prober = SimpleNamespace(send=lambda *_: probe(), wait=lambda _: None)

    found = take_reading(LiveAddresses(grpc="127.0.0.1:1"), "m", 2, duration_s=0.0, prober=prober)

    assert (found.answered, found.live) == (4, 0)


def test_answers_of_other_versions_are_not_waited_for():
    """Its answers are not in the counters of the version that is looked at."""
    assert probe().answered_by(2) == 4
    assert probe().answered_by(1) == probe(versions=("1", "2")).answered_by(2) == 0
