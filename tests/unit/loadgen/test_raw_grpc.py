"""gRPC from raw sockets: against grpcio's own server, and faults that it cannot be made to have."""

import contextlib
import itertools
import select
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest

from enginegate.errors import ServerError
from enginegate.loadgen.grpc_message import INFER, encode_request, parse_request
from enginegate.loadgen.raw_grpc import RawGrpc, grpc_message
from enginegate.loadgen.raw_loop import RawLoop
from enginegate.loadgen.traffic import Traffic, run_load
from enginegate.loadgen.transcript import Transcript
from enginegate.loadgen.worker_load import RunClock
from enginegate.measurement import ClosedLoad, Load
from enginegate.triton.codec import vendor

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _answer(content=b"\x07"):
    message = vendor().messages.ModelInferResponse(model_name="m", model_version="3")
    message.outputs.add(name="y", datatype="UINT8", shape=[1, len(content)])
    message.raw_output_contents.append(content)
    return message.SerializeToString()


@contextmanager
def _server(answer, options=()):
    """grpcio's server; ``answer`` takes a request in wire form, and may abort through a context."""
    method = INFER.rpartition("/")[2]
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=[*ANY_SIZE, *options])
        server.add_generic_rpc_handlers([service])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", server
        finally:
            server.stop(None).wait()


def _traffic(content=b"\x01", **how):
    return Traffic.of("m", [{"x": np.frombuffer(content, np.uint8)[None]}], **how)


def _load(**changes):
    return Load(**{"rate_per_s": 100, "duration_s": 0.2, "seed": 1, **changes})


def test_requests_and_answers_are_grpcs_own():
    """A server of another maker reads each request as it was made, and its answers are read."""
    seen, replies = [], []

    def answer(request, _context):
        seen.append(request)
        return _answer()

    with _server(answer) as (address, _):
        result = run_load(
            address, _traffic(), _load(), on_reply=lambda _, reply: replies.append(reply)
        )

    assert result.failed == 0
    assert set(seen) == {encode_request("m", {"x": np.array([[1]], np.uint8)}, request_id="0")}
    assert len(seen) == len(replies) == len(result.due_s)
    assert replies[0].outputs["y"].tolist() == [[7]]
    assert set(result.versions) == {"3"}


def test_version_is_read_without_decoding_the_rest():
    """As it is when replies are checked."""
    with _server(lambda _request, _context: _answer()) as (address, _):
        result = run_load(address, _traffic(), _load())

    assert set(result.versions) == {"3"}


@pytest.mark.parametrize(
    "code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
)
def test_every_status_is_counted_by_its_name(code):
    """Whatever its message says, also in letters that headers must escape."""
    calls = itertools.count()

    def answer(_request, context):
        if next(calls) == 1:
            context.abort(code, "Grüße, 100 %")
        return _answer()

    with _server(answer) as (address, _):
        result = run_load(address, _traffic(), _load(rate_per_s=50))

    assert result.errors == {code.name: 1}
    assert result.failed == 1


def test_large_requests_and_answers_travel_in_parts():
    """More than a frame, and more than either side's window, in both directions at once."""
    content = np.random.default_rng(0).integers(256, size=5_000_000, dtype=np.uint8).tobytes()
    replies, sizes = [], []

    def answer(request, _context):
        sizes.append(len(parse_request(request).raw_input_contents[0]))
        return _answer(parse_request(request).raw_input_contents[0])

    with _server(answer) as (address, _):
        result = run_load(
            address,
            _traffic(content, timeout_s=60.0),
            ClosedLoad(clients=3, duration_s=0.3, seed=1),
            on_reply=lambda _, reply: replies.append(reply.outputs["y"].tobytes() == content),
        )

    assert result.failed == 0
    assert set(sizes) == {5_000_000}
    assert all(replies)
    assert len(replies) >= 3


def test_request_without_an_answer_in_time_has_failed():
    """It is cancelled at the server, and the connection goes on."""
    calls, cancelled = itertools.count(), threading.Event()

    def answer(_request, context):
        if next(calls) == 1:
            context.add_callback(cancelled.set)
            while context.is_active():
                time.sleep(0.005)
        return _answer()

    with _server(answer) as (address, _):
        result = run_load(address, _traffic(timeout_s=1.5), _load(duration_s=0.3))
        assert cancelled.wait(30.0)

    assert result.errors == {"DEADLINE_EXCEEDED": 1}


def test_more_requests_than_the_server_takes_at_once_wait():
    """Streams beyond its limit wait here, and are charged for it; none is refused."""
    limits = [("grpc.max_concurrent_streams", 2)]
    with _server(lambda _request, _context: _answer(), limits) as (address, _):
        result = run_load(address, _traffic(), ClosedLoad(clients=20, duration_s=0.3, seed=1))

    assert result.failed == 0
    assert len(result.due_s) > 20


def test_server_that_stops_fails_what_follows():
    """Each request is counted as a failure, and the load goes on to its end."""
    with _server(lambda _request, _context: _answer()) as (address, server):
        replies = []

        def stop(_, reply):
            replies.append(reply)
            if len(replies) == 3:
                server.stop(None)

        result = run_load(address, _traffic(), _load(duration_s=0.5), on_reply=stop)

    assert set(result.errors) <= {"UNAVAILABLE", "CANCELLED"}
    assert 3 <= len(replies) < len(result.due_s)
    assert result.failed == len(result.due_s) - len(replies)


@pytest.mark.parametrize("error", [ValueError, IndexError])
def test_error_of_a_check_is_no_broken_answer(error):
    """An error raised while a reply is checked ends the run, of whatever kind it is."""

    def refuse(_sample, _reply):
        raise error("checked")

    with (
        _server(lambda _request, _context: _answer()) as (address, _),
        pytest.raises(error, match="checked"),
    ):
        run_load(address, _traffic(), _load(), on_reply=refuse)


@contextmanager
def _speaker(*first):
    """Says one of these on each connection, and nothing more; closes those that say nothing."""
    ended = threading.Event()

    def serve(listener):
        taken = []
        for said in itertools.chain(first, itertools.repeat(b"")):
            connection, _ = listener.accept()
            taken.append(connection)
            if ended.is_set():
                break
            connection.sendall(said)
            if not said:
                connection.close()
        for each in taken:
            each.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad\r\n\r\n", b""], ids=["http", "nothing"])
def test_other_servers_are_no_grpc(said):
    """The error names the address, and that gRPC was expected there."""
    with _speaker(said) as address, pytest.raises(ServerError, match="this is its gRPC address"):
        run_load(address, _traffic(), _load())


def _frame(kind, flags, stream, body):
    return struct.pack(">HBBBL", len(body) >> 8, len(body) & 0xFF, kind, flags, stream) + body


def _message(content):
    return struct.pack(">BL", 0, len(content)) + content


HEAD, TRAILERS = b"\x88", b"\x00\x0bgrpc-status\x010"
WHOLE = _frame(1, 4, 1, HEAD) + _frame(0, 0, 1, _message(_answer())) + _frame(1, 5, 1, TRAILERS)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(WHOLE, "", id="whole"),
        pytest.param(
            _frame(1, 0, 1, HEAD[:0])
            + _frame(9, 4, 1, HEAD)
            + _frame(0, 8, 1, b"\x02" + _message(_answer())[:9] + b"\x00\x00")
            + _frame(0, 0, 1, _message(_answer())[9:])
            + _frame(1, 0x2D, 1, b"\x01" + bytes(5) + TRAILERS + b"\x00"),
            "",
            id="padded-and-in-parts",
        ),
        pytest.param(_frame(1, 5, 1, b"\x88" + TRAILERS), "INTERNAL", id="no-message"),
        pytest.param(
            _frame(1, 4, 1, HEAD) + _frame(0, 1, 1, _message(_answer())), "UNKNOWN", id="no-status"
        ),
        pytest.param(
            WHOLE.replace(_message(_answer()), b"\x01" + _message(_answer())[1:]),
            "INTERNAL",
            id="compressed",
        ),
        pytest.param(
            _frame(1, 5, 1, b"\x08\x03503"), "UNAVAILABLE", id="something-before-the-server"
        ),
        pytest.param(_frame(3, 0, 1, b"\x00\x00\x00\x07"), "DEADLINE_EXCEEDED", id="refused"),
        pytest.param(_frame(3, 0, 1, b"\x00\x00\x00\x08"), "CANCELLED", id="cancelled"),
        pytest.param(_frame(7, 0, 0, bytes(8)), "UNAVAILABLE", id="goes-away"),
        pytest.param(_frame(1, 5, 1, b"\xff\xff"), "UNAVAILABLE", id="unreadable-headers"),
        pytest.param(_frame(0, 0, 1, bytes(20_000)), "UNAVAILABLE", id="frame-too-large"),
        pytest.param(WHOLE[:-3], "DEADLINE_EXCEEDED", id="stuck"),
    ],
)
@pytest.mark.parametrize("cut", [None, 1, 11])
def test_frames_of_one_answer(answer, error, cut):
    """Read as HTTP/2 says, wherever the network cuts them; what cannot be read is one failure."""
    here, there = socket.socketpair()
    here.settimeout(0.0)
    limit_s = 0.3 if error == "DEADLINE_EXCEEDED" else 60.0
    with here, there, select.epoll() as poll:
        transcript = Transcript()
        loop = RawLoop((b"",), itertools.repeat(0), limit_s, transcript, poll)
        wire = loop.wire = RawGrpc("127.0.0.1:1", poll, loop.watched, loop.answered)
        wire._current = wire._add(here)
        sending = threading.Thread(target=_say, args=(there, SETTINGS + answer, cut))
        sending.start()
        # Due at once, so that the request leaves with the first bytes of the connection.
        loop.send_at(iter([0.0]), RunClock(start_s=time.perf_counter()))
        sending.join()
        wire.close()

    assert dict(transcript.errors) == ({error: 1} if error else {})
    assert transcript.versions == ([""] if error else ["3"])


def _say(there, said, cut):
    there.recv(1 << 16)
    # A client that cannot read on hangs up.
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(said), cut or len(said)):
            there.sendall(said[start : start + (cut or len(said))])
            if cut:
                time.sleep(0.0002)


def test_message_is_framed_with_its_length():
    """Uncompressed: a zero, four bytes of length, and the request."""
    assert grpc_message(b"abc") == b"\x00\x00\x00\x00\x03abc"
