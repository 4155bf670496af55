"""What is live of a model, as the watch's artifact says it."""

from datetime import timedelta

from enginegate.chained_log.hash_chain import GENESIS
from enginegate.evidence import Outcome
from enginegate.report import live_timeline
from enginegate.repository.history.audit import Event
from tests.fakes.evidence import WHEN, finding, release
from tests.fakes.watch_checks import watch_check

POLICY = "policies/digits.toml"


def event(what, sequence=1, **changes):
    fields = {
        "event": what,
        "model": "digits",
        "who": "ada",
        "why": "margins are wide",
        "origin": "ada@host",
        "sequence": sequence,
        "at": WHEN + timedelta(minutes=sequence),
        "previous": GENESIS,
    }
    return Event(**(fields | changes))


def failed(number=3):
    return watch_check(finding(Outcome.FAILED, gate="latency"), number=number)


def passed(number):
    return watch_check(finding(), number=number)


def shown(*checks, events=(), live=None):
    return live_timeline("digits", live or release(), events, checks, policy=POLICY)


def test_state_stays_the_same_until_something_happens():
    """Two quiet checks are one entry of the history; a failed one begins another."""
    first = shown(passed(1))
    later = shown(passed(1), passed(2))

    assert first.state == later.state
    assert first.state == (
        "**No promise broken:** release 2 of digits (digits v1 as onnxruntime-int8) is live"
    )
    assert "check 2 **passed**" in later.markdown
    assert shown(passed(1), failed(2)).state != first.state


def test_broken_promise_stays_until_acknowledged():
    """Checks that pass afterwards do not hide it; the command to run is there."""
    before = shown(failed(3), passed(4))

    assert before.word == "promise broken at check 3, not acknowledged"
    assert before.state.startswith("**Promise broken at check 3, not acknowledged:**")
    assert f"enginegate acknowledge {POLICY} --release 2 --reason WHY" in before.markdown
    assert before.state == shown(failed(3), passed(4), passed(5)).state

    log = [
        event("promise broken", release=2, check=3, who="watch", operation="check"),
        event("acknowledged", 2, release=2, check=3, who="grace", why="a burst"),
    ]
    after = shown(passed(4), events=log)

    assert after.word == "broken promise acknowledged by grace"
    assert "enginegate acknowledge" not in after.markdown
    assert "**acknowledged release 2, check 3** by grace: a burst" in after.markdown


def test_rolled_back_release_is_still_named():
    """What is live now kept its promise; the one before did not, and nobody has said a word."""
    log = [
        event("published", release=1),
        event("published", 2, release=2),
        event("promise broken", 3, release=2, check=3, who="watch", operation="check"),
        event("rolled back", 4, release=1, who="watch"),
    ]

    found = shown(events=log, live=release(version=1))

    assert found.word == "promise of release 2 broken at check 3, not acknowledged"
    assert found.state.endswith("is live, rolled back 2026-11-20 12:04 UTC")
    assert "--release 2" in found.markdown
    timeline = found.markdown.partition("## Timeline")[2].splitlines()
    assert [line.split("**")[1] for line in timeline if line.startswith("- ")] == [
        "rolled back release 1",
        "promise broken release 2, check 3",
        "published release 2",
        "published release 1",
    ]


def test_nothing_live_and_not_measured_are_states():
    """Neither is a kept promise."""
    nothing = live_timeline("digits", None, (), (), policy=POLICY)
    away = shown(watch_check(finding(Outcome.ERRORED, gate="measured")))

    assert nothing.state == "**Nothing live:** no release of digits is live"
    assert (shown().word, away.word) == ("not checked yet", "not measured")


def test_words_of_the_log_are_escaped():
    """A reason cannot bring a link or HTML onto Prefect's page."""
    found = shown(events=[event("approved", why="<b>yes</b> [here](http://x)\n# big")])

    assert r"\<b>yes\</b> \[here\](http://x) # big" in found.markdown
