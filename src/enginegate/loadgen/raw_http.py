"""HTTP for the raw loop: requests made once, non-blocking sockets, one request a connection.

Written for its price: an answer is one `recv`, a look-up of its head among those seen before, and a
search for the model's version. Its JSON is parsed for replies that are checked only.
"""

import errno
import json
import select
import socket
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from enginegate.loadgen.grpc_message import Response
from enginegate.loadgen.http_message import Body, grpc_status, http_reply
from enginegate.loadgen.raw_loop import (
    Answered,
    Destination,
    Watched,
    connected_socket,
    drop_waiting,
)

# Opened before the first request, so that a quiet load never waits for one.
_OPEN_FIRST = 8
# Of one load. Triton's HTTP threads hand finished answers over in sockets of 278 places each and
# lose what does not fit (2.51: 2,000 requests in flight lost 116 answers, 1,000 none), so more
# requests wait here, and are charged for it.
_MOST = 1024
_READ_BYTES = 1 << 18
# Of one answer; a server that sends more without an end to it speaks something else.
_MOST_HEAD_BYTES = 1 << 16
# Heads differ by the length of their body only; a server that counts in them must not fill memory.
_MOST_HEADS = 4096
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_END = b"\r\n\r\n"
_VERSION = b'"model_version":"'


class _Head(NamedTuple):
    """What an answer's head says: lengths in bytes."""

    status: int
    length: int
    json_length: int
    stays_open: bool


class _Malformed(Exception):  # noqa: N818 - never leaves this module
    """An answer that cannot be read."""


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection; ``row`` is the request it carries, -1 while idle."""

    socket: socket.socket
    fd: int
    row: int = -1
    unread: bytearray = field(default_factory=bytearray)
    unsent: memoryview | None = None
    opening: bool = True
    closed: bool = False


@dataclass(slots=True)
class RawHttp:
    """Connections of one loop; a request that finds none free waits, and is charged for it.

    Attributes:
        address: the server's HTTP ``HOST:PORT``.
        poll: where sockets are watched.
        watched: file number -> called when it can be read or written.
        answered: called with each request's row and answer.
        decodes: whether answers are asked for their outputs.
        parts: processes that share the load's connections.
    """

    address: str
    poll: select.epoll
    watched: Watched
    answered: Answered
    decodes: bool = False
    parts: int = 1
    _server: Destination = field(default_factory=lambda: Destination(socket.AF_INET, None))
    _idle: list[_Connection] = field(default_factory=list)
    _busy: dict[int, _Connection] = field(default_factory=dict)
    _waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    _open: int = 0
    _heads: dict[bytes, _Head] = field(default_factory=dict)
    _versions: dict[bytes, str] = field(default_factory=dict)

    def connect(self, timeout_s: float) -> bool:
        """Open the first connections, so that the first requests do not pay for them."""
        for _ in range(_OPEN_FIRST):
            made = connected_socket(self.address, timeout_s)
            if made is None:
                return False
            self._server = Destination(made.family, made.getpeername())
            connection = self._add(made)
            connection.opening = False
            self._idle.append(connection)
        return True

    def send(self, row: int, request: bytes) -> None:
        """Send a request on a connection of its own; a failure is an answer."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                self._write(connection, row, request)
                return
        if self._open >= max(_OPEN_FIRST, _MOST // self.parts):
            self._waiting.append((row, request))
            return
        try:
            made = self._server.open()
        except OSError as error:
            if error.errno in _NO_FILES and self._busy:
                # This process's limit is no failure of the server.
                self._waiting.append((row, request))
            else:
                self.answered(row, Response("UNAVAILABLE", "", None))
            return
        self._write(self._add(made), row, request)

    def flush(self) -> None:
        """Nothing is held back."""

    def give_up(self, row: int) -> None:
        """Close the connection of a request that has timed out: half an answer may still come."""
        connection = self._busy.pop(row, None)
        if connection is None:
            drop_waiting(self._waiting, row)
            return
        self._close(connection)
        self._next_waiting()

    def close(self) -> None:
        """Close every connection; requests under way are lost."""
        for connection in [*self._idle, *self._busy.values()]:
            self._close(connection)
        self._idle.clear()
        self._busy.clear()

    def _add(self, made: socket.socket) -> _Connection:
        connection = _Connection(made, made.fileno())
        self._open += 1
        self.watched[connection.fd] = partial(self._ready, connection)
        self.poll.register(connection.fd, select.EPOLLIN)
        return connection

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._open -= 1
        del self.watched[connection.fd]
        connection.socket.close()

    def _write(self, connection: _Connection, row: int, request: bytes) -> None:
        connection.row = row
        self._busy[row] = connection
        try:
            sent = connection.socket.send(request)
        except BlockingIOError:
            sent = 0
        except OSError:
            # Still connecting on some systems, or gone: what comes next says which.
            if not connection.opening:
                self._lost(connection)
                return
            sent = 0
        if sent < len(request):
            connection.unsent = memoryview(request)[sent:]
            self.poll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        else:
            connection.opening = False

    def _ready(self, connection: _Connection, events: int) -> None:
        if connection.closed:
            return
        if events & select.EPOLLOUT and connection.unsent is not None:
            self._write_rest(connection)
        if events & ~select.EPOLLOUT and not connection.closed:
            self._read(connection)

    def _write_rest(self, connection: _Connection) -> None:
        assert connection.unsent is not None  # noqa: S101 - asked by the caller
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            return
        except OSError:
            self._lost(connection)
            return
        connection.opening = False
        connection.unsent = connection.unsent[sent:] if sent < len(connection.unsent) else None
        if connection.unsent is None:
            self.poll.modify(connection.fd, select.EPOLLIN)

    def _read(self, connection: _Connection) -> None:
        try:
            content = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            content = b""
        if not content or connection.row < 0:
            # Closed by the server, or an answer to nothing.
            self._lost(connection)
            return
        if connection.unread:
            connection.unread += content
            content = connection.unread  # type: ignore[assignment]
        try:
            self._parse(connection, content)
        except (_Malformed, ValueError, KeyError):
            self._lost(connection)

    def _parse(self, connection: _Connection, content: bytes) -> None:
        """Take an answer that has come whole; keep what has come of one that has not."""
        end = content.find(_END)
        if end >= 0:
            head = self._head(bytes(content[:end]))
            whole = end + len(_END) + head.length
            if len(content) == whole and connection.unsent is None:
                self._finish(connection, head, content, end + len(_END))
                return
            if len(content) > whole:
                raise _Malformed
        elif len(content) > _MOST_HEAD_BYTES:
            raise _Malformed
        if not connection.unread:
            connection.unread = bytearray(content)

    def _finish(self, connection: _Connection, head: _Head, content: bytes, at: int) -> None:
        answer = self._answer(head, content, at)
        row, connection.row = connection.row, -1
        del self._busy[row]
        if connection.unread:
            connection.unread = bytearray()
        if head.stays_open:
            self._idle.append(connection)
        else:
            self._close(connection)
        self.answered(row, answer)
        if self._waiting:
            self._next_waiting()

    def _answer(self, head: _Head, content: bytes, at: int) -> Response:
        if head.status != HTTPStatus.OK:
            return Response(grpc_status(head.status), "", None)
        json_end = at + head.json_length
        start = content.find(_VERSION, at, json_end) + len(_VERSION)
        if start < at + len(_VERSION):
            version = str(json.loads(content[at:json_end])["model_version"])
        else:
            raw = bytes(content[start : content.index(b'"', start, json_end)])
            version = self._versions.get(raw, "")
            if not version:
                version = self._versions[raw] = raw.decode()
        if not self.decodes:
            return Response("", version, None)
        body = Body(json.loads(content[at:json_end]), bytes(content[json_end:]))
        return Response("", version, body, http_reply)

    def _head(self, raw: bytes) -> _Head:
        known = self._heads.get(raw)
        if known is not None:
            return known
        if len(self._heads) >= _MOST_HEADS:
            self._heads.clear()
        head = self._heads[raw] = _parse_head(raw)
        return head

    def _lost(self, connection: _Connection) -> None:
        row, connection.row = connection.row, -1
        self._close(connection)
        if row >= 0:
            self._busy.pop(row, None)
            self.answered(row, Response("UNAVAILABLE", "", None))
        self._next_waiting()

    def _next_waiting(self) -> None:
        if self._waiting:
            self.send(*self._waiting.popleft())


def _parse_head(raw: bytes) -> _Head:
    """Read the lines of an answer before its body.

    Raises:
        ValueError: they are no HTTP.
        KeyError: the length of the body is missing.
    """
    first, *lines = raw.split(b"\r\n")
    words = first.split(b" ", 2)
    if not words[0].startswith(b"HTTP/1.") or len(words) < 2:  # noqa: PLR2004 - version and status
        raise ValueError(first)
    fields = dict(line.lower().split(b":", 1) for line in lines)
    length = int(fields[b"content-length"])
    json_length = int(fields.get(b"inference-header-content-length", length))
    # A server that says so closes after this answer, maybe a moment from now.
    stays_open = fields.get(b"connection", b"").strip() != b"close"
    if not 0 <= json_length <= length:
        raise ValueError(raw)
    return _Head(int(words[1]), length, json_length, stays_open)
