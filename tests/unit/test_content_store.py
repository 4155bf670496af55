"""A folder of the store is made once."""

import multiprocessing
import os
import time
from datetime import UTC, datetime, timedelta
from threading import Thread

import pytest

from enginegate.atomic_io import file_lock, lock_holder
from enginegate.content_store import delete_folder, delete_unused, make_once, use_folder
from enginegate.errors import BuildError, EnginegateError, ModelError


def write(text):
    def make(folder):
        (folder / "value").write_text(text)
        return text

    return make


def read(folder):
    text = (folder / "value").read_text()
    if text == "damaged":
        raise ModelError("It is damaged.")
    return text


def test_second_call_reads(tmp_path):
    """What is there is used; nothing is made."""
    folder = tmp_path / "key"
    first = make_once(folder, read=read, make=write("a"), wait_s=1)

    second = make_once(folder, read=read, make=write("b"), wait_s=1)

    assert (first.value, first.reused) == ("a", False)
    assert (second.value, second.reused, second.folder) == ("a", True, folder)


def test_damaged_folder_is_replaced(tmp_path):
    """What cannot be read is made again, with a note."""
    folder = tmp_path / "key"
    make_once(folder, read=read, make=write("damaged"), wait_s=1)

    again = make_once(folder, read=read, make=write("sound"), wait_s=1)

    assert (again.value, again.reused) == ("sound", False)
    assert "was made again. It is damaged." in again.note


def test_failure_leaves_nothing(tmp_path):
    """A maker that fails half-way leaves neither the folder nor its staging."""

    def fail(folder):
        (folder / "half").write_text("x")
        raise BuildError("no")

    with pytest.raises(BuildError):
        make_once(tmp_path / "key", read=read, make=fail, wait_s=1)

    assert [path.name for path in tmp_path.iterdir()] == [".key.lock"]


def test_full_disk_is_an_error_that_says_so(tmp_path):
    """The system's own reason is passed on, and nothing is left."""

    def fill(_folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(EnginegateError, match=r"No space left on device.*Free space"):
        make_once(tmp_path / "key", read=read, make=fill, wait_s=1)

    assert not (tmp_path / "key").exists()


def _hold(lock, held, done):
    with file_lock(lock):
        held.set()
        done.wait(20)


def test_other_process_is_named(tmp_path):
    """Who is making the folder is said when waiting for it takes too long."""
    context = multiprocessing.get_context("fork")
    held, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / ".key.lock", held, done))
    holder.start()
    held.wait(20)

    with pytest.raises(EnginegateError, match=rf"pid {holder.pid} since .*key"):
        make_once(tmp_path / "key", read=read, make=write("a"), wait_s=0.2)

    done.set()
    holder.join()


class TestDeleting:
    """Who uses a folder and who deletes it hold one lock."""

    def test_use_is_a_folder_s_time(self, tmp_path):
        """What was used since stays, whoever made it long ago."""
        folder = tmp_path / "key"
        make_once(folder, read=read, make=write("a"), wait_s=1)
        os.utime(folder, (0, 0))
        began = datetime.now(UTC) - timedelta(minutes=1)
        make_once(folder, read=read, make=write("b"), wait_s=1)

        assert not delete_unused(folder, began)
        os.utime(folder, (0, 0))
        assert delete_unused(folder, began)
        assert list(tmp_path.iterdir()) == []

    def test_folder_of_single_files_is_there_once_somebody_uses_it(self, tmp_path):
        folder = use_folder(tmp_path / "key")

        assert folder.is_dir()
        assert not delete_unused(folder, datetime.now(UTC) - timedelta(minutes=1))

    def test_who_waits_for_the_lock_of_a_deleted_folder_makes_it_under_a_lock_of_its_own(
        self, tmp_path
    ):
        """The file it waited for is gone with the folder: it would lock nothing."""
        folder, lock = tmp_path / "key", tmp_path / ".key.lock"
        make_once(folder, read=read, make=write("a"), wait_s=1)
        seen = []

        def make(staging):
            seen.append(lock_holder(lock))
            return write("b")(staging)

        waiting = Thread(
            target=make_once, args=(folder,), kwargs={"read": read, "make": make, "wait_s": 30}
        )

        def begin():
            waiting.start()
            time.sleep(0.3)
            return False

        assert delete_folder(folder, unless=begin)
        waiting.join()

        assert read(folder) == "b"
        assert seen[0].startswith("pid ")
