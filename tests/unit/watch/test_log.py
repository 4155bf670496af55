"""Looks are kept, numbered and told; a rollback by a watch is claimed once."""

from datetime import UTC, datetime

from enginegate.evidence import Finding, Outcome
from enginegate.watch.log import WatchLog
from tests.fakes.looks import look
from validation.live import live_finding


def test_looks_are_kept_in_number_and_their_numbers_never_come_back(tmp_path, monkeypatch):
    """The oldest are forgotten; a damaged one is left out, and its number stays taken."""
    monkeypatch.setattr("enginegate.watch.log._KEPT", 3)
    looks = WatchLog(tmp_path)
    for number in range(1, 6):
        looks.add(look(number=number))
    (tmp_path / "00000005.json").write_text("{")

    assert [seen.number for seen in looks.read()] == [3, 4]
    assert looks.next_number() == 6


def test_looks_of_watches_that_overlap_are_all_kept(tmp_path):
    """Both took the next number when they began; the one that ends later gets another."""
    looks = WatchLog(tmp_path)

    kept = [looks.add(look(number=1, at=datetime(2026, 11, day, tzinfo=UTC))) for day in (20, 21)]

    assert [seen.number for seen in kept] == [1, 2]
    assert looks.read() == tuple(kept)


def test_a_release_is_rolled_back_by_a_watch_once(tmp_path):
    """The claim is taken once, and can be returned when the rollback was refused."""
    looks = WatchLog(tmp_path)

    assert not looks.rolled_back
    assert looks.claim_rollback()
    assert not looks.claim_rollback()
    assert looks.rolled_back
    looks.return_claim()
    assert looks.claim_rollback()


def test_a_look_says_what_it_found():
    """One sentence, worst first, for logs, alerts and the audit log."""
    slow = live_finding("server_time", Outcome.FAILED, "mean 9 ms > 6 ms")
    found = Finding(gate="pending", scope="live", outcome=Outcome.INCONCLUSIVE, reason="unknown")

    assert str(look(found, slow)) == (
        "look 1 at release 2 of digits: failed (server_time: mean 9 ms > 6 ms; pending: unknown)"
    )
