"""What waits for Prefect's server while it is away, hangs, refuses, or is something else."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from tasks.announce import announce
from tasks.unanswered import note_unanswered
from tests.fakes.family import _POLICY as POLICY

_QUICK_S = 6.0
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
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.kind, server.over = request.param, threading.Event()
        port = 9 if request.param == "away" else server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with temporary_settings({PREFECT_API_URL: f"http://ada:secret@127.0.0.1:{port}/api"}):
            yield
        server.over.set()
        server.shutdown()


@pytest.mark.parametrize("ask", [announce, note_unanswered], ids=["announce", "unanswered"])
def test_nobody_waits_for_it_and_no_password_is_told(
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
    assert ask.fn(rules) == ()

    assert time.monotonic() - begun_s < _QUICK_S
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("enginegate.")]
    assert line.startswith(("Prefect was not told", "promotions that nobody answered were not"))
    assert "secret" not in caplog.text
