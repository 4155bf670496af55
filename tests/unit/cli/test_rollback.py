"""What going back refuses before anything is changed."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import EnginegateError, ExitCode
from enginegate.policy import read_policy
from enginegate.repository import LiveRepository
from tests.fakes.live_triton import FakeTriton, package_in

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", ["0", "-1"])
def test_unknown_release_number_is_bad_input(number):
    """It is the option that is wrong, whatever is live."""
    refused = CliRunner().invoke(app, ["rollback", "nowhere.toml", "--to", number]).exception

    assert isinstance(refused, EnginegateError)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert f"--to {number} is no release number" in str(refused)


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A policy in whose repository release 2 is live after release 1."""
    monkeypatch.chdir(tmp_path)
    policy = Path(shutil.copy(ROOT / "policies" / "digits.toml", tmp_path))
    root = read_policy(policy).target.repository
    root.mkdir(parents=True)
    repository = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    for before in (None, 1):
        repository.publish(package_in(tmp_path, float(before or 0)), expected=before)
    return policy


@pytest.mark.parametrize(
    ("number", "message"), [("99", "releases: 1, 2"), ("2", "Release 2 of digits is live already")]
)
def test_release_that_cannot_be_gone_back_to_is_bad_input(live, monkeypatch, number, message):
    """The message says which there are."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    refused = CliRunner().invoke(app, ["rollback", str(live), "--to", number]).exception

    assert isinstance(refused, EnginegateError)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert message in str(refused)
