"""What waits for Prefect's server while it is away, hangs, refuses, or is something else."""

import logging
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch
from uuid import uuid4

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from enginegate.errors import EnginegateError
from enginegate.pipeline import pipeline_module
from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from enginegate.workspace import Workspace
from flows.answer import resume_suspended
from tasks.expired_approvals import note_expired_approvals
from tasks.prefect_server import check_prefect_answers
from tasks.release_events import announce_releases
from tasks.run_page import ProgressBar, RunArtifact, extend_history, leave_artifacts
from tests.fakes.evidence import decision, scorecard
from tests.fakes.family import _POLICY as POLICY

# Less than what it is told to wait before it tries again, and than it hangs.
_QUICK_S = 12.0
_HANGS_S = 20.0


class Odd(BaseHTTPRequestHandler):
    """Answers like nothing that a client hopes for."""

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def answer(self):
        kind = self.server.kind
        if kind == "hangs":
            self.server.over.wait(_HANGS_S)
            return
        status, body = {
            "busy": (503, b""),
            "maintained": (503, b""),
            "refuses": (401, b"{}"),
            "a page": (200, b"<html>sign in</html>"),
            "words": (200, b'"hello"'),
        }[kind]
        self.send_response(status)
        self.send_header("Retry-After", "15")
        if kind == "maintained":
            self.send_header("Prefect-Maintenance", "true")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nobody reads it."""


@pytest.fixture(params=["away", "hangs", "busy", "maintained", "refuses", "a page", "words"])
def odd_server(request, monkeypatch):
    """Its address, with a password, is where Prefect is said to be."""
    monkeypatch.setattr("tasks.prefect_server._ANSWER_S", 0.5)
    monkeypatch.setattr("tasks.prefect_server._FIRST_ANSWER_S", 0.5)
    monkeypatch.setattr("tasks.prefect_server._SAID_AFTER_S", 0.1)
    # What a command sets for Prefect is not for the tests after this one.
    with patch.dict(os.environ), ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.kind, server.over = request.param, threading.Event()
        port = 9 if request.param == "away" else server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://ada:secret@127.0.0.1:{port}/api"}):
            yield request.param
        server.over.set()
        server.shutdown()


@pytest.mark.parametrize(
    "ask",
    [
        lambda policy, workspace: announce_releases.fn(policy.target.repository, workspace),
        lambda policy, workspace: note_expired_approvals.fn(policy.live_tables, workspace),
    ],
    ids=["release-events", "expired-approvals"],
)
def test_absent_prefect_is_a_warning_without_password(
    odd_server, ask, tmp_path, monkeypatch, caplog
):
    """It is a warning within seconds, whatever it answers; a promotion's own error stays seen."""
    del odd_server  # it only has to be there
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.format(root=tmp_path))
    rules = read_policy(path)
    rules.target.repository.mkdir()
    AuditLog(rules.target.repository).tell("published", rules.name, why="ada: yes", release=1)

    begun_s = time.monotonic()
    assert ask(rules, Workspace.of(rules)) == ()

    assert time.monotonic() - begun_s < _QUICK_S
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("enginegate.")]
    assert line.startswith(("Prefect did not get", "promotions that nobody answered were not"))
    assert "secret" not in caplog.text


def test_flow_needs_an_answering_prefect_server(odd_server, caplog):
    """Known within seconds, with what to do; whatever else it answers is Prefect's own to judge."""
    caplog.set_level(logging.INFO, logger="enginegate")
    begun_s = time.monotonic()
    if odd_server in {"away", "hangs"}:
        with pytest.raises(EnginegateError, match="PREFECT_API_URL") as refused:
            pipeline_module("flows.qualify")
        assert "http://***@127.0.0.1:" in str(refused.value)
        assert "secret" not in f"{refused.value}{refused.value.__cause__!r}"
    else:
        check_prefect_answers()

    assert time.monotonic() - begun_s < _QUICK_S
    if odd_server == "hangs":
        assert "waiting for Prefect's server" in caplog.text
    assert "secret" not in caplog.text


def test_benchmark_goes_on_without_its_progress(odd_server, monkeypatch, caplog):
    """One line in the log, and one wait at most, whatever the server answers."""
    del odd_server  # it only has to be there
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(uuid4()))
    monkeypatch.setattr("tasks.run_page._PROGRESS_ANSWER_S", 0.5)
    monkeypatch.setattr("tasks.run_page._UPDATE_EVERY_S", 0.0)
    bar = ProgressBar("benchmark-tiny-onnxruntime-int8", "**onnxruntime-int8** of tiny")

    begun_s = time.monotonic()
    for number in range(200):
        bar.update(number / 200, "trying 100/s")
    bar.finish("100 requests/s")
    leave_artifacts([RunArtifact("scorecard-tiny", "markdown", "# May it serve?")])
    extend_history(RunArtifact("live-tiny", "markdown", "# live"))

    assert time.monotonic() - begun_s < _QUICK_S
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("enginegate.")]
    assert line.startswith("Prefect's pages may lack artifacts or names of this run: ")
    assert "secret" not in caplog.text


@pytest.mark.parametrize("odd_server", ["away", "hangs"], indirect=True)
def test_approval_continues_without_prefect(odd_server, caplog):
    """The decision is kept already, so it is a warning that says how to go on."""
    del odd_server  # it only has to be there
    begun_s = time.monotonic()

    assert pipeline_module("flows.answer").resume_suspended is resume_suspended
    assert resume_suspended(decision(scorecard())) == ()

    assert time.monotonic() - begun_s < _QUICK_S
    assert "resume it in Prefect's UI" in caplog.text
    assert "secret" not in caplog.text
