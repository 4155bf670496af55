"""What a failed or killed change may take away: only what it brought itself."""

from dataclasses import replace

import pytest

from enginegate.atomic_io import file_lock
from enginegate.errors import PublishError, RepositoryBusyError, RepositoryError, TamperedError
from enginegate.repository import AuditLog, Layout, LiveRepository, ReleaseSigning, verify
from enginegate.repository.history.journal import Entry, Journal
from enginegate.repository.lock import LOCK
from enginegate.repository.recovery import (
    AlignServers,
    ReleaseOldParts,
    RemoveModel,
    RemovePointer,
    RemovePromise,
    RemoveRelease,
    RollBackServers,
    ServePointer,
    decide,
)
from enginegate.repository.rollout.rollout_state import RolloutProgress
from enginegate.repository.store.layout import Current
from enginegate.repository.store.package import ImportedRelease
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.store.removal import forget_old
from enginegate.repository.store.staging import place
from enginegate.repository.verify import verify_folder
from tests.fakes.evidence import WHEN


def problems(repository):
    return [check.problem for check in verify(repository) if check.problem]


def answer(server, package):
    made = package(0.0)
    reply = server.infer("digits", made.golden.inputs)
    return int(reply.model_version), float(reply.outputs["y"][0, 0])


def journal_of(repository):
    return Journal(repository.root)


def killed_after(repository, step, package, monkeypatch):
    """Publish, and die when the journal has taken in a step."""
    add = Journal.add

    def then_die(self, entry, now, **detail):
        added = add(self, entry, now, **detail)
        if now == step:
            raise _KilledError
        return added

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", then_die)
        patch.setattr("enginegate.repository.recovery.OperationRecovery.end", lambda *_, **__: "")
        with pytest.raises(_KilledError):
            repository.publish(package, expected=None)


class _KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""


@pytest.mark.parametrize("name", ["digits", "digits.engine"], ids=["own-model", "composing-model"])
def test_foreign_model_is_left_alone(repository, server, package, name):
    """Refused before anything is noted; folder and server keep it, after a recovery too."""
    theirs = repository.root / name / "1" / "engine.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("7")
    if name != "digits":
        (repository.root / name / "00").mkdir()
        (repository.root / name / "00" / "part-of").write_text("digits")
    server.foreign.add(name)

    with pytest.raises(RepositoryError, match="is another model's"):
        repository.publish(package(1.0, model=name), expected=None)
    journal_of(repository).open("publish", name, 1)
    repository.recover()

    assert theirs.read_text() == "7"
    assert server.model_ready(name)


def test_foreign_version_folder_is_left_alone(repository, package):
    """Nobody published it, and undoing must not take it for its own."""
    repository.publish(package(1.0), expected=None)
    stranger = repository.root / "digits" / "2" / "engine.bin"
    stranger.parent.mkdir()
    stranger.write_text("7")

    with pytest.raises(RepositoryError, match="is no release"):
        repository.publish(package(2.0), expected=1)

    assert stranger.read_text() == "7"


def test_lost_commit_point_removes_no_history(repository, server, package):
    """What is live is not known then: nothing is published over it, and nothing unloaded."""
    repository.publish(package(1.0), expected=None)
    Layout(repository.root, "digits").current_file.unlink()

    with pytest.raises(TamperedError, match="made release 1 live"):
        repository.publish(package(2.0), expected=None)
    journal_of(repository).open("publish", "digits", 2)
    with pytest.raises(TamperedError, match="made release 1 live"):
        repository.recover()

    assert answer(server, package) == (1, 1.0)
    assert Layout(repository.root, "digits").stored_versions() == (1,)


def test_damaged_live_pointer_is_written_again_by_a_rollback(repository, server, package):
    """As its own message says: move it away, and roll back to the release that verify names."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    pointer = Layout(repository.root, "digits").current_file
    pointer.write_text("{")
    with pytest.raises(TamperedError, match=r"rollback POLICY --to N"):
        repository.publish(package(3.0), expected=2)
    assert "rollback POLICY --to N" in "".join(problems(repository))

    pointer.unlink()
    assert "made it 2" in "".join(problems(repository))
    assert repository.rollback("digits", 2).version == 2

    assert answer(server, package) == (2, 2.0)
    assert problems(repository) == []


def test_failed_import_keeps_existing_history(repository, server, package, tmp_path):
    """Retention removed its bytes before: manifest, samples and signature were here already."""
    source = Layout(tmp_path / "source", "digits")
    source.root.mkdir()
    old = place(source, package(1.0), 1, None)
    repository.publish(ImportedRelease(old, source.root), expected=None)
    repository.publish(package(2.0), expected=1)
    repository.publish(package(3.0), expected=2)
    layout = Layout(repository.root, "digits")
    forget_old(layout, 1)
    server.refuses.add(1)

    with pytest.raises(PublishError, match="Release 3 is live"):
        repository.publish(ImportedRelease(old, source.root), expected=3)

    assert layout.release(1) == old
    assert layout.golden_file(1).is_file()
    assert not layout.version_folder(1).exists()


@pytest.mark.parametrize(
    ("step", "told"), [("placed", False), ("configured", True), ("loaded", True)]
)
def test_served_operation_is_recovered_with_a_server(
    repository, server, package, monkeypatch, step, told
):
    """One that is too busy to answer may serve it: bytes and entry stay until it was told."""
    killed_after(repository, step, package(1.0), monkeypatch)
    offline = replace(repository, client=None)

    (said,) = offline.recover()

    assert ("is not known, because none answers" in said) is told
    assert bool(journal_of(repository).unfinished()) is told
    assert (repository.root / "digits" / "1").is_dir() is told
    repository.recover()
    assert journal_of(repository).unfinished() == ()
    assert not (repository.root / "digits").exists()
    assert not server.model_ready("digits")
    assert list(repository.root.parent.glob(".digits*")) == []


def test_another_release_than_the_one_judged_is_not_left(repository, server, package):
    """Whoever decided to roll back saw release 2; by now somebody published 3."""
    for number in (1, 2, 3):
        repository.publish(package(float(number)), expected=number - 1 or None)

    with pytest.raises(RepositoryError, match="Release 3 of digits is live, not 2"):
        repository.rollback("digits", 1, expected=2)
    with pytest.raises(RepositoryError, match="Release 3 of digits is live, not 1"):
        repository.roll_back_promotion("digits", 1)
    with pytest.raises(RepositoryError, match="not 2"):
        repository.roll_back_promotion("digits", 2)

    assert answer(server, package) == (3, 3.0)
    assert repository.rollback("digits", 1, expected=3).version == 1


def test_bringing_up_waits_its_turn(repository, package, monkeypatch):
    """A server is not told of one release while another is being published."""
    repository.publish(package(1.0), expected=None)
    monkeypatch.setattr("enginegate.repository.lock.LOCK_TIMEOUT_S", 0.0)

    with file_lock(repository.root / LOCK), pytest.raises(RepositoryBusyError):
        repository.bring_up("digits")

    assert repository.repair() == ()
    repository.client.loaded.clear()
    assert any("was loaded and proved" in sentence for sentence in repository.repair())


def test_change_does_not_wait_for_verification(repository, package, monkeypatch):
    """Hashing takes no lock; what changed meanwhile is checked again, or reported."""
    repository.publish(package(1.0), expected=None)
    check, looked = ReleaseFiles.check, []

    def change_meanwhile(self):
        looked.append(self.release.version)
        if len(looked) in changes:
            with file_lock(self.layout.root / LOCK):
                AuditLog(self.layout.root).tell("watched", "digits", why="a look")
        check(self)

    monkeypatch.setattr(ReleaseFiles, "check", change_meanwhile)
    changes = {1}
    assert [c.problem for c in verify_folder(repository) if c.problem] == []
    assert looked == [1, 1]

    changes = set(range(100))
    said = [c.problem for c in verify_folder(repository) if c.problem]
    assert len(said) == 1
    assert "changed while it was checked" in said[0]


@pytest.mark.parametrize("edit", ["signature", "manifest", "both"])
def test_signature_requirement_is_remembered(repository, package, tmp_path, edit):
    """Where no signature is required, too: the journal remembers it, and the manifest's digest."""
    lenient = ReleaseSigning(
        required=False, private_key=None, public_key=None, keys=tmp_path / "keys"
    )
    signed = replace(repository, signing=lenient)
    signed.publish(package(1.0), expected=None)
    signed.publish(package(2.0), expected=1)
    layout = Layout(signed.root, "digits")
    if edit in {"signature", "both"}:
        layout.signature_file(1).unlink()
    if edit in {"manifest", "both"}:
        text = layout.release_file(1).read_bytes().replace(b"margins are wide", b"anything goes")
        layout.release_file(1).write_bytes(text)

    with pytest.raises(TamperedError, match=r"1\.(sig\.)?json"):
        signed.rollback("digits")
    with pytest.raises(TamperedError, match=r"1\.(sig\.)?json"):
        replace(signed, signing=None).rollback("digits")

    assert problems(signed) != []


def test_unsigned_edit_is_tampering(repository, package):
    """Nothing was ever signed, and the digest in the journal still tells."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    manifest = Layout(repository.root, "digits").release_file(1)
    manifest.write_bytes(manifest.read_bytes().replace(b"margins are wide", b"anything goes"))

    with pytest.raises(TamperedError, match="is not the manifest that was published"):
        repository.rollback("digits")


def test_repository_is_recovered_without_a_server(tmp_path):
    """Nothing was told to anybody before bytes were placed, so the operation is closed."""
    root = tmp_path / "alone"
    root.mkdir()
    offline = LiveRepository(root, None)
    Journal(root).open("publish", "digits", 1)

    assert len(offline.recover()) == 1
    assert offline.recover() == ()
    assert problems(offline) == []


def steps_of(kind, version, *steps, operation="a" * 32, **detail):
    """The journal of one operation."""
    return tuple(
        Entry(
            sequence=number,
            at=WHEN,
            previous="0" * 64,
            operation=operation,
            kind=kind,
            model="digits",
            step=step,
            version=version,
            detail=detail if step == "intent" else {},
        )
        for number, step in enumerate(steps)
    )


def pointer(version, **changes):
    return Current(version=version, known=(version,), changed_at=WHEN, **changes)


LIVE_1, LIVE_2 = pointer(1), pointer(2)
REMOVED = RemoveRelease(keep_history=False)
GONE = RemoveModel(with_history=False)
PUBLISH = ("intent", "placed", "prepared", "configured", "loaded")
DIGEST = "d" * 64


@pytest.mark.parametrize("cut", range(1, len(PUBLISH) + 1))
@pytest.mark.parametrize(
    ("live", "removed"), [(LIVE_1, (REMOVED,)), (None, (REMOVED, GONE))], ids=["second", "first"]
)
def test_publish_before_commit_is_undone(cut, live, removed):
    """Whatever step it was killed after: the old release serves, then the new one goes."""
    (ending,) = decide(steps_of("publish", 2, *PUBLISH[:cut]), live)

    *actions, close = ending.actions
    assert actions == [ServePointer(live, loaded=cut > 2), *removed]
    assert (close.done, close.why) == (False, f"cut short after {PUBLISH[cut - 1]}")
    assert close.words == (
        "Release 1 is live, as before." if live else "Nothing is live, as before."
    )


@pytest.mark.parametrize("kind", ["publish", "rollback"])
@pytest.mark.parametrize("cut", range(1, len(PUBLISH) + 1))
def test_committed_operation_is_finished(kind, cut):
    """The pointer has it, so the new release stands; old models go, and it is closed as done."""
    (ending,) = decide(steps_of(kind, 2, *PUBLISH[:cut]), LIVE_2)

    released, close = ending.actions
    assert released == ReleaseOldParts(LIVE_2)
    assert (close.done, close.words) == (True, "Release 2 is live.")


@pytest.mark.parametrize(
    ("journal", "live", "actions", "done"),
    [
        pytest.param(
            steps_of("rollback", 1, "intent"), LIVE_2, [ServePointer(LIVE_2, loaded=False)], False,
            id="rollback-before-its-switch",
        ),
        pytest.param(
            steps_of("rollback", 1, "intent", "configured"), LIVE_2,
            [ServePointer(LIVE_2, loaded=True)], False, id="rollback-in-its-switch",
        ),
        pytest.param(
            steps_of("rollback", 2, "intent", "loaded"), None, [], False,
            id="rollback-to-a-lost-pointer",
        ),
        pytest.param(
            steps_of("withdraw", 1, "intent"), LIVE_1,
            [RemovePointer(), ServePointer(None, loaded=True), RemoveModel(with_history=True)],
            True, id="withdrawal-before-its-commit",
        ),
        pytest.param(
            steps_of("withdraw", 1, "intent"), None,
            [ServePointer(None, loaded=True), RemoveModel(with_history=True)],
            True, id="withdrawal-after-its-commit",
        ),
        pytest.param(
            steps_of("withdraw", 1, "intent"), LIVE_2, [], False, id="withdrawal-of-another",
        ),
        pytest.param(
            steps_of("promise", 1, "intent", promise=DIGEST), LIVE_1, [RemovePromise(DIGEST)],
            False, id="promise-before-its-commit",
        ),
        pytest.param(
            steps_of("promise", 1, "intent", promise=DIGEST), pointer(1, promises={1: DIGEST}),
            [], True, id="promise-after-its-commit",
        ),
        pytest.param(
            (
                *steps_of("publish", 1, *PUBLISH, "done", operation="b" * 32),
                *steps_of("publish", 1, "intent", "placed"),
            ),
            LIVE_2,
            [ServePointer(LIVE_2, loaded=False), RemoveRelease(keep_history=True)],
            False,
            id="an-import-of-what-was-live-before",
        ),
    ],
)  # fmt: skip
def test_every_other_operation_ends_by_the_pointer(journal, live, actions, done):
    """What the pointer says is finished, anything else is undone."""
    (ending,) = decide(journal, live)

    assert list(ending.actions[:-1]) == actions
    assert ending.actions[-1].done is done


def test_closed_operation_is_left_alone():
    """Done or undone, and so are operations other than the one that failed."""
    ended = steps_of("publish", 1, *PUBLISH, "done", operation="b" * 32)
    open_one = steps_of("rollback", 1, "intent", operation="c" * 32)
    failed = steps_of("publish", 2, "intent")

    assert decide(ended, LIVE_1) == ()
    (ending,) = decide((*ended, *open_one, *failed), LIVE_1, failed=failed[0], reason="no room")
    assert (ending.entry.version, ending.actions[-1].why) == (2, "no room")


def test_withdrawal_leaves_nothing_live_for_later_recovery():
    """The pointer that it removes is gone for the operations behind it too."""
    journal = (
        *steps_of("withdraw", 1, "intent", operation="b" * 32),
        *steps_of("publish", 2, "intent", "placed"),
    )

    _, second = decide(journal, LIVE_1)

    assert second.actions[0] == ServePointer(None, loaded=False)


@pytest.mark.parametrize(
    ("canary_passed", "live", "decided"),
    [
        (False, LIVE_2, RollBackServers()),
        (True, LIVE_2, AlignServers()),
        (False, LIVE_1, AlignServers()),
        (False, None, AlignServers()),
    ],
)
def test_rollout_rolls_back_only_from_an_unpassed_live_canary(canary_passed, live, decided):
    """Otherwise every server follows the first one's pointer."""
    rollout = RolloutProgress(model="digits", before=1, canary=2, canary_passed=canary_passed)

    assert decide((), live, rollout) == (decided,)
