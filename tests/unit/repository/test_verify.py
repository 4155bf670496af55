"""Verifying where nothing may be written: no lock is taken, and who holds it is waited for."""

import errno
import os
import sys
from contextlib import ExitStack

import pytest

from enginegate.atomic_io import file_lock, open_regular, read_file
from enginegate.errors import RepositoryBusyError
from enginegate.repository import AuditLog, verify
from enginegate.repository.history.audit import AUDIT
from enginegate.repository.history.journal import JOURNAL
from enginegate.repository.lock import LOCK
from enginegate.repository.store.release_files import ReleaseFiles


def _refuse(path, flags=os.O_RDONLY, **options):
    if flags & os.O_RDWR and path.name == LOCK:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    return open_regular(path, flags, **options)


@pytest.fixture
def read_only(repository, package, monkeypatch):
    """A repository with a release; from now on its lock may only be read."""
    repository.publish(package(1.0), expected=None)
    monkeypatch.setattr("enginegate.atomic_io.open_regular", _refuse)
    return repository


def test_everything_is_checked_and_the_missing_lock_is_said(read_only):
    """As a note: it is no problem of the repository's."""
    checks = verify(read_only)

    assert [check.problem for check in checks if check.problem] == []
    assert "so it was read without its lock" in checks[0].note
    assert any(check.subject == "digits on the live server" for check in checks)


def test_change_in_progress_is_waited_for(read_only, monkeypatch):
    """What is open in the journal meanwhile is no problem to report."""
    monkeypatch.setattr(sys.modules["enginegate.repository.verify"], "_LOCK_TIMEOUT_S", 0.0)
    with ExitStack() as held:
        with monkeypatch.context() as patch:
            patch.setattr("enginegate.atomic_io.open_regular", open_regular)
            held.enter_context(file_lock(read_only.root / LOCK))

        with pytest.raises(RepositoryBusyError, match=f"changed by pid {os.getpid()}"):
            verify(read_only)


def test_concurrently_changed_files_are_read_again(read_only, monkeypatch):
    """Without the lock nobody is kept from changing it."""
    check, looked = ReleaseFiles.check, []

    def change_meanwhile(self):
        looked.append(self.release.version)
        if len(looked) == 1:
            AuditLog(self.layout.root).tell("watched", "digits", why="a look")
        check(self)

    monkeypatch.setattr(ReleaseFiles, "check", change_meanwhile)

    assert [c.problem for c in verify(read_only) if c.problem] == []
    assert looked == [1, 1]


@pytest.mark.parametrize("name", [JOURNAL, AUDIT])
def test_unreadable_record_is_unknown_not_lost(repository, package, monkeypatch, name):
    """Somebody else may find out; nobody removed anything."""
    repository.publish(package(1.0), expected=None)

    def refuse(path, **options):
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_file(path, **options)

    monkeypatch.setattr("enginegate.chained_log.hash_chain.read_file", refuse)
    checks = verify(repository)

    assert [check.problem for check in checks if check.problem] == []
    assert any("may not be read by this user" in check.unknown for check in checks)


def test_damaged_journal_is_reported_once(repository, package):
    """One fault is one problem, with the line."""
    repository.publish(package(1.0), expected=None)
    path = repository.root / JOURNAL
    path.write_bytes(path.read_bytes().replace(b"intent", b"intend"))

    problems = [check.problem for check in verify(repository) if check.problem]

    assert any(f"{path}, line 1: not a journal entry" in said for said in problems)
    assert not any("is gone or empty" in said for said in problems)
