"""Checks are kept, numbered and told; a rollback by a watch is claimed once."""

from datetime import UTC, datetime

from enginegate.evidence import Finding, Outcome
from enginegate.watch.log import WatchLog
from tests.fakes.watch_checks import watch_check
from validation.live import live_finding


def test_oldest_checks_are_deleted_and_numbers_are_never_reused(tmp_path, monkeypatch):
    """The oldest are forgotten; a damaged one is left out, and its number stays taken."""
    monkeypatch.setattr("enginegate.watch.log._MOST_CHECKS", 3)
    checks = WatchLog(tmp_path)
    for number in range(1, 6):
        checks.add(watch_check(number=number))
    (tmp_path / "00000005.json").write_text("{")

    assert [seen.number for seen in checks.read()] == [3, 4]
    assert checks.next_number() == 6


def test_checks_of_overlapping_watches_are_all_written(tmp_path):
    """Both took the next number when they began; the one that ends later gets another."""
    checks = WatchLog(tmp_path)

    kept = [
        checks.add(watch_check(number=1, at=datetime(2026, 11, day, tzinfo=UTC)))
        for day in (20, 21)
    ]

    assert [seen.number for seen in kept] == [1, 2]
    assert checks.read() == tuple(kept)


def test_release_is_rolled_back_by_a_watch_once(tmp_path):
    """The claim is taken once, and can be returned when the rollback was refused."""
    checks = WatchLog(tmp_path)

    assert not checks.rolled_back
    assert checks.claim_rollback()
    assert not checks.claim_rollback()
    assert checks.rolled_back
    checks.return_claim()
    assert checks.claim_rollback()


def test_check_as_text_names_its_problems():
    """One sentence, worst first, for logs, alerts and the audit log."""
    slow = live_finding("server_time", Outcome.FAILED, "mean 9 ms > 6 ms")
    found = Finding(gate="pending", scope="live", outcome=Outcome.INCONCLUSIVE, reason="unknown")

    assert str(watch_check(found, slow)) == (
        "check 1 of release 2 of digits: failed (server_time: mean 9 ms > 6 ms; pending: unknown)"
    )
