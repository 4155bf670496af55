"""The tutorial, done as its reader does it: every file saved, every command run in order."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```(\w+) ?(.*)\n((?s:.*?))```", PAGE)
PORT = "8000"
# The machine decides which of two candidates wins, and how wide a table is.
_NOT_COMPARED = re.compile(r"tied|winner|@laptop|^\.\.\.$|^ *─+$")
_PREPARED_ALREADY = ("make install", ". .venv/bin/activate")
# One candidate takes the same steps as two, in less time; a machine that runs other tests is late.
_CHANGED = {'["fp32", "int8"]': '["int8"]', "p99_ms = 100": "p99_ms = 2000"}


@pytest.fixture
def checkout(tmp_path):
    """A checkout of its own: the code of this one, without anything that was made in it."""
    for name in ("flows", "tasks", "validation"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_command_works_and_prints_what_the_page_shows(checkout):
    """From training to a live model and out again; section 6 repeats commands of earlier ones."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shown_digest = re.search(r"SCORECARD=(\w+)", PAGE)[1]
    printed, digest = "", shown_digest
    with terminals() as second_terminal:
        for language, place, body in BLOCKS:
            text = body.replace(shown_digest, digest).replace(PORT, port)
            if "/" in place:
                (checkout / place).parent.mkdir(exist_ok=True)
                (checkout / place).write_text(reduce(changed, _CHANGED.items(), body))
            elif place == "second terminal":
                second_terminal(text, checkout, port)
            elif language == "sh" and place != "later":
                printed += run(text, checkout, digest)
                digest = next(iter(re.findall(r"enginegate approve (\w+)", printed)), digest)
            elif language == "text":
                assert [line for line in comparable(text) if line not in masked(printed)] == []

    assert digest != shown_digest
    assert sorted(path.name for path in (checkout / ".enginegate" / "live").iterdir()) == []


def changed(text, change):
    return text.replace(*change)


def environment(checkout, digest=""):
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lean = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_SERVER")}
    return {"PATH": programs, "HOME": str(checkout), "SCORECARD": digest, **lean}


def run(commands, checkout, digest):
    """What the commands print; each must succeed."""
    lines = [line for line in commands.splitlines() if not line.startswith(_PREPARED_ALREADY)]
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=checkout,
        env=environment(checkout, digest),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


@contextmanager
def terminals():
    """Starts a command that goes on, such as a server, and stops it as Ctrl-C does at the end."""
    running = []

    def start(command, checkout, port):
        running.append(subprocess.Popen(command.split(), cwd=checkout, env=environment(checkout)))
        deadline_s = time.monotonic() + 180
        while time.monotonic() < deadline_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                    return
            time.sleep(0.1)
        pytest.fail(f"nothing answered at port {port} after: {command}")

    try:
        yield start
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=120)
            finally:
                process.kill()


def comparable(text):
    """Lines that every machine prints, but for their numbers, names and paths."""
    return [masked(line) for line in text.splitlines() if not _NOT_COMPARED.search(line)]


def masked(text):
    """Without what differs from machine to machine; line breaks and spaces do not count."""
    for pattern, mask in (
        (r"(?<![.\w])[0-9a-f]{12,64}\b", "#"),
        (r"/\S*/", "/…/"),
        (r"onnxruntime-(fp32|int8)", "onnxruntime"),
        (r"[-+]?\d+(\.\d+)?", "#"),
        (r"(#|onnxruntime)(,\s*\1)+", r"\1"),
        (r"\bcandidates\b", "candidate"),
        (r"\s+", " "),
    ):
        text = re.sub(pattern, mask, text)
    return text.strip()
