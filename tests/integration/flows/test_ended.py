"""A command that is told to end, or killed, while a flow runs on a Prefect server of its own."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("ended")

ROOT = Path(__file__).parents[3]
_DIGITS = str(ROOT / "policies" / "digits.toml")
_FLOW = """
import time

from prefect import flow

@flow(name="qualify", validate_parameters=False)
def qualify(policy, model=None):
    print("the flow runs", flush=True)
    for _ in range(60_000):
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An installation whose flow does nothing for ten minutes."""
    folder = tmp_path_factory.mktemp("installed")
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "enginegate", folder / "enginegate", ignore=unwanted)
    packages = folder / "enginegate" / "pipeline" / "packages"
    for name in ("flows", "tasks", "validation"):
        shutil.copytree(ROOT / name, packages / name, ignore=unwanted)
    (packages / "flows" / "qualify.py").write_text(_FLOW)
    return folder


def _below(pid):
    """Every process below one."""
    children = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (thread / "children").read_text().split())
    return [each for child in children for each in (child, *_below(child))]


def _read_to(pipe, words, within_s):
    """What a pipe held until it had some words, or was closed by all who wrote to it."""
    read, deadline = b"", time.monotonic() + within_s
    while words is None or words not in read:
        assert select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0], read
        more = os.read(pipe.fileno(), 65536)
        if not more:
            return read.decode()
        read += more
    return read.decode()


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        pytest.param(signal.SIGTERM, 143, "Ended by SIGTERM.", id="SIGTERM"),
        pytest.param(signal.SIGHUP, 129, "Ended by SIGHUP.", id="SIGHUP"),
        pytest.param(signal.SIGKILL, -9, "", id="SIGKILL"),
    ],
)
def test_own_prefect_server_ends_with_the_command(installed, tmp_path, number, status, said):
    """Prefect's own server ends with the command, says nothing into its pipe, and no traceback."""
    running = subprocess.Popen(
        [Path(sys.executable).with_name("enginegate"), "qualify", _DIGITS],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ENGINEGATE_HOME": str(tmp_path),
            "PYTHONPATH": str(installed),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    below = []
    try:
        _read_to(running.stdout, b"the flow runs", within_s=180.0)
        below = _below(running.pid)
        assert any(b"uvicorn" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below)

        running.send_signal(number)

        printed = _read_to(running.stdout, None, within_s=60.0)
        assert running.wait(30.0) == status
        assert said in printed
        assert "Traceback" not in printed
        deadline = time.monotonic() + 60.0
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            assert time.monotonic() < deadline, below
            time.sleep(0.05)
    finally:
        # Not until its pipe is closed: that is what may never happen.
        running.kill()
        running.wait()
        running.stdout.close()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
