"""gRPC for the raw loop: frames of HTTP/2 made once, many requests on one non-blocking socket.

Written for its price: what leaves together is one `send`, and answers that came together are one
`recv`. The server is asked for headers that refer to nothing sent before, so that equal bytes mean
equal headers and each is decoded once. A response is decoded for replies that are checked only.
"""

import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from enginegate.errors import ServerError
from enginegate.loadgen.grpc_message import INFER, Response
from enginegate.loadgen.raw_loop import (
    Answered,
    Destination,
    Watched,
    connected_socket,
    drop_waiting,
)
from enginegate.triton.codec import vendor

_READ_BYTES = 1 << 18
_HEADER = struct.Struct(">HBBBL")  # length (two fields), type, flags, stream
_SETTING = struct.Struct(">HL")
_WORD = struct.Struct(">L")
_HEADER_BYTES, _PREFIX_BYTES = 9, 5
# Of a ``ModelInferResponse`` in wire form: its first field's length, tags of name and version, and
# the largest length of one byte.
_FIRST_FIELD, _NAME_FIELD, _VERSION_FIELD, _ONE_BYTE = _PREFIX_BYTES + 1, 0x0A, 0x12, 0x7F
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_TABLE_SIZE, _PUSH, _MOST_STREAMS, _INITIAL_WINDOW, _FRAME_SIZE = 1, 2, 3, 4, 5
_REFUSED, _CANCEL = 7, 8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# What HTTP/2 assumes until the other side says otherwise.
_USUAL_WINDOW, _USUAL_FRAME = 65_535, 16_384
# Answers are never held back: windows as large as they can be, refilled long before they are empty.
_LARGEST_WINDOW = (1 << 31) - 1
_REFILL_BYTES = 1 << 29
# Numbers of streams are odd and never used again: before they run out, a new connection.
_LAST_STREAM = (1 << 31) - 1001
# Blocks differ by error messages; a server that counts in them must not fill memory.
_MOST_BLOCKS = 4096
_STATUS = (
    "",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
# As gRPC's own clients read what something before the server answered.
_HTTP_STATUS = {
    b"400": "INTERNAL",
    b"401": "UNAUTHENTICATED",
    b"403": "PERMISSION_DENIED",
    b"404": "UNIMPLEMENTED",
    b"429": "UNAVAILABLE",
    b"502": "UNAVAILABLE",
    b"503": "UNAVAILABLE",
    b"504": "UNAVAILABLE",
}
_RESET_STATUS = {8: "CANCELLED", 11: "RESOURCE_EXHAUSTED"}


class _Malformed(Exception):  # noqa: N818 - never leaves this module
    """Bytes that are no HTTP/2."""


class _Outcome(NamedTuple):
    """What a block of headers says of a request: its error, empty when it succeeded.

    None: nothing yet, the trailers will.
    """

    error: str | None


@dataclass(slots=True)
class _Upload:
    """A request larger than what may be sent at once."""

    stream: int
    rest: memoryview
    window: int


@dataclass(slots=True, eq=False)
class _Connection:
    """One connection.

    Attributes:
        rows: stream -> row of the request that it carries.
        messages: stream -> what has come of its answer.
        window: bytes of requests that the server still takes.
        fresh_window: of each new stream.
        draining: the server takes no more requests here.
        ready: the server has answered as an HTTP/2 server.
    """

    socket: socket.socket
    fd: int
    rows: dict[int, int] = field(default_factory=dict)
    messages: dict[int, bytes | bytearray] = field(default_factory=dict)
    unread: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    uploads: deque[_Upload] = field(default_factory=deque)
    block: tuple[int, int, bytes] | None = None
    next_stream: int = 1
    window: int = _USUAL_WINDOW
    fresh_window: int = _USUAL_WINDOW
    frame_size: int = _USUAL_FRAME
    most_streams: int = _LARGEST_WINDOW
    taken: int = 0
    writes: bool = False
    ready: bool = False
    draining: bool = False
    closed: bool = False

    @property
    def takes_requests(self) -> bool:
        """Whether another request may be sent here."""
        return not self.closed and not self.draining and self.next_stream < _LAST_STREAM


def grpc_message(request: bytes) -> bytes:
    """A ``ModelInferRequest`` in wire form as gRPC frames it: uncompressed, with its length."""
    return struct.pack(">BL", 0, len(request)) + request


@dataclass(slots=True)
class RawGrpc:
    """One connection of one loop, replaced when the server closes it.

    Attributes:
        address: the server's gRPC ``HOST:PORT``.
        poll: where sockets are watched.
        watched: file number -> called when it can be read or written.
        answered: called with each request's row and answer.
        decodes: whether answers are asked for their outputs.
    """

    address: str
    poll: select.epoll
    watched: Watched
    answered: Answered
    decodes: bool = False
    _server: Destination = field(default_factory=lambda: Destination(socket.AF_INET, None))
    _current: _Connection | None = None
    _streams: dict[int, tuple[_Connection, int, bytes]] = field(default_factory=dict)
    _waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    _blocks: dict[bytes, _Outcome] = field(default_factory=dict)
    _versions: dict[bytes, str] = field(default_factory=dict)
    _head: bytes = b""

    def connect(self, timeout_s: float) -> bool:
        """Connect and wait until the server has answered as a gRPC server does."""
        end_s = time.monotonic() + timeout_s
        made = connected_socket(self.address, timeout_s)
        if made is None:
            return False
        self._server = Destination(made.family, made.getpeername())
        self._head = _request_head(self.address)
        connection = self._current = self._add(made)
        self._write(connection)
        while not connection.ready and not connection.closed:
            left_s = end_s - time.monotonic()
            if left_s <= 0.0 or not select.select((made,), (), (), left_s)[0]:
                break
            self._read(connection)
        self.flush()
        return connection.ready and not connection.closed

    def send(self, row: int, request: bytes) -> None:
        """Send a request, framed by `grpc_message`, with the next `flush`."""
        connection = self._usable()
        if connection is None:
            self.answered(row, Response("UNAVAILABLE", "", None))
            return
        if len(connection.rows) >= connection.most_streams:
            self._waiting.append((row, request))
            return
        stream, size, head = connection.next_stream, len(request), self._head
        connection.next_stream += 2
        connection.rows[stream] = row
        self._streams[row] = connection, stream, request
        out = connection.unsent
        out += _HEADER.pack(len(head) >> 8, len(head) & 0xFF, _HEADERS, _END_HEADERS, stream)
        out += head
        if size <= min(connection.window, connection.fresh_window, connection.frame_size):
            connection.window -= size
            out += _HEADER.pack(size >> 8, size & 0xFF, _DATA, _END_STREAM, stream)
            out += request
            return
        connection.uploads.append(_Upload(stream, memoryview(request), connection.fresh_window))
        self._upload(connection)

    def flush(self) -> None:
        """Write what was sent since."""
        if self._waiting and not self._streams:
            self._next_waiting()
        connection = self._current
        if connection is not None and connection.unsent and not connection.writes:
            self._write(connection)

    def give_up(self, row: int) -> None:
        """Cancel a request that has timed out; what still comes of its answer is dropped."""
        known = self._streams.pop(row, None)
        if known is None:
            drop_waiting(self._waiting, row)
            return
        connection, stream, _ = known
        del connection.rows[stream]
        connection.messages.pop(stream, None)
        connection.uploads = deque(u for u in connection.uploads if u.stream != stream)
        connection.unsent += _HEADER.pack(0, 4, _RESET, 0, stream) + _WORD.pack(_CANCEL)
        if not connection.writes:
            self._write(connection)
        self._next_waiting()

    def close(self) -> None:
        """Close every connection; requests under way are lost."""
        open_ones = {id(c): c for c, *_ in self._streams.values()}
        if self._current is not None:
            open_ones[id(self._current)] = self._current
        for connection in open_ones.values():
            self._close(connection)
        self._streams.clear()

    def _usable(self) -> _Connection | None:
        connection = self._current
        if connection is not None and connection.takes_requests:
            return connection
        try:
            self._current = self._add(self._server.open())
        except OSError:
            self._current = None
        return self._current

    def _add(self, made: socket.socket) -> _Connection:
        connection = _Connection(made, made.fileno())
        settings = ((_TABLE_SIZE, 0), (_PUSH, 0), (_INITIAL_WINDOW, _LARGEST_WINDOW))
        body = b"".join(_SETTING.pack(*setting) for setting in settings)
        connection.unsent += _PREFACE
        connection.unsent += _HEADER.pack(0, len(body), _SETTINGS, 0, 0) + body
        connection.unsent += _window_update(_LARGEST_WINDOW - _USUAL_WINDOW)
        self.watched[connection.fd] = partial(self._on_event, connection)
        self.poll.register(connection.fd, select.EPOLLIN)
        return connection

    def _close(self, connection: _Connection) -> None:
        if not connection.closed:
            connection.closed = True
            del self.watched[connection.fd]
            connection.socket.close()

    def _lost(self, connection: _Connection) -> None:
        self._close(connection)
        rows, connection.rows = connection.rows, {}
        for row in rows.values():
            self._streams.pop(row, None)
            self.answered(row, Response("UNAVAILABLE", "", None))
        self._next_waiting()

    def _on_event(self, connection: _Connection, events: int) -> None:
        if events & select.EPOLLOUT and not connection.closed:
            self._write(connection)
        if events & ~select.EPOLLOUT and not connection.closed:
            self._read(connection)

    def _write(self, connection: _Connection) -> None:
        """Write what there is; what does not fit goes when there is room."""
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(connection)
            return
        del connection.unsent[:sent]
        wants = bool(connection.unsent)
        if wants != connection.writes:
            connection.writes = wants
            self.poll.modify(connection.fd, select.EPOLLIN | (select.EPOLLOUT if wants else 0))

    def _upload(self, connection: _Connection) -> None:
        """Send as much of the large requests as the windows allow."""
        waiting: deque[_Upload] = deque()
        while connection.uploads:
            upload = connection.uploads.popleft()
            while upload.rest:
                size = min(
                    len(upload.rest), connection.window, upload.window, connection.frame_size
                )
                if size <= 0:
                    waiting.append(upload)
                    break
                connection.window -= size
                upload.window -= size
                last = _END_STREAM if size == len(upload.rest) else 0
                connection.unsent += _HEADER.pack(
                    size >> 8, size & 0xFF, _DATA, last, upload.stream
                )
                connection.unsent += upload.rest[:size]
                upload.rest = upload.rest[size:]
        connection.uploads = waiting

    def _read(self, connection: _Connection) -> None:
        try:
            content = connection.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            content = b""
        if not content:
            self._lost(connection)
            return
        if connection.unread:
            content = connection.unread + content
        try:
            connection.unread = content[self._frames(connection, content) :]
        except (_Malformed, struct.error, IndexError, ValueError):
            self._lost(connection)
            return
        if connection.unsent and not connection.writes and not connection.closed:
            self._write(connection)

    def _frames(  # noqa: C901, PLR0912 - one loop over bytes; a call for each kind costs a tenth
        self, connection: _Connection, content: bytes
    ) -> int:
        """Take every whole frame; returns where the first that is not whole begins."""
        at, end = 0, len(content)
        unpack, rows, messages = _HEADER.unpack_from, connection.rows, connection.messages
        while end - at >= _HEADER_BYTES:
            high, low, kind, flags, stream = unpack(content, at)
            size = high << 8 | low
            if size > _USUAL_FRAME:
                raise _Malformed
            start = at + _HEADER_BYTES
            if start + size > end:
                break
            at = start + size
            if kind == _DATA:
                connection.taken += size
                if stream in rows:
                    body = content[start:at]
                    if flags & _PADDED:
                        body = _unpadded(body)
                    known = messages.get(stream)
                    if known is None:
                        messages[stream] = body
                    elif isinstance(known, bytearray):
                        known += body
                    else:
                        messages[stream] = bytearray(known + body)
                    if flags & _END_STREAM:
                        self._finish(connection, stream, "UNKNOWN")
            elif kind == _HEADERS:
                block = content[start:at]
                if flags & _PADDED:
                    block = _unpadded(block)
                if flags & _PRIORITY:
                    block = block[5:]
                if flags & _END_HEADERS:
                    self._headers(connection, stream, flags, block)
                else:
                    connection.block = stream, flags, block
            else:
                self._control(connection, kind, flags, stream, content[start:at])
        if connection.taken > _REFILL_BYTES:
            connection.unsent += _window_update(connection.taken)
            connection.taken = 0
        return at

    def _headers(self, connection: _Connection, stream: int, flags: int, block: bytes) -> None:
        outcome = self._blocks.get(block)
        if outcome is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            outcome = self._blocks[block] = _outcome(block)
        if flags & _END_STREAM:
            self._finish(connection, stream, "UNKNOWN" if outcome.error is None else outcome.error)

    def _control(
        self, connection: _Connection, kind: int, flags: int, stream: int, body: bytes
    ) -> None:
        if kind in {_SETTINGS, _PING} and not flags & _ACK:
            self._acknowledge(connection, kind, body)
        elif kind == _WINDOW:
            _widen(connection, stream, _WORD.unpack(body)[0] & _LARGEST_WINDOW)
            self._upload(connection)
        elif kind == _RESET:
            self._reset(connection, stream, _WORD.unpack(body)[0])
        elif kind == _GOAWAY:
            connection.draining = True
            last = _WORD.unpack_from(body)[0] & _LARGEST_WINDOW
            for unseen in [each for each in connection.rows if each > last]:
                self._finish(connection, unseen, "UNAVAILABLE")
        elif kind == _CONTINUATION and connection.block is not None:
            first, first_flags, block = connection.block
            connection.block = first, first_flags, block + body
            if flags & _END_HEADERS:
                connection.block = None
                self._headers(connection, first, first_flags, block + body)

    def _acknowledge(self, connection: _Connection, kind: int, body: bytes) -> None:
        if kind == _PING:
            connection.unsent += _HEADER.pack(0, len(body), _PING, _ACK, 0) + body
            return
        for number, value in _SETTING.iter_unpack(body):
            _apply(connection, number, value)
        connection.ready = True
        connection.unsent += _HEADER.pack(0, 0, _SETTINGS, _ACK, 0)
        self._upload(connection)

    def _reset(self, connection: _Connection, stream: int, code: int) -> None:
        """A request that the server refused unseen waits for its turn; any other has failed.

        Servers refuse what comes before they have put away the stream that ended last.
        """
        row = connection.rows.get(stream)
        if code != _REFUSED or row is None:
            self._finish(connection, stream, _RESET_STATUS.get(code, "INTERNAL"))
            return
        del connection.rows[stream]
        connection.messages.pop(stream, None)
        connection.uploads = deque(u for u in connection.uploads if u.stream != stream)
        self._waiting.append((row, self._streams.pop(row)[2]))

    def _finish(self, connection: _Connection, stream: int, error: str) -> None:
        row = connection.rows.pop(stream, None)
        message = connection.messages.pop(stream, b"")
        if row is None:
            return
        del self._streams[row]
        if connection.uploads:
            connection.uploads = deque(u for u in connection.uploads if u.stream != stream)
        self.answered(row, Response(error, "", None) if error else self._answer(message))
        if self._waiting:
            self._next_waiting()

    def _answer(self, message: bytes | bytearray) -> Response:
        """A response that came whole: uncompressed, and as long as it says."""
        size = len(message) - _PREFIX_BYTES
        if size < 0 or message[0] or _WORD.unpack_from(message, 1)[0] != size:
            return Response("INTERNAL", "", None)
        raw = _raw_version(message)
        if self.decodes or raw is None:
            response = _parse(bytes(message[_PREFIX_BYTES:]))
            if response is None:
                return Response("INTERNAL", "", None)
            return Response("", response.model_version, response)
        version = self._versions.get(raw)
        if version is None:
            version = self._versions[raw] = raw.decode()
        return Response("", version, None)

    def _next_waiting(self) -> None:
        if self._waiting:
            self.send(*self._waiting.popleft())


def _request_head(address: str) -> bytes:
    """The headers of every request, which refer to nothing sent before.

    Raises:
        ServerError: the library that encodes them is not installed.
    """
    try:
        import hpack  # noqa: PLC0415
    except ImportError as error:
        raise ServerError(
            f"Loads cannot be sent over gRPC: {error}.\n"
            "Install it: python -m pip install 'enginegate[triton]', or send over http."
        ) from error
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": INFER,
        ":authority": address,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    encoder = hpack.Encoder()
    never_kept = [(name, value, True) for name, value in headers.items()]
    return bytes(encoder.encode(never_kept, huffman=False))


def _outcome(block: bytes) -> _Outcome:
    """Decode headers or trailers.

    Raises:
        _Malformed: they cannot be read.
    """
    import hpack  # noqa: PLC0415

    try:
        decoded = hpack.Decoder().decode(block, raw=True)
    except hpack.HPACKError as error:
        raise _Malformed from error
    fields = {bytes(name): bytes(value) for name, value in decoded}
    status = fields.get(b"grpc-status")
    if status is not None:
        known = status.isdigit() and int(status) < len(_STATUS)
        return _Outcome(_STATUS[int(status)] if known else "UNKNOWN")
    http_status = fields.get(b":status", b"200")
    return _Outcome(None if http_status == b"200" else _HTTP_STATUS.get(http_status, "UNKNOWN"))


def _raw_version(message: bytes | bytearray) -> bytes | None:
    """The model's version in a ``ModelInferResponse`` that begins with a short name and version.

    None where it does not.
    """
    if len(message) < _FIRST_FIELD + 2 or message[_PREFIX_BYTES] != _NAME_FIELD:
        return None
    at = _FIRST_FIELD + 1 + message[_FIRST_FIELD]
    if message[_FIRST_FIELD] > _ONE_BYTE or len(message) < at + 2 or message[at] != _VERSION_FIELD:
        return None
    size = message[at + 1]
    return None if size > _ONE_BYTE else bytes(message[at + 2 : at + 2 + size])


def _parse(body: bytes) -> Any:
    """The response; None when it is none."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped] # noqa: PLC0415

    try:
        return vendor().messages.ModelInferResponse.FromString(body)
    except DecodeError:
        return None


def _apply(connection: _Connection, number: int, value: int) -> None:
    if number == _INITIAL_WINDOW:
        for upload in connection.uploads:
            upload.window += value - connection.fresh_window
        connection.fresh_window = value
    elif number == _FRAME_SIZE:
        connection.frame_size = value
    elif number == _MOST_STREAMS:
        connection.most_streams = value


def _widen(connection: _Connection, stream: int, more: int) -> None:
    if stream == 0:
        connection.window += more
    for upload in connection.uploads:
        if upload.stream == stream:
            upload.window += more


def _unpadded(body: bytes) -> bytes:
    return body[1 : len(body) - body[0]]


def _window_update(more: int) -> bytes:
    return _HEADER.pack(0, 4, _WINDOW, 0, 0) + _WORD.pack(more)
