"""A lost journal, a cut audit log, an edited commit point: none of them decides what serves."""

import pytest

from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository import AuditLog, Layout, verify
from enginegate.repository.history.audit import AUDIT
from enginegate.repository.history.journal import JOURNAL, Journal
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.object_repository import record_rollback
from enginegate.repository.store.live_record import LiveRecord


def problems(repository):
    return "\n".join(check.problem for check in verify(repository) if check.problem)


def lines(path, keep):
    """Keep the first lines of a chained file: what is left is a chain that holds."""
    kept = path.read_bytes().splitlines(keepends=True)[:keep]
    path.write_bytes(b"".join(kept))


def point_at(layout, version):
    """Edit the commit point by hand."""
    current = layout.current()
    edited = current.model_copy(update={"version": version, "standby": None})
    layout.current_file.write_bytes(edited.pretty_json())


def test_version_numbers_are_never_issued_twice(repository):
    """A number is spent by the intent, also when the operation was undone."""
    journal = Journal(repository.root)
    journal.add(journal.open("publish", "digits", 7), "undone")

    assert LiveRecord.of(Layout(repository.root, "digits")).last_number == 7
    assert LiveRecord.of(Layout(repository.root, "other")).last_number == 0


@pytest.fixture
def two(repository, package):
    """Release 2 is live, 1 stands by."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    assert problems(repository) == ""
    return Layout(repository.root, "digits")


@pytest.mark.parametrize("keep", [None, 0, 5], ids=["deleted", "empty", "cut"])
def test_lost_journal_is_reported_by_name(repository, two, keep):
    """With what it lacks, where that is written instead, and the remedy."""
    path = two.root / JOURNAL
    path.unlink() if keep is None else lines(path, keep)

    said = problems(repository)

    assert f"{path} was cut" in said if keep else f"{path} is gone or empty" in said
    assert (
        f"line 2 of the audit log {two.root / AUDIT} has as 'published'" in said if keep else said
    )
    assert "restore it from a backup" in said


def test_without_a_journal_the_audit_log_decides_what_may_serve(repository, two, server):
    """An edited commit point makes nothing live: no repair, no start, no change goes by it."""
    (two.root / JOURNAL).unlink()
    point_at(two, 1)

    assert "says that release 1 is live; line 2 of the audit log" in problems(repository)
    for change in (
        repository.repair,
        lambda: repository.bring_up("digits"),
        lambda: repository.withdraw_version("digits", 1),
    ):
        with pytest.raises(TamperedError, match="release 1 is not made live"):
            change()
    assert two.current().version == 1
    assert int(server.infer("digits", {"x": [[0.0, 0.0]]}).model_version) == 2

    assert repository.rollback("digits", 2).version == 2
    assert two.current().version == 2
    assert "says that release" not in problems(repository)


def test_edited_commit_point_is_refused(repository, two, package):
    """By a promotion, too; before anything is staged."""
    point_at(two, 1)

    with pytest.raises(TamperedError, match="says that release 1 is live"):
        repository.publish(package(3.0), expected=1)

    assert two.stored_versions() == (1, 2)


def test_lost_commit_point_is_rewritten_on_request(repository, two, server, package):
    """Of the release that both records name, and no other; killed on the way, it is still lost."""
    two.current_file.unlink()
    with pytest.raises(TamperedError, match=r"is gone, but .*made release 2 live.*--to 2"):
        repository.publish(package(3.0), expected=None)
    for to in (None, 1):
        with pytest.raises(RepositoryError, match="no live release"):
            repository.rollback("digits", to)
    Journal(two.root).open("rollback", "digits", 2)

    assert repository.rollback("digits", 2, reason="it was deleted").version == 2

    assert two.current().version == 2
    assert int(server.infer("digits", {"x": [[0.0, 0.0]]}).model_version) == 2
    assert problems(repository) == ""
    assert repository.rollback("digits").version == 1
    assert problems(repository) == ""


def test_lost_commit_point_of_a_fleet_is_rewritten(repository, two):
    """By its lead."""
    two.current_file.unlink()

    assert Fleet(repository, ()).rollback("digits", 2).version == 2

    assert two.current().version == 2


def test_overtaken_rollback_is_not_the_last_change(repository, two):
    """Another release was followed here before the log was told: the log ends with that one."""
    first = two.release(1)

    record_rollback(repository, first, reason="too slow", left="release 3 was live")
    assert problems(repository) == ""

    repository.rollback("digits", 1)
    record_rollback(repository, first, reason="too slow", left="release 3 was live")
    assert AuditLog(two.root).read()[-1].why == "too slow; release 3 was live"
    assert problems(repository) == ""


def test_journal_cut_within_an_operation_undoes_nothing_recorded(repository, two):
    """Its end is in the audit log, so recovery neither removes the release nor believes an edit."""
    path, current = two.root / JOURNAL, two.current_file.read_bytes()
    lines(path, len(path.read_bytes().splitlines()) - 1)
    point_at(two, 1)

    with pytest.raises(TamperedError, match="release 1 is not made live"):
        repository.recover()

    assert two.stored_versions() == (1, 2)
    two.current_file.write_bytes(current)
    repository.recover()
    assert problems(repository) == ""


def test_lost_journal_stops_neither_promotion_nor_rollback(repository, two, package):
    """Where commit point and audit log agree; `verify` goes on saying that it was lost."""
    (two.root / JOURNAL).unlink()

    assert repository.publish(package(3.0), expected=2).version == 3
    assert repository.rollback("digits").version == 2

    said = problems(repository)
    assert "it lacks an operation on digits release 1 (and 1 more)" in said


def test_lost_journal_keeps_the_manifest_digest(repository, two):
    """The audit log has it as well: an edited manifest does not come back."""
    (two.root / JOURNAL).unlink()
    manifest = two.release_file(1)
    manifest.write_bytes(manifest.read_bytes().replace(b"margins are wide", b"anything goes"))

    with pytest.raises(TamperedError, match="line 1 of the audit log has"):
        repository.rollback("digits")
    assert "line 1 of the audit log has" in problems(repository)


def test_shortened_audit_log_is_found_by_the_journal(repository, two):
    """Its head removed: its chain holds, and the journal has more."""
    lines(two.root / AUDIT, 1)
    point_at(two, 2)
    AuditLog(two.root).head_file.unlink()

    assert "has no record of a publish of digits release 2" in problems(repository)
    with pytest.raises(TamperedError, match="line 1 of the audit log"):
        repository.repair()


def test_restarted_audit_log_defers_to_the_journal(repository, two, package):
    """A damaged one was kept elsewhere as evidence: the repository can still be changed."""
    (two.root / AUDIT).unlink()

    assert "jsonl has 0 lines" in problems(repository)
    assert repository.publish(package(3.0), expected=2).version == 3
    assert LiveRecord.of(two).version == 3


def test_without_both_nothing_says_what_is_live(repository, two):
    """So nothing is made live by the commit point alone."""
    (two.root / JOURNAL).unlink()
    (two.root / AUDIT).unlink()

    assert "no change that the journal or the audit log has" in problems(repository)
    with pytest.raises(TamperedError, match="nothing live"):
        repository.bring_up("digits")


def test_release_without_operation_is_reported(repository, two):
    """Both were cut before it, and the commit point set back."""
    lines(two.root / JOURNAL, 5)
    lines(two.root / AUDIT, 1)
    point_at(two, 1)
    AuditLog(two.root).head_file.unlink()

    assert "digits/2 belongs to no operation" in problems(repository)


@pytest.mark.parametrize("step", ["done", "after the log"])
def test_kill_at_the_end_of_an_operation_is_no_edit(repository, package, step, monkeypatch):
    """After the commit, before or after the audit log has it: the next start finishes it."""
    repository.publish(package(1.0), expected=None)
    killed = Journal.add if step == "after the log" else AuditLog.note

    def die(self, *given, **detail):
        if step == "done" or given[1] == "done":
            raise _KilledError
        return killed(self, *given, **detail)

    with monkeypatch.context() as patch:
        patch.setattr(Journal if step == "after the log" else AuditLog, killed.__name__, die)
        patch.setattr("enginegate.repository.recovery.OperationRecovery.end", lambda *_, **__: "")
        with pytest.raises(_KilledError):
            repository.publish(package(2.0), expected=1)

    assert Layout(repository.root, "digits").current().version == 2
    repository.recover()
    assert problems(repository) == ""


class _KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""
