"""The tracker through a real tracking server, which keeps its own artifacts."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from enginegate.tracking import Tracker
from tests.fakes.qualification import qualification


@contextmanager
def started(folder):
    """A server with one worker and no job runner, and where it is to listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    settings = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=settings, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server that answers. Another program may take its port while it starts: then anew."""
    folder = tmp_path_factory.mktemp("server")
    with ExitStack() as stack:
        for _ in range(3):
            server, there = stack.enter_context(started(folder))
            if answers(server, there):
                break
        else:
            pytest.fail((folder / "log").read_text())
        yield there


def answers(server, address):
    """Whether it does within three minutes, and has not ended."""
    for _ in range(360):
        if server.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):  # noqa: S310
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def test_record_and_register(address, tmp_path):
    """Evidence, files and versions arrive through HTTP; our own artifact folder stays unused."""
    import mlflow.artifacts

    tracker = Tracker(address, tmp_path / "unused")
    experiment = tracker.connection.experiment("training/digits")
    with tracker.connection.run(experiment, "seed 1", {}) as run:
        model = tracker.client.create_logged_model(experiment, name="m", source_run_id=run)
        (tmp_path / "model.txt").write_text("weights")
        tracker.client.log_model_artifact(model.model_id, str(tmp_path / "model.txt"))
        tracker.client.finalize_logged_model(model.model_id, "READY")
    card = qualification(model_uri="models:/digits/1")
    recorded = tracker.record(card, {}, report="# Report", make_page=lambda *_: "<h1>Page</h1>")

    version = tracker.register("digits", model.model_id, run_id=run, tags={})
    tracker.move_alias("digits", "champion", version)

    location = tracker.client.get_model_version_download_uri("digits", str(version))
    fetched = mlflow.artifacts.download_artifacts(location, tracking_uri=address)

    assert tracker.resolve("models:/digits@champion") == "models:/digits/1"
    assert Path(fetched, "model.txt").read_text() == "weights"
    assert tracker.comparison(recorded).runs_url.startswith(f"{address}/#/experiments/")
    page = f"{address}/get-artifact?path=report.md&run_uuid={recorded}"
    with urllib.request.urlopen(page, timeout=10) as answer:  # noqa: S310
        assert answer.read() == b"# Report"
    with urllib.request.urlopen(page.replace("report.md", "decision.html"), timeout=10) as answer:  # noqa: S310
        assert answer.read() == b"<h1>Page</h1>"
    assert tracker.comparison(recorded).page_url.startswith(f"{address}/#/experiments/")
    assert not (tmp_path / "unused").exists()
