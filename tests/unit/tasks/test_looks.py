"""The number of a look is its own before anything is done about it, and names no other look."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.atomic_io import file_lock
from enginegate.errors import EnginegateError, TrackingError
from enginegate.policy.operating import Watch
from enginegate.tracking import Tracker
from enginegate.watch.log import SampledTraffic, WatchLog
from enginegate.workspace import Workspace, now
from tasks.watch import keep_look, take_look
from tests.fakes.evidence import release, sha

RELEASE = release()
NOWHERE = SimpleNamespace(repository=Path("/nonexistent"))
TABLES = SimpleNamespace(watch=Watch(), model=RELEASE.model, target=NOWHERE)


@pytest.fixture
def looks(tmp_path, monkeypatch):
    """Where looks at the live release are kept; MLflow does not answer."""

    def refuse(*_):
        raise TrackingError("nothing answers")

    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    monkeypatch.setattr(Tracker, "log_check", refuse)
    monkeypatch.setattr(
        "tasks.watch._current", lambda _: SimpleNamespace(version=2, changed_at=now())
    )
    monkeypatch.setattr("tasks.watch._views", lambda *_: ())
    return WatchLog.at(Workspace.here(), RELEASE)


def taken():
    return take_look.fn(TABLES, RELEASE, SampledTraffic(), Workspace.here())


def test_what_is_alerted_is_the_look_that_is_kept(looks, monkeypatch):
    """Another watch keeps one meanwhile: the later one has the next number when it is acted on."""
    meanwhile = []

    def views(*_):
        monkeypatch.setattr("tasks.watch._views", lambda *_: ())
        meanwhile.append(taken())
        return ()

    monkeypatch.setattr("tasks.watch._views", views)

    look = taken()
    kept = keep_look.fn(
        TABLES, RELEASE, look.model_copy(update={"action": "alert"}), Workspace.here()
    )

    assert (meanwhile[0].number, look.number, kept.number) == (1, 2, 2)
    assert looks.read() == (*meanwhile, kept)
    assert kept.action == "alert"


def test_a_look_that_cannot_be_kept_is_acted_on_all_the_same(looks, monkeypatch):
    """A watch that hangs, and says so, keeps nobody from going back; what cannot be kept is told.

    And a folder that nobody can write to is one more reason, in words of this program.
    """
    monkeypatch.setattr("enginegate.watch.log._LOCK_TIMEOUT_S", 0.0)
    with file_lock(looks.folder / ".lock"):
        look = taken()
        with pytest.raises(EnginegateError, match=r"keeping a look in .* by pid"):
            keep_look.fn(TABLES, RELEASE, look, Workspace.here())
    assert looks.read() == ()
    assert keep_look.fn(TABLES, RELEASE, look, Workspace.here()) == look

    with pytest.raises(EnginegateError, match="cannot be kept"):
        WatchLog(looks.folder / ".lock").add(look)


def test_looks_at_another_promise_do_not_count(looks, monkeypatch):
    """What was slower than the old SLO says nothing about the new one; numbers go on."""
    seen = []

    def views(_rules, _held, number, past):
        seen.append((number, [each.number for each in past]))
        return ()

    monkeypatch.setattr("tasks.watch._views", views)
    first = taken()
    looks.add(first.model_copy(update={"scorecard": sha("9"), "number": 2, "at": now()}))

    third = taken()

    assert seen == [(1, []), (3, [1])]
    assert (first.scorecard, third.number) == (RELEASE.scorecard_sha256, 3)
