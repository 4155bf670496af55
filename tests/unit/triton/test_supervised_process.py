import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from enginegate.errors import ServerError
from enginegate.triton.server import Ports
from enginegate.triton.supervised_process import supervise

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('here', flush=True); time.sleep(60)"
)


def _alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _dies(pid, within_s=30.0):
    deadline = time.monotonic() + within_s
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(pid)


def _python(code, log, grace_s=1.0):
    return supervise([sys.executable, "-c", code], log=log, environment={}, grace_s=grace_s)


def _wait_for_it(log):
    """Wait until the command has said that it is there."""
    deadline = time.monotonic() + 60.0
    while "here" not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_ends_with_the_block_and_the_log_stays(tmp_path):
    """The command runs during the block only; what it printed is in the log, for its owner."""
    log = tmp_path / "log"

    with _python("import time; print('here', flush=True); time.sleep(60)", log) as process:
        _wait_for_it(log)
        assert process.status() is None

    assert not _alive(process.pid)
    assert log.stat().st_mode & 0o077 == 0


def test_process_ignoring_sigterm_is_killed(tmp_path):
    """After the grace period SIGKILL ends what did not end by itself."""
    log = tmp_path / "log"

    with _python(STUBBORN, log, grace_s=0.3) as process:
        _wait_for_it(log)

    assert not _alive(process.pid)
    assert process.status() == 128 + signal.SIGKILL


def test_its_status_is_known(tmp_path):
    """An exit status is passed on."""
    with _python("raise SystemExit(7)", tmp_path / "log") as process:
        while process.status() is None:
            time.sleep(0.02)

    assert process.status() == 7


def test_children_of_the_command_end_too(tmp_path):
    """Processes that the command left behind in its group are killed, even after a crash."""
    code = (
        "import os, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); os.abort()"
    )
    log = tmp_path / "log"

    with _python(code, log) as process:
        while process.status() is None:
            time.sleep(0.02)

    assert process.status() == 128 + signal.SIGABRT
    assert _dies(int(log.read_text().split()[0]))


def test_it_survives_the_thread_that_started_it(tmp_path):
    """The end of the starting thread is not the end of the command."""
    entered = []
    context = _python("import time; time.sleep(60)", tmp_path / "log")
    thread = threading.Thread(target=lambda: entered.append(context.__enter__()))
    thread.start()
    thread.join()
    time.sleep(0.3)

    alive = entered[0].status() is None
    context.__exit__(None, None, None)

    assert alive
    assert not _alive(entered[0].pid)


@pytest.mark.parametrize("victim", ["owner", "guard"])
def test_sigkill_of_owner_or_watchdog_ends_it(tmp_path, victim):
    """Neither the death of the owner nor that of the guard leaves the command behind."""
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from enginegate.triton.supervised_process import supervise
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        log = Path({str(tmp_path / "log")!r})
        with supervise(sleep, log=log, environment={{}}, grace_s=1) as mine:
            print(mine.pid, mine.watchdog.pid, flush=True)
            time.sleep(60)
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    command, guard = map(int, owner.stdout.readline().split())
    assert _alive(command)

    os.kill(owner.pid if victim == "owner" else guard, signal.SIGKILL)

    assert _dies(command)
    owner.kill()
    owner.communicate()


def test_missing_program_is_an_error(tmp_path):
    """A missing program is named."""
    with (
        pytest.raises(ServerError, match="/nowhere/tritonserver: No such file"),
        supervise(["/nowhere/tritonserver"], log=tmp_path / "log", environment={}, grace_s=1),
    ):
        pass


def test_ports_are_distinct_and_free():
    """Three free ports are three different ones; a taken one is not free."""
    ports = Ports().chosen()

    assert len({ports.http, ports.grpc, ports.metrics}) == 3
    assert ports.all_free()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", ports.grpc))
        holder.listen()
        assert not ports.all_free()


def test_shared_memory_is_made_private_and_no_link_is_followed(tmp_path):
    """Only regular files that begin with the name; what a stranger's link leads to is not ours."""
    prefix = f"enginegate-test-{os.getpid()}-"
    region, foreign = Path("/dev/shm", f"{prefix}a"), Path("/dev/shm", f"{prefix}b")  # noqa: S108
    target = tmp_path / "target"
    for path in (region, target):
        path.touch()
        path.chmod(0o644)
    foreign.symlink_to(target)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    try:
        with supervise(sleep, log=tmp_path / "log", environment={}, grace_s=1, private=prefix):
            deadline = time.monotonic() + 60.0
            while region.stat().st_mode & 0o077:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.3)

        assert target.stat().st_mode & 0o777 == 0o644
    finally:
        region.unlink()
        foreign.unlink()


def test_sigterm_to_the_guard_ends_it_in_order(tmp_path):
    """Whoever started the guard in another way may stop it like the command itself."""
    code = (
        "import signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit(0))); "
        "print('here', flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"

    with _python(code, log, grace_s=30.0) as process:
        _wait_for_it(log)
        process.watchdog.terminate()
        process.watchdog.wait(60.0)

    assert "bye" in log.read_text()


def test_it_gets_no_secret_of_this_program(tmp_path, monkeypatch):
    """Models of others run in a server: receivers' addresses are not theirs to read."""
    monkeypatch.setenv("ENGINEGATE_NOTIFY", "slack://TOKEN")
    log = tmp_path / "log"
    code = "import os; print(os.environ.get('ENGINEGATE_NOTIFY', 'nothing'), 'here', flush=True)"
    with _python(code, log):
        _wait_for_it(log)
    assert log.read_text().split() == ["nothing", "here"]
