"""The tutorial, done as its reader does it: every file saved, every command run in order."""

import os
import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

# Two qualifications and two promotions; the demo's test takes the wheel through both, too.
pytestmark = [pytest.mark.triton, pytest.mark.long]

PAGE = (Path(__file__).parents[3] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```(\w+) ?(.*)\n((?s:.*?))```", PAGE)
PORT = "8000"
# The machine decides which of two candidates wins, and how wide a table is.
_NOT_COMPARED = re.compile(r"tied|winner|^\.\.\.$|^ *─+$")
# The environment has the wheel already; what pip makes of its extras, test_installing.py shows.
_PREPARED_ALREADY = ("python3 -m venv", ". .venv/bin/activate", "pip install")
# A machine that runs other tests is late.
_PATIENT = ("--p99-ms 100", "--p99-ms 2000")
_QUICK = (
    "min_throughput_per_s = 50",
    """min_throughput_per_s = 50
confirmations = 1
confirm_requests = 300

[search]
max_batch_sizes = [8]
queue_delays_us = [0]
instances = [1]
min_rate_per_s = 200
max_rate_per_s = 200
measurement_s = 1
budget_s = 60""",
)


def test_every_command_works_and_prints_what_the_page_shows(installed, tmp_path):
    """From training to a live model, its next version, and out again; from the wheel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    printed, digests = "", []
    with terminals() as second_terminal:
        for language, place, body in BLOCKS:
            text = body.replace(PORT, port).replace(*_PATIENT)
            environment = environment_of(installed, tmp_path, digests)
            if place == "train.py":
                (tmp_path / place).write_text(body)
            elif place == "second terminal":
                second_terminal(text, tmp_path, environment, port)
            elif language == "sh":
                printed += run(text, tmp_path, environment)
                digests = re.findall(r"Next: enginegate approve (\w+)", printed)
                if "enginegate init" in text:
                    shorten(tmp_path / "policies" / "spirals.toml")
            elif language == "text":
                assert [line for line in comparable(text) if line not in masked(printed)] == []

    assert len(set(digests)) == 2
    assert [path for path in (tmp_path / "model_repo").iterdir() if path.is_dir()] == []


def shorten(policy):
    """The policy that was written, with the smallest search there is."""
    written = policy.read_text()
    assert len(written.splitlines()) <= 20
    assert len(re.findall(r"^\w+ = ", written, re.MULTILINE)) == 9  # as the page says
    policy.write_text(written.replace(*_QUICK))


def environment_of(installed, folder, digests):
    """A shell's, in which the environment is active; a digest is what was printed last."""
    programs = os.pathsep.join([str(installed), os.environ["PATH"]])
    lean = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_SERVER")}
    return {"PATH": programs, "HOME": str(folder), "SCORECARD": "".join(digests[-1:]), **lean}


def run(commands, folder, environment):
    """What the commands print; each must succeed."""
    left_out = (*_PREPARED_ALREADY, "SCORECARD=")
    lines = [line for line in commands.splitlines() if not line.startswith(left_out)]
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}"
    return done.stdout


@contextmanager
def terminals():
    """Starts a command that goes on, such as a server, and stops it as Ctrl-C does at the end."""
    running = []

    def start(command, folder, environment, port):
        running.append(
            subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=folder, env=environment)
        )
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
