"""`enginegate ui`: MLflow's own UI on a real database, and its end."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import ExitCode, InputError
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace
from tests.fakes.qualification import qualification

COMMAND = [str(Path(sys.executable).with_name("enginegate")), "ui"]


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "home"))
    return Workspace(tmp_path / "home")


@pytest.mark.slow
def test_ui_shows_the_candidates_and_ends_by_ctrl_c(workspace):
    """It prints where, on loopback; nothing of it runs any more after Ctrl-C.

    MLflow's server takes its time to start, so that one test looks at all of it.
    """
    workspace.root.mkdir()
    card = qualification(model="shown")
    run = Tracker(workspace.tracking_uri, workspace.artifacts).record(card, {})
    card = card.model_copy(update={"mlflow_run": run})
    workspace.save_scorecard(card)
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True, env=os.environ) as command:
        lines = []
        for line in command.stdout:
            lines.append(line)
            if "Ctrl-C stops it" in line:
                break
        said = "".join(lines)
        base = re.search(r"http://127\.0\.0\.1:\d+", said)[0]
        with urllib.request.urlopen(f"{base}/health", timeout=30) as answer:  # noqa: S310
            assert answer.status == 200
        command.send_signal(signal.SIGINT)
        rest = command.communicate(timeout=60)[0]

    assert command.returncode == 0
    assert "was stopped" in rest
    assert f"viewStateShareKey=enginegate-{run[:12]}" in said
    assert f"scorecard {card.digest[:12]}, the winner first" in said
    assert f"{run}/artifacts/decision.html" in said
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(base.rpartition(":")[2]))) != 0


def test_nothing_was_recorded_yet(workspace):
    """No database is made by looking for one."""
    ended = CliRunner().invoke(app, ["ui"])

    assert isinstance(ended.exception, InputError)
    assert "Qualify a model first" in str(ended.exception)
    assert not (workspace.root / "mlflow.db").exists()


def test_port_that_is_taken(workspace):
    """A port that was asked for is not replaced by another one silently."""
    workspace.root.mkdir()
    (workspace.root / "mlflow.db").touch()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = CliRunner().invoke(app, ["ui", "--port", str(port)])

    assert isinstance(ended.exception, InputError)
    assert f"Port {port} of 127.0.0.1 is taken" in str(ended.exception)


@pytest.mark.parametrize(
    "arguments", [("ui", "--port", "99999"), ("serve", "p.toml", "--http-port", "-1")]
)
def test_number_that_is_no_port(workspace, arguments):
    """It is refused by name, before anything is started."""
    ended = CliRunner().invoke(app, arguments)

    assert ended.exit_code == ExitCode.USAGE
    assert f"Invalid value for '{arguments[-2]}'" in ended.output
    assert not workspace.logs.exists()
