"""Pulls and rollbacks that meet on one host, and what its audit log says of them; no Triton."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from enginegate.errors import NotEverywhereError, PublishError
from enginegate.repository import AuditLog, Fleet, Layout
from enginegate.repository.history.audit import undelivered_changes
from enginegate.repository.recovery import OperationRecovery
from enginegate.repository.rollout import rollout_state
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.store.object_journal import ObjectJournal
from enginegate.repository.store.object_release import ObjectReleases
from tests.fakes.hosts import answer, live, problems
from tests.fakes.live_triton import FakeTriton

WAIT_S = 30.0
# Longer than a rollback takes to its check of what is here.
LOADS_S = 0.5


class _KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""


@dataclass
class Load:
    """Loads wait in it from when it is ``armed`` until they may go on."""

    armed: bool = False
    begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def wait(self):
        if self.armed:
            self.begun.set()
            assert self.goes_on.wait(WAIT_S)


@pytest.fixture
def load(monkeypatch):
    """Every server's loads."""
    made, real = Load(), FakeTriton.load

    def late(self, *given, **more):
        made.wait()
        real(self, *given, **more)

    monkeypatch.setattr(FakeTriton, "load", late)
    return made


@pytest.fixture
def here(host, package):
    """It promotes; its release 1 is live."""
    made = host("here")
    made.publish(package(1.0), expected=None)
    return made


@pytest.fixture
def alone(here, host, package):
    """A host with one server, at release 1 while 2 is live in storage."""
    made = host("there")
    made.pull()
    here.publish(package(2.0), expected=1)
    return made


@pytest.fixture
def there(alone):
    """The same as a fleet, whose window is longer than anybody waits."""

    def watch(_seconds, check):
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            check()
            time.sleep(0.02)

    return replace(alone, local=Fleet(alone.local, (), WAIT_S, watch))


def lines(host):
    return [(e.event, e.release, e.origin.rpartition(", ")[2]) for e in AuditLog(host.root).read()]


def told(host):
    return [
        (c.kind, c.before, c.after) for c in undelivered_changes(AuditLog(host.root).read(), None)
    ]


def test_release_left_while_it_was_fetched_is_not_loaded(there, monkeypatch):
    """Its window would watch what is live nowhere, and then every server would be told of it."""
    fetch = ObjectReleases.fetch

    def fetch_slowly(self, version, folder):
        copy = fetch(self, version, folder)
        assert there.rollback("digits").version == 1
        return copy

    with monkeypatch.context() as patch:
        patch.setattr(ObjectReleases, "fetch", fetch_slowly)
        with pytest.raises(
            PublishError, match=r"Release 2 of digits is no longer live in .* but 1"
        ):
            there.pull()

    assert (live(there), there.pull().version, answer(there)) == (1, 1, (1, 1.0))
    assert problems(there) == []


@pytest.mark.parametrize("way", ["pull", "publish"])
def test_canary_that_is_not_live_yet_is_cancelled_too(there, package, load, monkeypatch, way):
    """A rollback waits until it can be asked to end, and returns to what was live before."""
    monkeypatch.setattr(rollout_state, "_LOCK_TIMEOUT_S", WAIT_S)
    begin, before = there.pull, 1
    if way == "publish":
        replace(there, local=there.local.primary).pull()
        begin, before = partial(there.publish, package(3.0), expected=2), 2
    load.armed = True
    with ThreadPoolExecutor(1) as pool:
        rolling = pool.submit(begin)
        assert load.begun.wait(WAIT_S)
        threading.Timer(LOADS_S, load.goes_on.set).start()
        assert there.rollback("digits").version == before
        with pytest.raises(PublishError, match="asked for a rollback during the canary analysis"):
            rolling.result()

    assert (live(there), there.current().version) == (before, before)
    assert problems(there) == []


@pytest.mark.parametrize("which", ["alone", "there"])
def test_pull_that_began_before_the_lease_is_undone(request, load, monkeypatch, which):
    """The rollback had looked already, and nothing was under way then; a window is ended."""
    host, take = request.getfixturevalue(which), ObjectJournal.acquire
    with ThreadPoolExecutor(1) as pool:
        pulls = []

        def take_late(self, kind, version):
            monkeypatch.setattr(ObjectJournal, "acquire", take)
            load.armed = True
            pulls.append(pool.submit(host.pull))
            assert load.begun.wait(WAIT_S)
            threading.Timer(LOADS_S, load.goes_on.set).start()
            return take(self, kind, version)

        monkeypatch.setattr(ObjectJournal, "acquire", take_late)
        assert host.rollback("digits").version == 1
        error = pulls[0].exception()

    assert ("asked for a rollback" in str(error)) is (which == "there")
    assert (live(host), host.current().version, answer(host)) == (1, 1, (1, 1.0))
    assert problems(host) == []


def test_host_that_decided_records_it_where_nothing_changed(here, alone):
    """It had not pulled; the others only follow, so nobody else tells of it."""
    assert alone.rollback("digits", reason="the pager rang").version == 1
    here.pull()

    assert lines(alone) == [("published", 1, "replication"), ("rolled back", 1, "Python")]
    last = AuditLog(alone.root).read()[-1]
    assert last.why.startswith("the pager rang; release 2 was live in s3://")
    assert told(alone) == [("rolled back", 1, 1)]
    assert told(here)[2:] == []
    assert problems(alone) == []


def test_killed_replica_records_a_replication(alone, monkeypatch):
    """Killed between the commit point and the audit line, which recovery writes as followed."""

    def die(*_):
        raise _KilledError

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "note", die)
        patch.setattr(OperationRecovery, "end", lambda *_, **__: "")
        with pytest.raises(_KilledError):
            alone.pull()

    alone.recover()

    assert lines(alone) == [("published", 1, "replication"), ("published", 2, "replication")]
    assert told(alone) == []


def test_canary_that_did_not_pass_is_analysed_again(alone):
    """The bytes are here by the next pull; it brings no release to the servers without a window."""
    windows = []

    def watch(_seconds, _check):
        windows.append(live(alone))
        if len(windows) < 3:
            raise PublishError("3 requests failed")

    fleet = replace(alone, local=Fleet(alone.local, (), WAIT_S, watch))

    for _ in range(2):
        with pytest.raises(PublishError, match="3 requests failed"):
            fleet.pull()
        assert (live(fleet), answer(fleet)) == (1, (1, 1.0))
    assert (fleet.pull().version, windows) == (2, [2, 2, 2])

    assert (live(fleet), answer(fleet)) == (2, (2, 2.0))
    assert list(RolloutState(fleet.root).unfinished()) == []


def test_rollback_waits_for_no_analysis_and_no_dead_server(alone, here, package, tmp_path):
    """Also to a release that is newer than what is here, since its canary had not held here."""

    def refuse(_seconds, _check):
        raise PublishError("3 requests failed")

    (tmp_path / "own").mkdir()
    own = replace(alone.local, root=tmp_path / "own", client=FakeTriton(tmp_path / "own"))
    member = FleetServer("own", own, alone.local)
    member.replicate(Layout(alone.root, "digits").release(1))
    fleet = replace(alone, local=Fleet(alone.local, (member,), WAIT_S, refuse))
    with pytest.raises(PublishError, match="3 requests failed"):
        fleet.pull()
    here.publish(package(3.0), expected=2)
    own.client.dead = True

    with pytest.raises(NotEverywhereError, match=r"Release 2 .* is live again"):
        fleet.rollback("digits", to=2)

    assert (live(fleet), fleet.current().version, answer(fleet)) == (2, 2, (2, 2.0))
