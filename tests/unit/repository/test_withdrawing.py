"""Withdrawing a first release: nothing is live, nothing serves, and it is known by whom and why."""

from dataclasses import replace

import pytest

from enginegate.errors import (
    EnginegateError,
    NotLoadedError,
    PublishError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.repository import AuditLog, Layout, LiveRepository, verify
from enginegate.repository.history.journal import JOURNAL, Journal
from enginegate.repository.recovery import OperationRecovery, Withdrawal
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.rollout_state import RolloutProgress, RolloutState
from enginegate.repository.rollout.target import FleetServer
from tests.fakes.live_triton import FakeTriton

ADA = Withdrawal("ada", "it answers nonsense")


class _KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""


@pytest.fixture
def own(repository, tmp_path):
    """A server with a repository of its own."""
    root = tmp_path / "own" / "live"
    root.mkdir(parents=True)
    return FleetServer("own", replace(repository, root=root, client=FakeTriton(root)), repository)


def last(repository):
    event = AuditLog(repository.root).read()[-1]
    return event.event, event.release, event.who, event.why


def live(repository):
    current = Layout(repository.root, "digits").current()
    return current.version if current else None


def problems(target):
    return [check.problem for check in verify(target) if check.problem]


def test_first_release_is_withdrawn_and_replaced(repository, server, package):
    """Its number is never used again; the audit log has its scorecard, and nothing is wrong."""
    published = repository.publish(package(1.0), expected=None)

    assert repository.withdraw("digits", ADA) == published

    assert live(repository) is None
    assert not server.model_ready("digits")
    assert not (repository.root / "digits").exists()
    assert last(repository) == ("withdrawn", 1, "ada", "it answers nonsense")
    assert AuditLog(repository.root).read()[-1].scorecard == published.scorecard_sha256
    assert problems(repository) == []
    assert repository.publish(package(2.0), expected=None).version == 2
    assert problems(repository) == []


def test_restored_commit_point_must_be_removed(repository, package):
    """Nothing is live by the records, so there is no release to go back to, and no backup."""
    repository.publish(package(1.0), expected=None)
    file = Layout(repository.root, "digits").current_file
    content = file.read_bytes()
    repository.withdraw("digits", ADA)
    file.write_bytes(content)

    with pytest.raises(TamperedError, match=r"\(withdrawn\) made nothing live.*remove the file:"):
        repository.publish(package(2.0), expected=1)

    file.unlink()
    assert repository.publish(package(2.0), expected=None).version == 2


def test_its_number_is_not_used_again_after_the_journal_was_lost(repository, package):
    """The audit log knows it, with a manifest that no other release may be taken for."""
    repository.publish(package(1.0), expected=None)
    repository.withdraw("digits", ADA)
    (repository.root / JOURNAL).unlink()

    assert repository.publish(package(2.0), expected=None).version == 2

    (said,) = problems(repository)
    assert "is gone or empty" in said or "was cut" in said


def test_earlier_releases_are_withdrawn_too(repository, server, package):
    """A server that loads whatever it finds in its folder must not bring an older one back."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    with pytest.raises(RepositoryError, match=r"not the first one.*enginegate rollback"):
        repository.withdraw("digits", ADA)
    repository.rollback("digits")
    with pytest.raises(RepositoryError, match="enginegate withdraw POLICY --reason"):
        repository.rollback("digits")

    repository.withdraw("digits", ADA)

    assert not (repository.root / "digits").exists()
    assert not server.model_ready("digits")
    assert problems(repository) == []


def test_release_with_forgotten_predecessor_is_withdrawn(repository, package):
    """There is nothing to go back to either."""
    for number in (1, 2):
        replace(repository, keep=1).publish(package(float(number)), expected=number - 1 or None)
    for number in (3, 4):
        replace(repository, keep=1).publish(package(float(number)), expected=number - 1)
    layout = Layout(repository.root, "digits")
    repository.rollback("digits", 3)
    assert not layout.version_folder(2).exists()

    assert repository.withdraw("digits", ADA).version == 3


def test_killed_on_the_way_it_is_the_old_state_or_the_new(repository, server, package, monkeypatch):
    """Before the journal has it the release is live; after that the next start withdraws it."""
    repository.publish(package(1.0), expected=None)

    def killed(*_, **__):
        raise _KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "open", killed)
        with pytest.raises(_KilledError):
            repository.withdraw("digits", ADA)
    assert repository.recover() == ()
    assert (live(repository), server.model_ready("digits")) == (1, True)
    for kind, place in ((OperationRecovery, "_serve"), (AuditLog, "close")):
        with monkeypatch.context() as patch:
            patch.setattr(kind, place, killed)
            with pytest.raises(_KilledError):
                repository.withdraw("digits", ADA)
        (said,) = repository.recover()
        assert "withdraw of digits release" in said
        assert (live(repository), server.model_ready("digits")) == (None, False)
        assert last(repository)[2:] == ("ada", "it answers nonsense")
        assert problems(repository) == []
        repository.publish(package(2.0), expected=None)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("nothing", "Nothing of digits"),
        ("neither", "Nothing of digits"),
        ("no server", "No live Triton answers"),
    ],
)
def test_impossible_withdrawal_begins_nothing(repository, package, state, said):
    """Nothing is live, or no server answers that could be seen to let it go.

    Who has nothing to withdraw is not sent to start a server first.
    """
    if state == "no server":
        repository.publish(package(1.0), expected=None)
    if state != "nothing":
        repository = replace(repository, client=None)

    with pytest.raises(RepositoryError, match=said):
        repository.withdraw("digits", ADA)

    assert Journal(repository.root).unfinished() == ()
    assert live(repository) == (1 if state == "no server" else None)


def test_server_that_keeps_serving_is_no_success(repository, server, package, monkeypatch):
    """Its folder is gone by then; whoever starts next tries again."""
    repository.publish(package(1.0), expected=None)
    with monkeypatch.context() as patch:

        def refuse(_name):
            raise NotLoadedError("unload failed")

        patch.setattr(server, "unload", refuse)
        with pytest.raises(RepositoryError, match="is not finished"):
            repository.withdraw("digits", ADA)

    assert server.model_ready("digits")
    repository.recover()
    assert not server.model_ready("digits")
    assert last(repository) == ("withdrawn", 1, "ada", "it answers nonsense")


def test_server_that_falsely_confirms_unload_is_found(repository, server, package, monkeypatch):
    """A status code proves nothing: it must be seen that no version answers."""
    repository.publish(package(1.0), expected=None)
    monkeypatch.setattr(server, "unload", lambda _name: None)

    with pytest.raises(RepositoryError, match=r"still answers for it: version 1 READY"):
        repository.withdraw("digits", ADA)

    (said,) = problems(repository)
    assert "digits was withdrawn, and the server at fake:1 still answers for it" in said


def test_every_server_of_a_fleet_lets_it_go(repository, own, package):
    """Each log says by whom and why."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)

    assert fleet.withdraw("digits", ADA).version == 1

    for each in (repository, own.repository):
        assert live(each) is None
        assert not each.client.model_ready("digits")
        assert last(each) == ("withdrawn", 1, "ada", "it answers nonsense")
    assert problems(fleet) == []
    assert list(RolloutState(fleet.root).unfinished()) == []


def test_fleet_withdrawal_needs_every_server(repository, own, package):
    """It would serve what was withdrawn when it is back."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    own.repository.client.dead = True

    with pytest.raises(RepositoryError, match="own does not answer, so nothing was begun"):
        fleet.withdraw("digits", ADA)

    assert live(repository) == 1


def test_refusing_fleet_server_keeps_the_release_live(repository, own, package, monkeypatch):
    """It is named, and the others are as before."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)

    def refuse(*_, **__):
        raise RepositoryError("its disk is full")

    monkeypatch.setattr(FleetServer, "roll_back", refuse)
    with pytest.raises(PublishError, match=r"(?s)not withdrawn.*own: its disk is full"):
        fleet.withdraw("digits", ADA)

    assert (live(repository), live(own.repository)) == (1, 1)
    assert list(RolloutState(fleet.root).unfinished()) == []
    assert fleet.recover() == ()


def test_refusing_primary_keeps_the_release_live(repository, own, package, monkeypatch):
    """It is asked last: the others have let it go by then, and get it back."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    withdraw_version = LiveRepository.withdraw_version

    def refuse(self, *given, **options):
        if self.root == repository.root:
            raise RepositoryBusyError("somebody is changing it")
        return withdraw_version(self, *given, **options)

    monkeypatch.setattr(LiveRepository, "withdraw_version", refuse)
    with pytest.raises(PublishError, match=r"(?s)not withdrawn.*the primary: somebody is changing"):
        fleet.withdraw("digits", ADA)

    assert (live(repository), live(own.repository)) == (1, 1)
    assert own.repository.client.model_ready("digits")
    assert problems(fleet) == []


def test_edited_commit_point_unloads_no_server(repository, own, package):
    """The lead would refuse; the others are not asked before."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    fleet.publish(package(2.0), expected=1)
    layout = Layout(repository.root, "digits")
    edited = layout.current().model_copy(update={"version": 1, "standby": None})
    layout.current_file.write_bytes(edited.pretty_json())

    with pytest.raises(TamperedError, match="says that release 1 is live"):
        fleet.withdraw("digits", ADA)

    assert live(own.repository) == 2
    assert own.repository.client.model_ready("digits")


@pytest.mark.parametrize("shares", [False, True])
def test_fleet_server_that_falsely_confirms_unload_is_found(
    repository, own, package, monkeypatch, shares
):
    """With its own folder it keeps the release live everywhere; with the primary's it is named."""
    if shares:
        client = FakeTriton(repository.root)
        own = FleetServer("own", replace(repository, client=client), repository)
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    monkeypatch.setattr(own.repository.client, "unload", lambda _name: None)

    said = "was withdrawn, and still serves" if shares else "was not withdrawn"
    with pytest.raises(EnginegateError, match=rf"(?s){said}.*own: .*still answers for it"):
        fleet.withdraw("digits", ADA)

    assert live(repository) == (None if shares else 1)


def test_interrupted_fleet_withdrawal_is_finished(repository, own, package):
    """The note beside the primary's journal says that it is one, by whom and why."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    RolloutState(fleet.root).note(
        RolloutProgress(model="digits", canary=1, who=ADA.who, why=ADA.why)
    )

    fleet.recover()

    assert (live(repository), live(own.repository)) == (None, None)
    assert last(repository) == last(own.repository) == ("withdrawn", 1, "ada", ADA.why)


def test_absent_server_is_found_and_repaired(repository, own, package):
    """What was withdrawn on the primary alone serves nowhere after a repair."""
    fleet = Fleet(repository, (own,))
    fleet.publish(package(1.0), expected=None)
    repository.withdraw("digits", ADA)

    assert any("was withdrawn; server 'own' has release 1" in said for said in problems(fleet))
    fleet.repair()

    assert live(own.repository) is None
    assert problems(fleet) == []
