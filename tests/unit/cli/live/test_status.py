"""`status` on the terminal: states of releases, the promise beside what is measured, at widths."""

import io
from datetime import timedelta

import pytest
from rich.console import Console

from enginegate.cli.live.status import print_status, release_states
from enginegate.cli.output.records import (
    BrokenPromiseStatus,
    MeasuredLive,
    ModelStatus,
    ReleaseStatus,
    ServerStatus,
    WaitingScorecard,
)
from enginegate.decision import Promise
from enginegate.evidence import Outcome
from enginegate.repository.history.audit import Event
from enginegate.repository.store.layout import Current
from enginegate.watch.probe import LiveReading, ProbeResult
from tests.fakes.evidence import WHEN, sha

PROMISE = Promise(p99_ms=20, throughput_per_s=50, slo_p99_ms=25, p50_ms=4, server_ms=3)
APPROVE = "enginegate approve 0123456789ab --reason WHY"
ACKNOWLEDGE = "enginegate acknowledge policies/digits.toml --release 2 --reason WHY"


def events(*happened, model="digits"):
    """Lines of an audit log, a minute apart."""
    return [
        Event(
            event=event,
            model=model,
            who="ada",
            why="why",
            origin="here",
            release=release,
            sequence=place,
            at=WHEN + timedelta(minutes=place),
            previous=sha("0"),
        )
        for place, (event, release) in enumerate(happened)
    ]


def pointer(version, standby=None):
    return Current(version=version, standby=standby, known=(version,), changed_at=WHEN)


@pytest.mark.parametrize(
    ("happened", "current", "states"),
    [
        ([("published", 1)], pointer(1), {1: "live"}),
        (
            [("published", 1), ("published", 2)],
            pointer(2, standby=1),
            {1: "standing by", 2: "live"},
        ),
        ([("published", 1), ("published", 2)], pointer(2), {1: "replaced", 2: "live"}),
        (
            [("published", 1), ("published", 2), ("rolled back", 1)],
            pointer(1),
            {1: "live", 2: "rolled back"},
        ),
        ([("published", 1), ("withdrawn", 1)], None, {1: "withdrawn"}),
        # The log cannot be read: the live pointer has the last word.
        ([], pointer(2, standby=1), {1: "standing by", 2: "live"}),
        # Another model's events are not this one's.
        ([("published", 1)], None, {1: "replaced"}),
    ],
)
def test_state_of_each_release(happened, current, states):
    """From the audit log and the live pointer."""
    found = release_states("digits", current, events(*happened))

    assert {release: state for release, (state, _) in found.items()} == states
    assert release_states("other", None, events(*happened)) == {}


def release(number, state):
    return ReleaseStatus(
        release=number,
        state=state,
        candidate="onnxruntime-int8",
        model_uri=f"models:/digits/{number}",
        published_at=WHEN,
        approved_by="ada [bold]",
        reason="margins are wide",
        since=WHEN,
        engine_sha256=sha("e"),
        release_sha256=sha("a"),
        has_bytes=True,
    )


def status(**changes):
    reading = LiveReading(
        lasted_s=10,
        answered=120,
        failed=0,
        server_ms=3.2,
        queue_ms=0.1,
        probe=ProbeResult(sent=20, failed=0, over=1, median_ms=4.5, slowest_ms=30, versions=("2",)),
    )
    fields = {
        "policy": "policies/digits.toml",
        "model": "digits",
        "repository": "/srv/models",
        "state": "live",
        "words": "live: release 2, onnxruntime-int8, models:/digits/2",
        "live": release(2, "live"),
        "watch": "passed",
        "promise": PROMISE,
        "promised_by": sha("5"),
        "measured": MeasuredLive(
            check=7, at=WHEN, outcome=Outcome.PASSED, reading=reading, findings=()
        ),
        "broken": (),
        "releases": (release(2, "live"), release(1, "standing by")),
        "servers": (ServerStatus(name="", address="127.0.0.1:8001", state="answers"),),
        "waiting": (
            WaitingScorecard(
                scorecard=sha("0"),
                state="waits for a decision",
                sentence="waits for a decision: 0123456789ab (models:/digits/3)",
                next=APPROVE,
            ),
        ),
        "problems": (),
    }
    return ModelStatus(**(fields | changes))


def printed(found, width):
    console = Console(width=width, file=io.StringIO())
    print_status(found, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 109, 160])
def test_nothing_to_copy_is_cut(width):
    """Digests, dates and commands, at the widths of real terminals."""
    broken = BrokenPromiseStatus(release=2, check=7, at=WHEN, why="server_time: promised <= 3 ms")
    text = printed(status(broken=(broken,)), width)

    for whole in (sha("e"), sha("a"), "2026-11-20 12:00:00", APPROVE, ACKNOWLEDGE, "standing by"):
        assert whole in text
    assert "ada [bold]" in text


def test_promise_stands_beside_what_is_measured():
    """In one table, which fits 60 columns."""
    rows = [line.split() for line in printed(status(), 60).splitlines()]

    assert ["p50", "4", "ms", "4.5", "ms"] in rows
    assert ["on", "server", "3", "ms", "3.2", "ms"] in rows
    assert ["p99", "20", "ms,", "SLO", "25", "ms", "1", "of", "20", "over", "25", "ms"] in rows
    assert ["requests", "50/s", "12/s", "arrived,", "0", "failed"] in rows


def test_before_the_first_check_the_command_is_named():
    """Nothing was measured yet."""
    text = printed(status(measured=None, watch="not checked"), 80)

    assert "not checked (no check yet)" in text
    assert "enginegate watch policies/digits.toml --once" in text


def test_nothing_live_shows_history():
    """Of releases that were withdrawn."""
    nothing = {"live": None, "promise": None, "measured": None, "watch": None}
    text = printed(
        status(
            state="withdrawn", words="nothing is live", releases=(release(1, "withdrawn"),)
        ).model_copy(update=nothing),
        80,
    )

    assert "nothing is live" in text
    assert "withdrawn" in text
