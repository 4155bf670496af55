"""What going back refuses before anything is changed."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import EnginegateError, ExitCode, TamperedError
from enginegate.policy import read_policy
from enginegate.repository import Layout, LiveRepository
from tests.fakes.live_triton import FakeTriton, package_in

ROOT = Path(__file__).parents[4]


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


def test_promise_that_cannot_be_read_makes_no_rollback_fail(live, monkeypatch):
    """It is done by then, and a script that sees a failure would go back once more."""
    root = read_policy(live).target.repository
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(
        "enginegate.cli.live.release.open_target",
        lambda *_, **__: LiveRepository(root, FakeTriton(root), load_timeout_s=1.0),
    )
    monkeypatch.setattr("enginegate.cli.live.release.try_deliver", lambda *_, **__: "")

    def damaged(*_):
        raise TamperedError("the promise was changed")

    monkeypatch.setattr(Layout, "held_to", damaged)

    done = CliRunner().invoke(app, ["rollback", str(live), "--json"])

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["promise"] is None
    assert json.loads(done.stdout)["release"]["version"] == 1
