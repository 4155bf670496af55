"""A release that does not fit beside the live one is refused, or replaces it, and can come back."""

import logging
from dataclasses import replace

import pytest

from enginegate.errors import PublishError, RepositoryError
from enginegate.repository import AuditLog, Layout, LiveRepository, verify
from enginegate.repository.deploy.gpu_room import GpuRoom
from enginegate.repository.history.journal import Journal

VERSION = 100
STEPS = ("placed", "unloading", "configured", "loaded")


class KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""


@pytest.fixture
def server(server):
    """Each release takes 100 of the GPU's memory."""
    server.version_bytes = VERSION
    return server


@pytest.fixture
def release(package):
    """Make a package that was measured."""

    def made(offset, **changes):
        return package(offset, **{"gpu_bytes": VERSION, "cold_start_s": 12.0, **changes})

    return made


def repository_of(server, when_short, room=1.5):
    """A GPU that holds so many releases."""
    server.gpu_bytes = round(room * VERSION)
    return LiveRepository(
        server.root, server, load_timeout_s=1.0, gpu_room=GpuRoom(when_short, server.memory)
    )


def live(repository):
    return Layout(repository.root, "digits").current().version


def killed_after(step, act, monkeypatch):
    """Do something, and die when the journal has taken in a step."""
    add = Journal.add

    def then_die(self, entry, now, **detail):
        added = add(self, entry, now, **detail)
        if now == step:
            raise KilledError
        return added

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", then_die)
        patch.setattr("enginegate.repository.recovery.OperationRecovery.end", lambda *_, **__: "")
        with pytest.raises(KilledError):
            act()


def is_whole(repository):
    return [check.problem for check in verify(repository) if check.problem] == []


def test_too_little_memory_is_refused_before_anything_changes(server, release):
    """With the figures, and both ways out; journal, audit log and folder are as they were."""
    repository = repository_of(server, "refuse")
    repository.publish(release(1.0), expected=None)
    entries, events = Journal(server.root).read(), AuditLog(server.root).read()
    files = sorted(server.root.rglob("*"))

    with pytest.raises(RepositoryError, match="does not fit") as refusal:
        repository.publish(release(2.0), expected=1)

    assert "0 MiB of each GPU" in str(refusal.value)
    assert 'when_memory_is_short = "replace"' in str(refusal.value)
    assert "about 12 s" in str(refusal.value)
    assert (Journal(server.root).read(), AuditLog(server.root).read()) == (entries, events)
    assert sorted(server.root.rglob("*")) == files
    assert live(repository) == 1
    assert server.unloads == []


def test_policy_may_replace_with_the_downtime_said_before_and_after(server, release, caplog):
    """The server would run out of memory with both; the audit log keeps how long it was silent."""
    repository = repository_of(server, "replace")
    repository.publish(release(1.0), expected=None)

    with caplog.at_level(logging.WARNING):
        repository.publish(release(2.0), expected=1)

    assert live(repository) == 2
    assert "Nobody is answered for about 12 s" in caplog.text
    assert "nobody was answered for" in AuditLog(server.root).read()[-1].why
    assert Layout(server.root, "digits").current().served == (2,)
    assert is_whole(repository)


def test_rollback_replaces_too(server, release):
    """The release to go back to is not loaded any more, and there is room for one."""
    repository = repository_of(server, "replace")
    repository.publish(release(1.0), expected=None)
    repository.publish(release(2.0), expected=1)

    repository.rollback("digits", reason="it is slow")

    assert live(repository) == 1
    assert server.infer("digits", release(0.0).golden.inputs).model_version == "1"


def test_release_that_stands_by_makes_room_before_the_live_one(server, release):
    """Room for two is enough for any number of promotions, and nobody waits."""
    repository = repository_of(server, "refuse", room=2.2)
    for expected in (None, 1, 2):
        repository.publish(release(float(expected or 0)), expected=expected)

    assert Layout(server.root, "digits").current().served == (2, 3)
    assert server.unloads == []
    assert is_whole(repository)


def test_what_was_unloaded_comes_back_if_its_successor_does_not_load(server, release):
    """The successor is unloaded first: there is no more room on the way back."""
    repository = repository_of(server, "replace")
    repository.publish(release(1.0), expected=None)
    server.refuses = {2}

    with pytest.raises(PublishError, match="Release 1 is live, as before"):
        repository.publish(release(2.0), expected=1)

    assert repository.serves("digits")
    assert is_whole(repository)


def test_wrong_answers_take_a_replacement_back(server, release):
    """It had been loaded alone, so it has to leave before the old one fits."""
    repository = repository_of(server, "replace")
    repository.publish(release(1.0), expected=None)
    wrong = replace(release(2.0), golden=release(3.0).golden)

    with pytest.raises(PublishError, match="Release 1 is live, as before"):
        repository.publish(wrong, expected=1)

    assert repository.serves("digits")


@pytest.mark.parametrize("room", [1.5, 2.2], ids=["replaces", "drops-the-standby"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_replacement_is_undone_within_the_same_memory(
    server, release, monkeypatch, step, room
):
    """Whatever had been unloaded by then, the next start brings back what was live, proved."""
    repository = repository_of(server, "replace", room)
    repository.publish(release(1.0), expected=None)
    repository.publish(release(2.0), expected=1)
    before = Layout(server.root, "digits").current()

    killed_after(step, lambda: repository.publish(release(3.0), expected=2), monkeypatch)
    repository.recover()

    assert Layout(server.root, "digits").current() == before
    assert repository.serves("digits")
    assert is_whole(repository)


def test_what_serves_as_it_should_is_not_unloaded_by_recovery(server, release, monkeypatch):
    """Killed after the note and before the unloading: nobody has to wait for a load."""
    repository = repository_of(server, "replace")
    repository.publish(release(1.0), expected=None)
    killed_after("unloading", lambda: repository.publish(release(2.0), expected=1), monkeypatch)

    repository.recover()

    assert server.unloads == []
    assert repository.serves("digits")


def test_unknown_memory_is_said_and_changes_nothing(server, release, caplog):
    """A server without metrics takes releases as it always did."""
    server.gpu_bytes = 0
    repository = LiveRepository(server.root, server, load_timeout_s=1.0, gpu_room=GpuRoom())
    repository.publish(release(1.0), expected=None)

    with caplog.at_level(logging.INFO):
        repository.publish(release(2.0), expected=1)

    assert "is not known" in caplog.text
    assert Layout(server.root, "digits").current().served == (1, 2)
