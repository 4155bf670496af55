"""The command as a user runs it: what it says, and what it exits with."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def enginegate(tmp_path):
    """Run the command with a workspace of its own, in a folder of its own."""

    def run(*arguments, cwd=tmp_path, **environment):
        command = [str(Path(sys.executable).with_name("enginegate")), *arguments]
        settings = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ENGINEGATE_HOME": str(tmp_path / "workspace"),
            **environment,
        }
        return subprocess.run(
            command, cwd=cwd, env=settings, capture_output=True, text=True, check=False, timeout=120
        )

    return run


@pytest.fixture
def policy(tmp_path):
    shutil.copy(ROOT / "policies" / "digits.toml", tmp_path / "digits.toml")
    return tmp_path / "digits.toml"


def test_help_teaches_verbs_and_exit_codes(enginegate):
    """Every verb, and what the exit status means."""
    shown = enginegate("--help").stdout

    for verb in (
        "doctor",
        "qualify",
        "benchmark",
        "approve",
        "reject",
        "promote",
        "rollback",
        "status",
        "verify",
    ):
        assert f" {verb} " in shown
    assert "gates failed" in shown
    assert "inconclusive" in shown


def test_doctor_says_what_is_missing_and_how_to_get_it(enginegate):
    """Nothing has to be installed for it to answer."""
    done = enginegate("doctor")

    assert done.returncode == 0
    assert "onnxruntime" in done.stdout
    assert "Triton server" in done.stdout


def test_valid_policy_is_explained(enginegate, policy, tmp_path):
    """Candidates, SLO and search in a few lines; and what will be inconclusive here, and why."""
    text = policy.read_text()
    policy.write_text(text.replace('calibration = ".enginegate/data/digits/calibration.npz"', ""))
    for name in ("evaluation", "traffic"):
        path = tmp_path / ".enginegate" / "data" / "digits" / f"{name}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.zeros((2000, 1, 8, 8), np.float32)
        np.savez(path, **{"input.image": images, "label": np.zeros(2000, np.int64)})

    done = enginegate("policy", "check", str(policy))

    assert done.returncode == 0, done.stderr
    assert "is valid" in done.stdout
    assert "inconclusive onnxruntime-int8: int8 needs calibration data" in done.stdout


def test_policy_with_missing_data_exits_bad_input(enginegate, policy):
    """The file, the key, its value and what to do; exit code 6."""
    done = enginegate("policy", "check", str(policy))

    assert done.returncode == 6
    assert 'data.evaluation = ".enginegate/data/digits/evaluation.npz"' in done.stderr
    assert "is valid" not in done.stdout


def test_invalid_policy_exits_bad_input(enginegate, policy):
    """The message names the file and the key; exit code 6."""
    policy.write_text(policy.read_text().replace("p99_ms", "p99", 1))

    done = enginegate("policy", "check", str(policy))

    assert done.returncode == 6
    assert "digits.toml" in done.stderr
    assert "slo.p99: there is no such key; did you mean p99_ms?" in done.stderr


def test_unknown_scorecard_exits_bad_input(enginegate):
    """Nothing is decided about evidence that does not exist."""
    done = enginegate("approve", "abc123", "--reason", "looks right")

    assert done.returncode == 6
    assert "no scorecard 'abc123'" in done.stderr


def test_malformed_scorecard_is_not_shown(enginegate, tmp_path):
    """The message says what is wrong with it; what it holds stays where it is."""
    (tmp_path / "notes.txt").write_text("password:x:hunter2")

    done = enginegate("explain", "notes.txt")

    assert done.returncode == 6
    assert "notes.txt is not a valid Scorecard" in done.stderr
    assert "hunter2" not in done.stderr


def test_empty_repository_status_and_verify_succeed(enginegate, policy):
    """Status and verification of an empty repository succeed."""
    assert "nothing is live" in enginegate("status", str(policy)).stdout
    assert enginegate("verify", str(policy)).returncode == 0


@pytest.mark.parametrize("verb", ["status", "verify"])
def test_invalid_policy_or_scorecard_does_not_hide_others(enginegate, policy, tmp_path, verb):
    """Each is named, the rest is shown, and the exit code says that something was left out."""
    policies = tmp_path / "policies"
    policies.mkdir()
    (policies / "a.toml").write_text("schema_version = ")
    policy.rename(policies / "digits.toml")
    damaged = tmp_path / "workspace" / "scorecards" / f"{'0' * 64}.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"schema_version": 1')

    done = enginegate(verb)

    assert done.returncode == 6
    assert "a.toml is not TOML" in done.stderr
    if verb == "status":
        assert "nothing is live" in done.stdout
        assert f"{damaged.name} is not a valid Scorecard" in done.stderr.replace("\n", "")
    else:
        assert "only the folder was checked" in done.stdout


@pytest.mark.triton
def test_serving_on_a_taken_port_names_the_port(enginegate, policy):
    """Exit code 5, and no server is left running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = enginegate("serve", str(policy), "--http-port", str(port))

    assert done.returncode == 5
    assert str(port) in done.stderr


def test_missing_triton_names_how_to_install_it(enginegate, policy, tmp_path):
    """Without the wheel and without tritonserver on PATH."""
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text(
        "import importlib.metadata as m, importlib.util as u\n"
        "find, spec = m.distribution, u.find_spec\n"
        "def distribution(name):\n"
        "    if name == 'nvidia-pytriton':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return find(name)\n"
        "m.distribution = distribution\n"
        "u.find_spec = lambda n, p=None: None if n == 'pytriton' else spec(n, p)\n"
    )

    done = enginegate("serve", str(policy), PYTHONPATH=str(hide), PATH="/usr/bin:/bin")

    assert done.returncode == 5
    assert "requirements/tritonserver.txt" in done.stderr or "nvidia-pytriton" in done.stderr


@pytest.mark.parametrize("verb", ["audit", "status", "verify"])
def test_file_as_repository_is_not_an_empty_repository(enginegate, policy, tmp_path, verb):
    """Nothing can be said about it, so nothing is called fine."""
    there = tmp_path / "not-a-folder"
    there.touch()
    text = policy.read_text()
    policy.write_text(text.replace('".enginegate/live/digits"', f'"{there}"'))

    done = enginegate(verb, str(policy))

    assert done.returncode == 5, done.stdout
    assert "not-a-folder" in done.stderr.replace("\n", "")


def test_file_as_output_folder_is_refused_before_measuring(enginegate, policy, tmp_path):
    """Not after the search, with a traceback."""
    there = tmp_path / "report"
    there.touch()

    done = enginegate("benchmark", str(policy), "--out", str(there))

    assert done.returncode == 6, done.stderr
    assert "report is a file" in done.stderr.replace("\n", " ")
