"""What a roll-out takes back, to which release, and how somebody can end it early."""

import os
import threading
from dataclasses import replace

import pytest

from enginegate import atomic_io
from enginegate.errors import NotEverywhereError, PublishError, RepositoryError
from enginegate.repository import Layout, LiveRepository
from enginegate.repository.deploy.gpu_room import GpuRoom
from enginegate.repository.history.journal import Journal
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.repository.rollout.target import FleetServer
from enginegate.repository.store.package import ImportedRelease
from enginegate.repository.verify import verify
from tests.fakes.live_triton import FakeTriton


@pytest.fixture
def own(repository, tmp_path):
    """A server with a repository of its own."""
    root = tmp_path / "own" / "live"
    root.mkdir(parents=True)
    return FleetServer("own", replace(repository, root=root, client=FakeTriton(root)), repository)


@pytest.fixture
def elsewhere(tmp_path, package):
    """Four releases of another repository."""
    root = tmp_path / "elsewhere" / "live"
    root.mkdir(parents=True)
    there = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    made = [there.publish(package(float(n)), expected=n - 1 or None) for n in (1, 2, 3, 4)]
    return [ImportedRelease(release, root) for release in made]


def live(*repositories):
    found = [Layout(each.root, "digits").current() for each in repositories]
    return [current.version if current else None for current in found]


def fail(_seconds, _check):
    raise RepositoryError("7 of 100 requests failed on it")


def test_canary_goes_back_to_the_release_before_it(repository, own, elsewhere):
    """Not to what its manifest says it replaced where it was first published."""
    fleet = Fleet(repository, (own,), analyse_canary=fail)

    with pytest.raises(PublishError, match="Nothing is live again on: the primary"):
        fleet.publish(elsewhere[1], expected=None)
    assert live(repository, own.repository) == [None, None]

    replace(fleet, analyse_canary=None).publish(elsewhere[0], expected=None)
    with pytest.raises(PublishError, match="Release 1 is live again on: the primary"):
        fleet.publish(elsewhere[3], expected=1)
    assert live(repository, own.repository) == [1, 1]
    assert fleet.recover() == ()


def test_only_the_canary_is_rolled_back(repository, own, package):
    """Cut short on the canary, and by now something else is live on the primary: that stays."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)
    repository.publish(package(3.0), expected=2)
    RolloutState(fleet.root).note(RolloutProgress(model="digits", before=2, canary=3))
    repository.rollback("digits", 1)

    fleet.recover()

    assert live(repository, own.repository) == [1, 1]
    assert list(RolloutState(fleet.root).unfinished()) == []


@pytest.mark.parametrize("dead", [False, True])
def test_server_that_cannot_replicate_after_a_kill(repository, own, package, dead):
    """It sends all back, as it would have done in the roll-out; a dead one says nothing."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    RolloutState(fleet.root).note(
        RolloutProgress(model="digits", before=1, canary=2, canary_passed=True)
    )
    own.repository.client.dead = dead
    own.repository.client.refuses = {2}

    said = "\n".join(fleet.recover())

    assert "own could not be: " in said
    assert ("Release 1 is live again on: own, the primary." in said) is not dead
    assert live(repository, own.repository) == ([2, 1] if dead else [1, 1])
    assert list(RolloutState(fleet.root).unfinished()) == []


@pytest.mark.parametrize("expected", [None, 3])
def test_rollback_goes_back_once(repository, own, package, expected):
    """Recovery withdrew the release for one server's sake: that is what was asked for."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)
    repository.publish(package(3.0), expected=2)
    RolloutState(fleet.root).note(
        RolloutProgress(model="digits", before=2, canary=3, canary_passed=True)
    )
    own.repository.client.refuses = {3}

    assert fleet.rollback("digits", expected=expected).version == 2

    assert live(repository, own.repository) == [2, 2]


def test_progress_that_ends_while_it_is_read_is_over(repository, monkeypatch):
    """The roll-out ended in that moment; a rollback asks for it all the time."""
    rollouts = RolloutState(repository.root)
    rollouts.note(RolloutProgress(model="digits", canary=1))
    read = RolloutProgress.read

    def late(path):
        path.unlink()
        return read(path)

    monkeypatch.setattr(RolloutProgress, "read", late)

    assert rollouts.of("digits") is None


def test_half_written_progress_is_swept(repository, own, package):
    """A process died while it wrote down how far the roll-out was."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    before = sorted(fleet.root.iterdir())

    def die(*_given, **_named):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_io.Path, "replace", die)
        patch.setattr(atomic_io.Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            RolloutState(fleet.root).note(RolloutProgress(model="digits", before=1, canary=2))
    assert len(list(fleet.root.iterdir())) == len(before) + 1

    fleet.recover()

    assert sorted(fleet.root.iterdir()) == before


def test_rollback_cancels_the_canary_analysis(repository, own, package):
    """It does not wait for the canary analysis, and rolls back to what the canary replaced."""
    fleet = Fleet(repository, (own,), canary_s=60.0)
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)
    watched, ended = threading.Event(), []

    def watch(_seconds, check):
        watched.set()
        for _ in range(2000):
            check()
            threading.Event().wait(0.01)

    def promote():
        try:
            replace(fleet, analyse_canary=watch).publish(package(3.0), expected=2)
        except PublishError as error:
            ended.append(str(error))

    promotion = threading.Thread(target=promote)
    promotion.start()
    assert watched.wait(10.0)
    release = fleet.rollback("digits", reason="the pager rang", expected=3)
    promotion.join()

    assert release.version == 2
    assert "asked for a rollback" in ended[0]
    assert "Release 2 is live again on: the primary" in ended[0]
    assert live(repository, own.repository) == [2, 2]
    fleet.publish(package(4.0), expected=2)
    assert live(repository, own.repository) == [4, 4]


def test_rollback_before_the_canary_is_live_cancels_it_too(repository, own, package):
    """Its bytes are there, but the server has not loaded them: it is asked once it is live."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    placed, asking, ended = threading.Event(), threading.Event(), []
    ask = RolloutState.request_cancel

    def asked(rollouts, model, *, leave):
        found = ask(rollouts, model, leave=leave)
        asking.set()
        return found

    def wait_for_the_rollback(_release):
        placed.set()
        assert asking.wait(10.0)

    def watch(_seconds, check):
        for _ in range(1000):
            check()
            threading.Event().wait(0.01)

    def promote():
        try:
            replace(fleet, analyse_canary=watch).publish(
                package(2.0), expected=1, placed=wait_for_the_rollback
            )
        except PublishError as error:
            ended.append(str(error))

    promotion = threading.Thread(target=promote)
    promotion.start()
    assert placed.wait(10.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutState, "request_cancel", asked)
        release = fleet.rollback("digits")
    promotion.join()

    assert "asked for a rollback" in ended[0]
    assert release.version == 1
    assert live(repository, own.repository) == [1, 1]


def test_rollback_of_another_release_cancels_no_canary(repository, own, package):
    """Whoever judged release 2 has no say over 3."""
    fleet = Fleet(repository, (own,))
    for number in (1, 2, 3):
        fleet.publish(package(float(number)), expected=number - 1 or None)
    RolloutState(fleet.root).note(RolloutProgress(model="digits", before=2, canary=3))

    assert RolloutState(fleet.root).request_cancel("digits", leave=2) is None

    RolloutState(fleet.root).check_not_cancelled("digits")


def test_rollback_recovers_first(repository, own, package):
    """Of this model it is the way back itself; another model's roll-out is not forgotten."""
    fleet = Fleet(repository, (own,))
    for name in ("digits", "faces"):
        fleet.publish(package(1.0, model=name), expected=None)
        fleet.publish(package(2.0, model=name), expected=1)
    for name in ("digits", "faces"):
        repository.publish(package(3.0, model=name), expected=2)
        RolloutState(fleet.root).note(RolloutProgress(model=name, before=2, canary=3))

    assert fleet.rollback("digits").version == 2

    assert live(repository, own.repository) == [2, 2]
    assert Layout(repository.root, "faces").current().version == 2
    assert list(RolloutState(fleet.root).unfinished()) == []


def test_release_to_leave_is_named(repository, own, package):
    """On a fleet as on one server; nothing was told to anybody."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)

    with pytest.raises(RepositoryError, match="Release 2 of digits is live, not 1"):
        fleet.rollback("digits", expected=1)
    with pytest.raises(RepositoryError, match="Release 2 of digits is live, not 1"):
        fleet.roll_back_promotion("digits", 1)

    assert live(repository, own.repository) == [2, 2]
    assert Journal(fleet.root).unfinished() == ()


@pytest.mark.parametrize("dead", ["own", "the primary"])
def test_rollback_says_whether_the_primary_went_back(repository, own, package, dead):
    """Then it is done but for who is named; else what is live is what was."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)
    (repository if dead == "the primary" else own.repository).client.dead = True

    with pytest.raises(RepositoryError, match=rf"  {dead}: ") as caught:
        fleet.rollback("digits")

    assert isinstance(caught.value, NotEverywhereError) is (dead == "own")
    assert ("Nothing in" in str(caught.value)) is (dead == "the primary")
    assert live(repository, own.repository) == ([1, 2] if dead == "own" else [2, 1])


def test_servers_that_were_not_changed_yet_are_no_problem(repository, own, package):
    """While somebody rolls out; what a kill cut short is one, and nobody's roll-out."""
    seen = []

    def look(_seconds, _check):
        seen.append((RolloutState(fleet.root).under_way_by("digits"), tuple(verify(fleet))))

    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    replace(fleet, analyse_canary=look).publish(package(2.0), expected=1)

    ((who, found),) = seen
    assert f"pid {os.getpid()}" in who
    assert [check.problem for check in found if check.problem] == []
    assert [check.subject for check in found if "being rolled out by" in check.note] == [
        "own: digits as on the primary"
    ]
    RolloutState(fleet.root).note(RolloutProgress(model="digits", before=1, canary=2))
    own.repository.rollback("digits", 1)
    assert RolloutState(fleet.root).under_way_by("digits") is None
    assert any("does not serve it" in check.problem for check in verify(fleet))


def test_server_that_does_not_answer_is_unknown(repository, own, package):
    """It may serve what it should; one whose own folder says otherwise is a problem."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)
    gone = FleetServer("own", replace(own.repository, client=None), repository)

    found = verify(Fleet(repository, (gone,)))
    assert [check.problem for check in found if check.problem] == []
    assert [c.subject for c in found if "does not answer" in c.unknown] == [
        "own: digits as on the primary"
    ]

    own.repository.rollback("digits", 1)
    found = verify(Fleet(repository, (gone,)))
    assert any("server 'own' does not answer" in check.problem for check in found)


def tight(repository, when_short):
    """The same with a GPU that holds one release and a half."""
    repository.client.gpu_bytes, repository.client.version_bytes = 150, 100
    return replace(repository, gpu_room=GpuRoom(when_short, repository.client.memory))


def test_memory_of_every_server_is_checked_before_any_is_changed(repository, own, package):
    """The primary has room for two, another one has not: nothing is begun anywhere."""
    small = replace(own, repository=tight(own.repository, "refuse"))
    fleet = Fleet(repository, (small,))
    fleet.publish(package(1.0, gpu_bytes=100), expected=None)
    begun = len(Journal(repository.root).read())

    with pytest.raises(RepositoryError, match="does not fit on the server"):
        fleet.publish(package(2.0, gpu_bytes=100), expected=1)

    assert len(Journal(repository.root).read()) == begun
    assert live(repository, own.repository) == [1, 1]


@pytest.mark.parametrize("shares", [False, True], ids=["own-folder", "shared-folder"])
@pytest.mark.parametrize("passes", [True, False], ids=["passes", "canary-fails"])
def test_every_server_replaces_within_its_own_memory(repository, tmp_path, package, shares, passes):
    """There and back: each server unloads what it serves before it loads the other one."""
    root = repository.root if shares else tmp_path / "own" / "live"
    root.mkdir(parents=True, exist_ok=True)
    primary = tight(repository, "replace")
    other = tight(replace(repository, root=root, client=FakeTriton(root)), "replace")
    fleet = Fleet(primary, (FleetServer("other", other, primary),))
    fleet.publish(package(1.0, gpu_bytes=100), expected=None)

    if passes:
        fleet.publish(package(2.0, gpu_bytes=100), expected=1)
    else:
        with pytest.raises(PublishError, match="Release 1 is live again"):
            replace(fleet, analyse_canary=fail).publish(package(2.0, gpu_bytes=100), expected=1)
    if passes:
        assert live(primary, other) == [2, 2]
        fleet.rollback("digits", 1)

    assert live(primary, other) == [1, 1]
    assert fleet.serves("digits")
