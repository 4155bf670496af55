"""Writes that are all or nothing."""

import os

import pytest

from enginegate.durable import file_lock, new_folder, write_file


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
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


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
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


def test_a_held_lock_names_its_holder(tmp_path):
    """The second taker is told which process to look for."""
    lock, holder = tmp_path / "lock", f"pid {os.getpid()}"
    with file_lock(lock), pytest.raises(TimeoutError, match=holder), file_lock(lock):
        pytest.fail("two holders")

    with file_lock(tmp_path / "lock"):
        pass
