"""The number of a check is its own before anything is done about it, and names no other check."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.atomic_io import file_lock
from enginegate.errors import EnginegateError, TrackingError
from enginegate.policy.operating import Watch
from enginegate.tracking import Tracker
from enginegate.watch.log import SampledTraffic, WatchLog
from enginegate.workspace import Workspace, now
from tasks.watch import check_release, record_check
from tests.fakes.evidence import release, sha

RELEASE = release()
NOWHERE = SimpleNamespace(repository=Path("/nonexistent"))
TABLES = SimpleNamespace(watch=Watch(), model=RELEASE.model, target=NOWHERE)


@pytest.fixture
def checks(tmp_path, monkeypatch):
    """Where checks at the live release are kept; MLflow does not answer."""

    def refuse(*_):
        raise TrackingError("nothing answers")

    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    monkeypatch.setattr(Tracker, "log_check", refuse)
    monkeypatch.setattr(
        "tasks.watch._current", lambda _: SimpleNamespace(version=2, changed_at=now())
    )
    monkeypatch.setattr("tasks.watch._check_servers", lambda *_: ())
    return WatchLog.at(Workspace.here(), RELEASE)


def run_check():
    return check_release.fn(TABLES, RELEASE, SampledTraffic(), Workspace.here())


def test_alert_names_the_check_that_is_recorded(checks, monkeypatch):
    """Another watch keeps one meanwhile: the later one has the next number when it is acted on."""
    meanwhile = []

    def check_servers(*_):
        monkeypatch.setattr("tasks.watch._check_servers", lambda *_: ())
        meanwhile.append(run_check())
        return ()

    monkeypatch.setattr("tasks.watch._check_servers", check_servers)

    check = run_check()
    kept = record_check.fn(
        TABLES, RELEASE, check.model_copy(update={"action": "alert"}), Workspace.here()
    )

    assert (meanwhile[0].number, check.number, kept.number) == (1, 2, 2)
    assert checks.read() == (*meanwhile, kept)
    assert kept.action == "alert"


def test_check_that_cannot_be_written_is_acted_on_all_the_same(checks, monkeypatch):
    """A watch that hangs, and says so, keeps nobody from going back; what cannot be kept is told.

    And a folder that nobody can write to is one more reason, in words of this program.
    """
    monkeypatch.setattr("enginegate.watch.log._LOCK_TIMEOUT_S", 0.0)
    with file_lock(checks.folder / ".lock"):
        check = run_check()
        with pytest.raises(EnginegateError, match=r"keeping a check in .* by pid"):
            record_check.fn(TABLES, RELEASE, check, Workspace.here())
    assert checks.read() == ()
    assert record_check.fn(TABLES, RELEASE, check, Workspace.here()) == check

    with pytest.raises(EnginegateError, match="cannot be kept"):
        WatchLog(checks.folder / ".lock").add(check)


def test_checks_against_another_promise_do_not_count(checks, monkeypatch):
    """What was slower than the old SLO says nothing about the new one; numbers go on."""
    seen = []

    def check_servers(_rules, _held, number, past):
        seen.append((number, [each.number for each in past]))
        return ()

    monkeypatch.setattr("tasks.watch._check_servers", check_servers)
    first = run_check()
    checks.add(first.model_copy(update={"scorecard": sha("9"), "number": 2, "at": now()}))

    third = run_check()

    assert seen == [(1, []), (3, [1])]
    assert (first.scorecard, third.number) == (RELEASE.scorecard_sha256, 3)
