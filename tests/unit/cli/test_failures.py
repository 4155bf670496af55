"""What nobody expected is told in a message with a remedy; a traceback goes to a file."""

import errno
import os
import sys

import pytest

from enginegate.cli import app
from enginegate.cli.failures import failure_of, keep_traceback
from enginegate.errors import ExitCode


@pytest.mark.parametrize(
    ("number", "word"),
    [
        pytest.param(errno.EACCES, "may not do that there", id="access"),
        pytest.param(errno.ENOSPC, "Make room", id="space"),
        pytest.param(errno.EDQUOT, "Make room", id="quota"),
        pytest.param(errno.EROFS, "mounted read-only", id="read-only"),
        pytest.param(errno.EMFILE, "ulimit -n", id="files"),
        pytest.param(errno.EIO, "dmesg", id="disk"),
    ],
)
def test_the_system_refuses(number, word):
    """The path, what the system said, and what to do; also where it is only the cause."""
    error = OSError(number, os.strerror(number), "/srv/models/x")
    wrapped = ValueError("something else")
    wrapped.__cause__ = error

    for each in (error, wrapped):
        failure = failure_of(each)

        assert failure.message.startswith(f"/srv/models/x: {os.strerror(number)}.")
        assert word in failure.message
        assert failure.exit_code is ExitCode.COULD_NOT_FIND_OUT


def test_full_database_disk_is_explained():
    """SQLite has its own words for it."""
    assert "Make room" in failure_of(RuntimeError("(sqlite3) database or disk is full")).message


def test_no_memory():
    """Nobody has to read where it was asked for."""
    assert "not enough memory" in failure_of(MemoryError("Unable to allocate 7 TiB")).message


def test_prefect_is_away():
    """Its name is said, and what to look at."""
    failure = failure_of(RuntimeError("Failed to reach API at http://127.0.0.1:1/api/"))

    assert failure.message.startswith("Prefect did not do what it was asked")
    assert "PREFECT_API_URL" in failure.message
    assert failure.exit_code is ExitCode.COULD_NOT_FIND_OUT


def test_internal_error_is_one_line_with_a_private_traceback(tmp_path, monkeypatch):
    """One line; the traceback is in a file of the workspace for its owner only."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    error = KeyError("oops")

    failure, kept = failure_of(error), keep_traceback(error)

    assert (failure.message, failure.exit_code) == ("KeyError: 'oops'", ExitCode.CRASH)
    assert "KeyError" in kept.read_text()
    assert kept.parent == tmp_path / "logs"
    assert kept.stat().st_mode & 0o077 == 0


def test_the_command_prints_no_traceback(tmp_path, monkeypatch, capsys):
    """Whatever a verb raises."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["enginegate", "doctor"])
    monkeypatch.setattr("enginegate.cli.app._doctor.print_parts", lambda _: {}["oops"])

    with pytest.raises(SystemExit) as ended:
        app.run_command()

    told = capsys.readouterr().err
    assert ended.value.code == ExitCode.CRASH
    assert "A fault in this program: KeyError: 'oops'" in told
    assert "Traceback (most" not in told
    assert str(tmp_path / "logs") in told.replace("\n", "")


def test_traceback_is_kept_where_the_current_folder_was_deleted(tmp_path, monkeypatch):
    """There is no workspace then, and the temporary folder takes it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(gone)
    gone.rmdir()
    kept = keep_traceback(RuntimeError("unexpected"))
    assert kept is not None
    assert kept.parent == tmp_path
    assert "RuntimeError: unexpected" in kept.read_text()
