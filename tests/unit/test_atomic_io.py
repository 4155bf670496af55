"""Writes that are all or nothing."""

import errno
import os

import pytest

from enginegate.atomic_io import (
    NotRegularFileError,
    file_lock,
    lock_holder,
    new_folder,
    read_file,
    write_file,
)


def test_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    """A disk that fills up half-way neither truncates the file nor leaves another one."""
    path = tmp_path / "file"
    write_file(path, b"old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"new")

    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_folder_appears_whole_or_not_at_all(tmp_path):
    """An exception while filling it leaves nothing."""

    def fill_half():
        with new_folder(tmp_path / "made") as staging:
            (staging / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()

    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_equal_folders_is_kept(tmp_path):
    """Whoever finishes the same work second finds it done."""
    with new_folder(tmp_path / "made") as first:
        (first / "who").write_text("first")
        with new_folder(tmp_path / "made") as second:
            (second / "who").write_text("second")

    assert (tmp_path / "made" / "who").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_held_lock_names_its_holder(tmp_path):
    """The second taker is told which process to look for."""
    lock, holder = tmp_path / "lock", f"pid {os.getpid()}"
    with file_lock(lock), pytest.raises(TimeoutError, match=holder), file_lock(lock):
        pytest.fail("two holders")

    with file_lock(tmp_path / "lock"):
        pass


def _irregular(path, kind, target):
    """Put something at ``path`` that is no regular file of ours."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "hard link":
        path.hardlink_to(target)
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("link", "a symbolic link"),
        ("hard link", "no lock but a file with another content"),
        ("FIFO", "a FIFO"),
        ("folder", "a folder"),
    ],
)
def test_lock_is_never_taken_on_a_foreign_file(tmp_path, kind, named):
    """What a link leads to keeps its content; the message names the path and the remedy."""
    theirs, lock = tmp_path / "theirs", tmp_path / "lock"
    theirs.write_text("precious")
    _irregular(lock, kind, theirs)

    with pytest.raises(NotRegularFileError, match=named) as refusal, file_lock(lock):
        pytest.fail("locked")

    assert theirs.read_text() == "precious"
    assert str(lock) in refusal.value.strerror
    assert "remove it" in refusal.value.strerror


@pytest.mark.parametrize("kind", ["link", "FIFO", "folder"])
def test_only_a_regular_file_is_read(tmp_path, kind):
    """Nothing is waited for, and a link is followed only where a person named it."""
    theirs, path = tmp_path / "theirs", tmp_path / "record"
    theirs.write_text("{}")
    _irregular(path, kind, theirs)

    with pytest.raises(NotRegularFileError, match="record is a"):
        read_file(path)
    if kind == "link":
        assert read_file(path, follow_links=True) == b"{}"
    else:
        with pytest.raises(NotRegularFileError):
            read_file(path, follow_links=True)


def test_whether_a_lock_is_held_is_found_out_without_writing(tmp_path):
    """By a file that may only be read, too."""
    lock = tmp_path / "lock"
    assert lock_holder(lock) is None
    with file_lock(lock):
        assert f"pid {os.getpid()}" in lock_holder(lock)
        written = lock.read_bytes()

    assert lock_holder(lock) is None
    assert lock.read_bytes() == written


def test_lock_is_held_on_a_full_disk_too(tmp_path, monkeypatch):
    """Whoever frees space needs it; only the holder's name is missing."""

    def full(_handle, _content, _offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock = tmp_path / "lock"
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with file_lock(lock):
            assert lock_holder(lock) == ""
            with pytest.raises(TimeoutError), file_lock(lock):
                pytest.fail("locked twice")


def test_lock_that_was_deleted_while_it_was_waited_for_is_taken_anew(tmp_path):
    """Two that each hold a file of that name would both believe to be alone."""
    lock = tmp_path / "lock"
    with file_lock(lock):
        lock.unlink()
        with file_lock(lock):
            assert lock_holder(lock).startswith("pid ")
