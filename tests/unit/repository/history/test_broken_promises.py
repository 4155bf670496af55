"""A failed check stays with its release until a person acknowledges it; the audit log decides."""

import pytest

from enginegate.errors import InputError
from enginegate.evidence import Finding, Outcome
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.history.broken_promises import (
    Acknowledgement,
    acknowledge,
    broken_promises,
    record_broken,
    shown_state,
)
from tests.fakes.watch_checks import watch_check

ADA = Acknowledgement("ada", "a noisy neighbour, moved")


def found(outcome, gate="server_time"):
    return Finding(
        gate=gate,
        scope="live",
        outcome=outcome,
        reason="by the counters",
        value=7.5,
        limit=3.0,
        relation="<=",
        unit="ms",
    )


def check(outcome, number, **changes):
    return watch_check(found(outcome), number=number, **changes)


FAILED = check(Outcome.FAILED, 1)


def state(root, *checks):
    return shown_state(AuditLog(root).read(), "digits", 2, checks)


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.ERRORED])
def test_failed_stays_until_it_is_acknowledged(tmp_path, outcome):
    """Whatever the checks after it say; then the newest one is shown again."""
    after = check(outcome, 2)
    record_broken(tmp_path, FAILED)

    before = state(tmp_path, FAILED, after)
    (done,) = acknowledge(tmp_path, "digits", ADA)

    assert (before.word, done.check) == ("failed", 1)
    assert "promised <= 3 ms, measured 7.5 ms" in str(before)
    assert f"Newest: check 2 of release 2 of digits: {outcome.word}" in str(before)
    assert state(tmp_path, FAILED, after).word == outcome.word


def test_acknowledged_check_names_person_and_reason(tmp_path):
    """The newest check is the one that failed: it says so, and that somebody knows."""
    acknowledge(tmp_path, "digits", ADA, [FAILED])

    shown = state(tmp_path, FAILED)

    assert (shown.word, shown.broken) == ("failed", ())
    assert "Acknowledged by ada: a noisy neighbour, moved" in str(shown)
    told = [(e.event, e.release, e.check, e.who, e.why) for e in AuditLog(tmp_path).read()]
    assert told[0][:3] == ("promise broken", 2, 1)
    assert told[1] == ("acknowledged", 2, 1, "ada", "a noisy neighbour, moved")


def test_later_failed_check_needs_its_own_acknowledgement(tmp_path):
    """An acknowledgement covers what was there when it was written, and nothing after it."""
    acknowledge(tmp_path, "digits", ADA, [FAILED])
    again = check(Outcome.FAILED, 3)
    record_broken(tmp_path, again)

    (waiting,) = state(tmp_path, FAILED, check(Outcome.PASSED, 2), again).broken

    assert waiting.check == 3


def test_the_order_is_the_logs_and_no_clocks_or_workspaces(tmp_path):
    """A workspace that was lost counts its checks from 1 again: that one is not acknowledged."""
    acknowledge(tmp_path, "digits", ADA, [check(Outcome.FAILED, 9)])
    record_broken(tmp_path, FAILED)

    assert [each.check for each in state(tmp_path, FAILED).broken] == [1]


def test_unlogged_failed_check_counts(tmp_path):
    """The repository was busy or full: its file says it, and an acknowledgement writes both."""
    unwritten = check(Outcome.FAILED, 1)

    assert state(tmp_path, unwritten, check(Outcome.PASSED, 2)).word == "failed"
    acknowledge(tmp_path, "digits", ADA, [unwritten])

    assert [e.event for e in AuditLog(tmp_path).read()] == ["promise broken", "acknowledged"]
    assert state(tmp_path, unwritten, check(Outcome.PASSED, 2)).word == "passed"


def test_failed_check_is_recorded_once(tmp_path):
    """Also by two watches, or one that tries again."""
    record_broken(tmp_path, FAILED)
    record_broken(tmp_path, FAILED)

    assert len(AuditLog(tmp_path).read()) == 1


def test_errored_server_hides_no_broken_promise(tmp_path):
    """A check that is errored as a whole still broke the promise, by a finding that is certain."""
    both = watch_check(found(Outcome.FAILED), found(Outcome.ERRORED, "measured"), number=1)

    assert both.outcome is Outcome.ERRORED
    assert state(tmp_path, both, check(Outcome.PASSED, 2)).word == "failed"


def test_other_releases_keep_theirs(tmp_path):
    """Naming a release acknowledges that one only; every release is named in the log."""
    record_broken(tmp_path, FAILED)
    record_broken(tmp_path, check(Outcome.FAILED, 1, version=3, release_sha256="c" * 64))

    acknowledge(tmp_path, "digits", Acknowledgement("ada", "known for long", release=3))

    known = broken_promises(AuditLog(tmp_path).read(), "digits")
    assert [(b.release, b.acknowledged is None) for b in known] == [(2, True), (3, False)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (ADA, "waits for an acknowledgement"),
        (Acknowledgement("ada", "ok"), "a reason"),
        (Acknowledgement(" ", "looked into it"), "a name"),
        (Acknowledgement("ada", "looked into it", release=7), "release 7 of digits"),
    ],
)
def test_acknowledgement_needs_name_reason_and_check(tmp_path, given, said):
    """Else an empty acknowledgement would lie in wait for the next failed check."""
    with pytest.raises(InputError, match=said):
        acknowledge(tmp_path, "digits", given)

    assert AuditLog(tmp_path).read() == ()
