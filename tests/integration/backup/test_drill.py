"""The drill: a backup, an empty machine (an empty folder at another path), a restore."""

import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.cli.live.backup import PASSPHRASE
from enginegate.cli.live.repository import repository_of
from enginegate.policy import read_policy
from enginegate.triton.endpoint import live_server
from enginegate.workspace import Workspace
from tests.fakes.adding_model import ADDING_MODEL
from tests.fakes.projects import LIVE, published_project

POLICY = "policies/digits.toml"


@pytest.fixture
def run(monkeypatch):
    """Run a command in a project's folder; what it prints."""
    for name in ("ENGINEGATE_HOME", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    # MLflow is another machine's, and not back yet.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv(PASSPHRASE, "correct horse battery")

    def command(folder, *words):
        monkeypatch.chdir(folder)
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    return command


def test_restored_project_verifies_shows_and_rolls_back_as_the_old_one_did(tmp_path, run):
    """The old machine is gone by then; nothing that was restored refers to where it was.

    It takes several seconds: the passphrase is stretched twice, and a real Triton serves.
    """
    old, new, file = tmp_path / "old", tmp_path / "new", tmp_path / "disk" / "b"
    published_project(old, ADDING_MODEL)
    file.parent.mkdir()
    verified, audited = run(old, "verify", "--all"), run(old, "audit", POLICY)
    shown = run(old, "status").replace(str(old), "HERE")
    run(old, "backup", str(file))
    shutil.rmtree(old)
    new.mkdir()

    run(new, "restore", str(file))

    assert "problem" not in verified
    assert run(new, "verify", "--all") == verified
    assert run(new, "audit", POLICY) == audited
    assert run(new, "status").replace(str(new), "HERE") == shown
    policy = read_policy(new / POLICY)
    with live_server(new / LIVE, Workspace.of(policy)) as server:
        with server.client() as client:
            repository_of(policy).primary.bring_up("digits")
            said = run(new, "rollback", POLICY, "--reason", "a drill on an empty machine")
            reply = client.infer("digits", {"x": np.zeros((1, 2), np.float32)})
        assert "MLflow does not know yet" in said
        assert (reply.model_version, float(reply.outputs["y"][0, 0])) == ("1", 1.0)
        assert "problem" not in run(new, "verify")
