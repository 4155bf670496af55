"""A proxy before an HTTP server, which delays, refuses, cuts or loses what is asked for by name."""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(slots=True)
class Fault:
    """What happens to the next requests of a kind.

    Attributes:
        kind: `slow` answers after ``seconds``; `status` answers ``status`` without asking the
            server; `lost` lets the server carry the request out and resets the connection before
            its answer; `late` resets the connection first, and hands the request to the server
            after ``seconds``; `cut` ends the connection in the middle of the answer's body.
        method: of the requests; empty: of any.
        path: part of their path.
        after: how many of them pass first.
        times: how many of the following ones meet it.
    """

    kind: Literal["slow", "status", "lost", "late", "cut"]
    method: str = "PUT"
    path: str = ""
    after: int = 0
    times: int = 1
    status: int = 500
    retry_after_s: int | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class FaultProxy:
    """Faults that wait for their request, and what was asked so far.

    Attributes:
        address: where to send requests instead of to the server.
        seen: method, path and fault (or empty) of each request, in order.
        done: set when each request that was handed on late has been carried out.
    """

    address: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: Fault) -> None:
        """Let the next matching requests meet a fault."""
        with self._lock:
            self.faults.append(fault)

    def take(self, method: str, path: str) -> Fault | None:
        """The fault that a request meets, if any; each request is noted."""
        with self._lock:
            for fault in self.faults:
                if not fault.times or fault.method not in {"", method} or fault.path not in path:
                    continue
                if fault.after:
                    fault.after -= 1
                    continue
                fault.times -= 1
                self.seen.append((method, path, fault.kind))
                return fault
            self.seen.append((method, path, ""))
            return None


class _Handler(BaseHTTPRequestHandler):
    """One client's connection; its server knows the proxy's state and what is behind it."""

    protocol_version = "HTTP/1.1"
    server: "_Server"

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.state.take(self.command, self.path)
        kind = fault.kind if fault else ""
        if fault and kind == "status":
            headers = {"Content-Type": "text/plain"}
            if fault.retry_after_s is not None:
                headers["Retry-After"] = str(fault.retry_after_s)
            self._answer(fault.status, headers, b"the proxy says no")
        elif fault and kind == "late":
            self._reset()
            time.sleep(fault.seconds)
            self._forward(body)
            self.server.state.done.set()
        else:
            time.sleep(fault.seconds if fault else 0.0)
            status, headers, content = self._forward(body)
            if kind == "lost":
                self._reset()
            else:
                self._answer(status, headers, content, cut=kind == "cut")

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = self.server.target
        connection = http.client.HTTPConnection(str(target.hostname), target.port, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        # Also of an empty body: servers refuse a PUT without a length.
        headers["Content-Length"] = str(len(body))
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        found = {k: v for k, v in answer.getheaders() if k.lower() not in _HOP}
        if self.command == "HEAD":
            found["Content-Length"] = answer.getheader("Content-Length") or "0"
        connection.close()
        return answer.status, found, content

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers and status != http.HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._reset()

    def _reset(self) -> None:
        """End the connection at once, by a reset and not by an orderly close."""
        self.close_connection = True
        with suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.rfile.close()
            self.wfile.close()
            self.connection.close()

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()

    def log_message(self, *_: object) -> None:
        pass


for _method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
    setattr(_Handler, f"do_{_method}", _Handler.handle_request)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(upstream)
        self.state = FaultProxy(f"http://127.0.0.1:{self.server_address[1]}")

    def handle_error(self, *_: object) -> None:
        """A client that went away is what this proxy is for."""


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """Run a proxy on a free port before a server's address (http://HOST:PORT)."""
    server = _Server(upstream)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
