"""The demo end to end, from the wheel in a folder that is no checkout, on a smaller search."""

import os
import subprocess
from pathlib import Path

import pytest

# Minutes: `make demo` shows the same to a person, and runs twice on every change.
pytestmark = [
    pytest.mark.triton,
    pytest.mark.rtx,
    pytest.mark.long,
    pytest.mark.xdist_group("demo"),
]

ROOT = Path(__file__).parents[3]
_SMALLER = {
    "min_rate_per_s": "min_rate_per_s = 100",
    "max_rate_per_s": "max_rate_per_s = 100",
    "rows": "rows = 1",
    "engine_alone_s": "engine_alone_s = 0",
    "queue_delays_us": "queue_delays_us = [0]",
    "instances": "instances = [1]",
    "budget_s": "budget_s = 300",
    "p99_ms": "p99_ms = 2000",
    "confirmations": "confirmations = 1",
    "confirm_requests": "confirm_requests = 300",
    "tensorrt": 'tensorrt = ["fp16"]',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with nothing but a policy with a short search."""
    folder = tmp_path_factory.mktemp("demo")
    lines = (ROOT / "policies" / "digits.toml").read_text().splitlines()
    shorter = [_SMALLER.get(line.split(" = ")[0], line) for line in lines]
    (folder / "policies").mkdir()
    (folder / "policies" / "digits.toml").write_text("\n".join(shorter))
    return folder


@pytest.fixture(scope="module")
def enginegate(folder, installed):
    """Run the command; the exit status, and everything printed."""

    def run(*arguments):
        environment = {
            "PATH": os.pathsep.join([str(installed), os.environ["PATH"]]),
            "HOME": str(folder),
        }
        done = subprocess.run(
            ["enginegate", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=1500,
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture(scope="module")
def first_run(enginegate):
    return enginegate("demo")


def test_the_demo_ends_with_a_version_live_again(first_run):
    """Registered, qualified, promoted, swapped under traffic without a failure, rolled back; and
    the version whose int8 loses the faint images is refused.
    """
    code, printed = first_run

    assert code == 0, printed
    assert "Release 1 is live" in printed
    assert "Refused: models:/digits/2" in printed
    assert "onnxruntime-int8, slice_accuracy_loss on evaluation/light=faint" in printed
    assert "Release 2 is live: onnxruntime-int8, models:/digits/3" in printed
    assert "Release 1 is live again" in printed
    assert " and 0 failed" in printed
    assert "no device can run it here" in printed
    assert "version 1 answers" in printed
    assert "  enginegate status policies/digits.toml" in printed  # its next line works as it stands


def test_second_demo_run_repeats_nothing(enginegate, first_run):
    """And says so."""
    assert first_run[0] == 0

    code, printed = enginegate("demo")

    assert code == 0, printed
    assert "Nothing was trained, registered, built, judged or measured again." in printed


def test_afterwards_status_and_verify_tell_the_story(enginegate, folder, first_run):
    """The live version with its digest and history; one changed byte is reported."""
    assert first_run[0] == 0
    code, printed = enginegate("status")
    assert code == 0, printed
    assert "release 1" in printed
    assert "engine sha256" in printed

    code, printed = enginegate("verify")
    assert code == 0, printed
    engine = folder / ".enginegate" / "live" / "digits" / "digits" / "1" / "model.onnx"
    published = engine.read_bytes()
    changed = bytearray(published)
    changed[100] ^= 1
    engine.chmod(0o644)
    engine.write_bytes(bytes(changed))
    code, printed = enginegate("verify")
    engine.write_bytes(published)
    assert code == 3, printed
    assert "1/model.onnx is not the file that was recorded" in printed


def test_rejected_scorecard_changes_nothing(enginegate, first_run):
    """A rejected scorecard goes nowhere, with an exit code of its own."""
    assert first_run[0] == 0

    code, printed = enginegate("demo", "--approve", "no")

    assert code == 7, printed
    assert "Rejected by demo" in printed
