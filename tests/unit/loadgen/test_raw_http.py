"""Faults that Triton's HTTP server cannot be brought to make, from a server that does."""

import asyncio
import itertools
import json
import resource
import select
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager

import numpy as np
import pytest

from enginegate.loadgen.grpc_message import encode_request
from enginegate.loadgen.http_message import http_request
from enginegate.loadgen.raw_http import RawHttp
from enginegate.loadgen.raw_loop import Destination, RawLoop, drop_waiting
from enginegate.loadgen.traffic import Traffic, Transport, run_load
from enginegate.loadgen.transcript import Transcript
from enginegate.loadgen.worker_load import RunClock
from enginegate.measurement import ClosedLoad, Load

HEAD = json.dumps(
    {
        "model_version": "3",
        "outputs": [
            {
                "name": "y",
                "datatype": "FP32",
                "shape": [1, 2],
                "parameters": {"binary_data_size": 8},
            }
        ],
    }
).encode()
BODY = HEAD + np.array([1.5, -2.0], np.float32).tobytes()
WHOLE = (
    f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
    f"Inference-Header-Content-Length: {len(HEAD)}\r\nContent-Length: {len(BODY)}\r\n\r\n"
).encode() + BODY
LAST = WHOLE.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


@contextmanager
def _server(answers):
    """Answers one request after the other with these bytes, and closes after those that say so."""
    loop, said = asyncio.new_event_loop(), iter(answers)
    met = {"connections": 0, "requests": []}

    async def serve(reader, writer):
        met["connections"] += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"\r\ncontent-length:")[1].split(b"\r\n")[0])
                met["requests"].append(head + await reader.readexactly(length))
                answer, stays = next(said, (WHOLE, True))
                for piece in [answer] if isinstance(answer, bytes) else answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
                if not stays:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", met
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(server):
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _run(answers, **traffic):
    sample = {"x": np.array([[1, 2]], np.float32)}
    replies = []
    with _server(answers) as (address, met):
        result = run_load(
            address,
            Traffic.of("m", [sample], **traffic),
            Load(rate_per_s=100, duration_s=0.1, seed=1, arrivals="constant"),
            sending=Transport(protocol="http"),
            on_reply=lambda _, reply: replies.append(reply),
        )
    return result, met, replies


def test_request_is_one_message_made_once():
    """Head, JSON and raw tensor go out as they were made; nothing is added on the way."""
    _, met, replies = _run([])

    request = encode_request("m", {"x": np.array([[1, 2]], np.float32)}, request_id="0")
    assert {bytes(sent) for sent in met["requests"]} == {
        http_request(met["requests"][0].split(b"Host: ")[1].split(b"\r\n")[0].decode(), request)
    }
    assert met["requests"][0].endswith(np.array([1, 2], np.float32).tobytes())
    assert len(met["requests"]) == 10
    assert replies[0].model_version == "3"
    assert replies[0].outputs["y"].tolist() == [[1.5, -2.0]]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        pytest.param((WHOLE[:-3], False), "UNAVAILABLE", id="half-an-answer"),
        pytest.param((b"", False), "UNAVAILABLE", id="no-answer"),
        pytest.param((b"nonsense\r\n\r\n", True), "UNAVAILABLE", id="not-http"),
        pytest.param((b"x" * 70_000, True), "UNAVAILABLE", id="no-end-of-head"),
        pytest.param((b"HTTP/1.1 200 OK\r\n\r\n", True), "UNAVAILABLE", id="no-length"),
        pytest.param(
            (WHOLE.replace(b"Content-Length: ", b"Content-Length: -"), True),
            "UNAVAILABLE",
            id="negative-length",
        ),
        pytest.param((WHOLE + b"more", True), "UNAVAILABLE", id="more-than-an-answer"),
        pytest.param(
            (WHOLE.replace(b"model_version", b"m_version_xxx"), True),
            "UNAVAILABLE",
            id="no-version",
        ),
        pytest.param((WHOLE.replace(b"{", b"[", 1), True), "UNAVAILABLE", id="not-json"),
        pytest.param((WHOLE[:-3], True), "DEADLINE_EXCEEDED", id="stuck"),
        pytest.param(
            (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", True),
            "UNAVAILABLE",
            id="rejected",
        ),
        pytest.param(
            (b"HTTP/1.1 418 Teapot\r\nContent-Length: 0\r\n\r\n", True), "HTTP_418", id="odd"
        ),
    ],
)
def test_broken_answer_is_one_failure(answer, status):
    """It costs its own request only: the next ones go on over other connections."""
    limit_s = 1.5 if status == "DEADLINE_EXCEEDED" else 30.0
    result, _, replies = _run([(WHOLE, True), answer], timeout_s=limit_s)

    assert result.errors == {status: 1}
    assert np.isinf(result.latency_s).sum() == 1
    assert len(replies) == 9


def _one_by_one(address, count):
    """Errors of so many requests, each sent once the one before it was answered."""
    request = http_request(address, encode_request("m", {"x": np.array([[1, 2]], np.float32)}))
    clock = RunClock()
    with select.epoll() as poll:
        loop = RawLoop((request,), itertools.repeat(0), 30.0, Transcript(), poll)
        wire = loop.wire = RawHttp(address, poll, loop.watched, loop.answered)
        note_answer = loop.answered

        def stop_after_the_last(row, answer):
            note_answer(row, answer)
            if row == count - 1:
                clock.stop_s = 0.0

        wire.answered = stop_after_the_last
        assert wire.connect(30.0)
        clock.begin()
        loop.keep_in_flight(1, 600.0, clock)
        wire.close()
    assert len(loop.transcript.latency_s) == count
    return dict(loop.transcript.errors)


@pytest.mark.parametrize(
    ("answer", "connections"),
    [
        pytest.param((WHOLE, True), 8, id="kept"),
        pytest.param((LAST, False), 20, id="closed"),
        pytest.param((LAST, True), 20, id="about-to-close"),
    ],
)
def test_connections_are_kept_and_closed_ones_replaced(answer, connections):
    """No connection is opened for each request; one that the server closes is not used again.

    Nor is one that it only said it would close: the next request may be there before the end is.
    """
    with _server([answer] * 20) as (address, met):
        errors = _one_by_one(address, 20)

    assert errors == {}
    assert met["connections"] == connections


def test_load_without_a_request_has_used_no_processor():
    """What connecting took is no part of the share, and a run of no time divides by none."""
    nothing = Load(rate_per_s=1, duration_s=0.001, seed=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = run_load(
            f"127.0.0.1:{listener.getsockname()[1]}",
            Traffic.of("m", [{"x": np.array([[1, 2]], np.float32)}]),
            nothing,
            sending=Transport(protocol="http"),
        )

    assert len(result.due_s) == 0
    assert 0.0 <= result.cpu_share < 0.9


def test_answer_in_pieces_is_one_answer():
    """Wherever the network cuts an answer, it is read whole."""
    pieces = [WHOLE[:5], WHOLE[5:60], WHOLE[60:-3], WHOLE[-3:]]
    result, _, replies = _run([(pieces, True)] * 10)
    with _server([(pieces, True)] * 10) as (address, met):
        errors = _one_by_one(address, 10)

    assert result.errors == errors == {}
    assert [reply.outputs["y"].tolist() for reply in replies] == [[[1.5, -2.0]]] * 10
    assert met["connections"] == 8


def test_request_larger_than_the_sockets_buffer_goes_out_whole():
    """What the socket does not take at once follows once there is room."""
    sample = {"x": np.arange(4_000_000, dtype=np.float32).reshape(1, -1)}
    with _server([]) as (address, met):
        result = run_load(
            address,
            Traffic.of("m", [sample], timeout_s=30.0),
            ClosedLoad(clients=2, duration_s=0.2, seed=1),
            sending=Transport(protocol="http"),
        )

    assert result.failed == 0
    assert met["requests"]
    assert all(sent.endswith(sample["x"].tobytes()) for sent in met["requests"])


def test_server_that_goes_away_fails_what_follows():
    """Every request without an answer is counted, and the run goes on to its end."""
    replies = []
    with _server([(WHOLE, True)] * 5) as (address, _), socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))

        def leave(_, reply):
            replies.append(reply)
            if len(replies) == 3:
                wires[0].close()
                wires[0]._server = Destination(socket.AF_INET, unused.getsockname())

        request = http_request(address, encode_request("m", {"x": np.zeros((1, 2), np.float32)}))
        with select.epoll() as poll:
            loop = RawLoop((request,), itertools.repeat(0), 5.0, Transcript(leave), poll)
            wires = [RawHttp(address, poll, loop.watched, loop.answered, decodes=True)]
            loop.wire = wires[0]
            assert loop.wire.connect(30.0)
            clock = RunClock()
            clock.begin()
            loop.send_at(iter([0.0, 0.05, 0.1, 0.15, 0.2]), clock)

    assert loop.transcript.errors == {"UNAVAILABLE": 2}
    assert len(replies) == 3


def test_clients_of_a_closed_loop_are_all_in_flight():
    """So many requests are under way at once, never more, each on a connection of its own."""
    with _server([(WHOLE[:-1], True)] * 20) as (address, met):
        result = run_load(
            address,
            Traffic.of("m", [{"x": np.zeros((1, 2), np.float32)}], timeout_s=1.5),
            ClosedLoad(clients=20, duration_s=0.2, seed=1),
            sending=Transport(protocol="http"),
        )

    assert result.errors == {"DEADLINE_EXCEEDED": 20}
    assert met["connections"] == 20


@contextmanager
def _no_more_files():
    """This process opens nothing more; what is open stays usable."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_requests_wait_where_no_more_connections_can_be_opened():
    """The limit is this process's own, so it is no failure of the server."""
    with _server([]) as (address, met), select.epoll() as poll:
        request = http_request(address, encode_request("m", {"x": np.zeros((1, 2), np.float32)}))
        loop = RawLoop((request,), itertools.repeat(0), 30.0, Transcript(), poll)
        loop.wire = RawHttp(address, poll, loop.watched, loop.answered)
        assert loop.wire.connect(30.0)
        while met["connections"] < 8:
            time.sleep(0.01)
        clock = RunClock()
        clock.begin()
        with _no_more_files():
            loop.send_at(iter([0.0] * 20), clock)
        loop.wire.close()

    assert loop.transcript.errors == {}
    assert np.isfinite(loop.transcript.latency_s).all()
    assert len(met["requests"]) == 20
    assert met["connections"] == 8


@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_error_of_a_check_is_no_broken_answer(error):
    """An error raised while a reply is checked ends the run, of whatever kind it is."""

    def refuse(_sample, _reply):
        raise error("checked")

    with _server([]) as (address, _), pytest.raises(error, match="checked"):
        run_load(
            address,
            Traffic.of("m", [{"x": np.zeros((1, 2), np.float32)}]),
            Load(rate_per_s=100, duration_s=0.1, seed=1, arrivals="constant"),
            sending=Transport(protocol="http"),
            on_reply=refuse,
        )


@pytest.mark.parametrize("row", [0, 1, 2])
def test_waiting_request_that_times_out_leaves_the_others(row):
    """They keep their order, and the queue is not copied: it may hold thousands."""
    waiting = deque((place, b"") for place in range(3))

    drop_waiting(waiting, row)

    assert [place for place, _ in waiting] == [place for place in range(3) if place != row]
