"""Commands that run in another folder than the policy's project find the same files."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginegate.repository import LiveRepository
from tests.fakes.live_triton import FakeTriton, package_in

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.fixture
def project(tmp_path):
    """A project with a live release, and a policy that names everything relatively."""
    root = tmp_path / "project"
    (root / "policies").mkdir(parents=True)
    (root / "policies" / "digits.toml").write_text(DIGITS.read_text())
    live = root / ".enginegate" / "live" / "digits"
    live.mkdir(parents=True)
    LiveRepository(live, FakeTriton(live)).publish(package_in(tmp_path, 1.0), expected=None)
    return root


def run(folder, *arguments):
    settings = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    command = [str(Path(sys.executable).with_name("enginegate")), *arguments]
    return subprocess.run(
        command, cwd=folder, env=settings, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("place", ["project", "elsewhere", "project/policies"])
def test_status_tells_what_is_live_from_any_folder(project, tmp_path, place):
    """Relative paths of a policy start from its project, not from the current folder."""
    folder = tmp_path / place
    folder.mkdir(exist_ok=True)

    done = run(folder, "status", os.path.relpath(project / "policies" / "digits.toml", folder))

    assert "live: release 1" in done.stdout
    assert done.returncode == 0
    assert not (tmp_path / "elsewhere" / ".enginegate").exists()


def test_verify_checks_the_release_from_any_folder(project, tmp_path):
    """A changed byte is found from another folder too."""
    (project / ".enginegate/live/digits/digits/1/engine.bin").write_text("2.0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    done = run(elsewhere, "verify", "../project/policies/digits.toml")

    assert done.returncode == 3, done.stdout + done.stderr
    assert "problem" in done.stdout


def test_functions_of_the_project_are_found_from_any_folder(project, tmp_path):
    """What redacts live requests is imported from the policy's project."""
    (project / "mine.py").write_text("def clean(inputs, outputs):\n    return inputs, outputs\n")
    policy = project / "policies" / "digits.toml"
    policy.write_text(policy.read_text().replace("[shadow]", '[shadow]\nredactor = "mine:clean"'))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    np.savez(elsewhere / "theirs.npz", **{"input.image": np.zeros((4, 1, 8, 8), np.float32)})

    done = run(elsewhere, "shadow", "import", str(policy), "theirs.npz")

    assert done.returncode == 0, done.stderr
    assert "rewritten by mine:clean" in done.stdout
    assert (project / ".enginegate" / "shadow").is_dir()


def test_status_without_a_policy_finds_the_projects_own_from_a_folder_below(project):
    """The workspace and the policies belong to one project, wherever in it the command runs."""
    below = project / "notes" / "today"
    below.mkdir(parents=True)

    assert "live: release 1" in run(below, "status").stdout
