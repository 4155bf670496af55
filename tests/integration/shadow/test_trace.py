import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from enginegate.benchmark.deployment import deploy
from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError, ServerError
from enginegate.loadgen.traffic import run_load
from enginegate.measurement import Load
from enginegate.serving import ServingConfig
from enginegate.shadow import trace_files, trace_recovery
from enginegate.shadow.record import TraceLimits, _trace_prefix, record_traces
from enginegate.shadow.trace_reader import TracedRequest
from enginegate.shadow.trace_recovery import recover_traces
from enginegate.triton.server import Server, connect

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


ALL = TraceLimits(one_in=1, max_requests=1000, max_bytes=1 << 30)


@pytest.fixture
def notes(tmp_path):
    return tmp_path / "notes"


@pytest.mark.usefixtures("scale")
def test_recording_holds_requests_and_answers(server, traffic, samples, notes):
    """Every third request comes back with id, version, inputs, outputs and stages."""
    load = Load(rate_per_s=200, duration_s=1.0, seed=5)

    with record_traces(server, "scale", replace(ALL, one_in=3), notes=notes) as recorder:
        result = run_load(server.grpc, traffic, load)
        folder = recorder.traces.parent
        requests = list(recorder.stop())
        modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}

    assert all(isinstance(request, TracedRequest) for request in requests)
    assert len(requests) == len(result.due_s) // 3
    assert modes == {0o600}
    assert list(folder.iterdir()) == []
    assert not list(notes.glob("*.json"))
    sent = np.concatenate([samples[int(request.request_id)]["x"] for request in requests])
    got = np.concatenate([request.inputs["x"] for request in requests])
    answered = np.concatenate([request.outputs["y"] for request in requests])
    np.testing.assert_allclose(got, sent, rtol=1e-5)
    np.testing.assert_allclose(answered, 2 * sent, rtol=1e-5)
    assert {request.model_version for request in requests} == {1}
    assert np.ptp([request.arrival_ns for request in requests]) < 1.2e9
    assert {"QUEUE_START", "COMPUTE_START", "COMPUTE_END"} <= set(requests[0].stages_ns)


@pytest.mark.usefixtures("scale")
def test_no_more_requests_than_asked_are_recorded(server, client, notes):
    """The server itself stops at the limit, and waiting ends there."""
    with record_traces(server, "scale", replace(ALL, max_requests=4), notes=notes) as recorder:
        for value in range(10):
            client.infer("scale", {"x": np.full((3, 4), value, np.float32)})
        recorder.wait(60.0)
        requests = list(recorder.stop())

    assert len(requests) == 4
    assert not recorder.full


@pytest.mark.usefixtures("scale")
def test_bytes_are_limited_too(server, client, notes):
    """Once enough was written tracing is off, though requests go on."""
    with record_traces(server, "scale", replace(ALL, max_bytes=20_000), notes=notes) as recorder:
        for _ in range(40):
            for value in range(20):
                client.infer("scale", {"x": np.full((8, 4), value, np.float32)})
            if recorder.full:
                break
        recorder.wait(60.0)
        during = client.trace_settings("scale")["trace_level"]
        requests = list(recorder.stop())

    assert recorder.full
    assert during == ("OFF",)
    assert 0 < len(requests) < 800
    assert client.trace_settings("scale") == client.trace_settings()


@pytest.mark.usefixtures("scale")
def test_settings_are_restored_after_a_failure(server, client, notes):
    """An error while recording puts the settings back and deletes what was recorded."""
    client.set_trace({"trace_rate": ("77",)}, "scale")
    before = client.trace_settings("scale")
    during = {}

    def interrupted():
        with record_traces(server, "scale", ALL, notes=notes):
            during.update(client.trace_settings("scale"))
            client.infer("scale", {"x": np.zeros((1, 4), np.float32)})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    after = client.trace_settings("scale")
    client.set_trace({"trace_rate": None}, "scale")
    assert during["trace_level"] == ("TIMESTAMPS", "TENSORS")
    assert after == before
    assert client.trace_settings("scale") == client.trace_settings()
    assert list(server.trace_file.parent.iterdir()) == []
    assert not list(notes.glob("*.json"))


@pytest.fixture
def slow(server, scale_model):
    """A model that takes its time to answer."""
    with deploy(server, scale_model("slow", sleep_ms=400)) as deployment:
        deployment.serve(ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1))
        yield deployment


def _ask(server, model, columns=4):
    with server.client() as client:
        return client.infer(model, {"x": np.ones((1, columns), np.float32)})


@pytest.mark.usefixtures("slow")
def test_request_under_way_at_the_end_leaves_nothing_behind(server, client, notes):
    """Triton writes a request once it is answered; an interrupted recording waits for that."""

    def interrupted():
        with ThreadPoolExecutor() as pool, record_traces(server, "slow", ALL, notes=notes):
            pool.submit(_ask, server, "slow")
            while client.trace_settings("slow")["trace_count"] == (str(ALL.max_requests),):
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    time.sleep(1.0)
    assert list(server.trace_file.parent.iterdir()) == []
    assert not list(notes.glob("*.json"))


@pytest.mark.usefixtures("slow")
def test_request_under_way_at_the_end_is_recorded(server, notes):
    """Reading waits for the answer of a request that was sampled."""
    with (
        ThreadPoolExecutor() as pool,
        record_traces(server, "slow", replace(ALL, max_requests=1), notes=notes) as recorder,
    ):
        pool.submit(_ask, server, "slow")
        recorder.wait(60.0)
        requests = list(recorder.stop())

    assert [request.outputs["y"].tolist() for request in requests] == [[[2.0] * 4]]
    assert recorder.unwritten == 0


@pytest.mark.usefixtures("scale")
def test_unwritten_requests_are_counted(server, client, notes, monkeypatch):
    """A refused request holds back others, which may come; after an hour nobody waits for them."""
    monkeypatch.setattr(trace_files, "_SETTLE_S", 0.3)
    with record_traces(server, "scale", ALL, notes=notes) as recorder:
        for columns in (4, 4, 4, 4, 4, 5, 4):
            with suppress(ServerError):
                _ask(server, "scale", columns)
        requests = list(recorder.stop())
    complaints = recover_traces(notes)
    left = list(notes.glob("*.json"))
    monkeypatch.setattr(trace_recovery, "_LATEST", timedelta(0))

    assert len(requests) >= 4
    assert recorder.unwritten == 7 - len(requests)
    assert (recover_traces(notes), complaints, len(left)) == ((), (), 1)
    assert not list(notes.glob("*.json"))
    assert list(server.trace_file.parent.iterdir()) == []
    assert client.trace_settings("scale") == client.trace_settings()


@pytest.mark.usefixtures("slow")
def test_interrupted_wait_is_recovered_later(server, client, notes, monkeypatch):
    """What Triton writes after somebody pressed Ctrl-C is deleted by the next start."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def stopped():
        with (
            ThreadPoolExecutor() as pool,
            monkeypatch.context() as patch,
            record_traces(server, "slow", ALL, notes=notes) as recorder,
        ):
            pool.submit(_ask, server, "slow")
            while client.trace_settings("slow")["trace_count"] == (str(ALL.max_requests),):
                time.sleep(0.01)
            patch.setattr(trace_files.TraceFiles, "settle", interrupted)
            recorder.stop()

    with pytest.raises(KeyboardInterrupt):
        stopped()

    while not list(server.trace_file.parent.iterdir()):
        time.sleep(0.01)
    assert recover_traces(notes) == ()
    assert list(server.trace_file.parent.iterdir()) == []
    assert not list(notes.glob("*.json"))


@pytest.mark.usefixtures("scale", "slow")
def test_two_models_are_recorded_at_once(server, notes):
    """The end of one recording leaves the other's files alone."""
    with record_traces(server, "slow", ALL, notes=notes) as kept:
        with record_traces(server, "scale", ALL, notes=notes) as ended:
            _ask(server, "slow")
            for _ in range(5):
                _ask(server, "scale")
            ours = list(ended.stop())
        for _ in range(4):
            _ask(server, "slow")
        others = list(kept.stop())

    assert (len(ours), {request.model for request in ours}) == (5, {"scale"})
    assert (len(others), {request.model for request in others}) == (5, {"slow"})
    assert list(server.trace_file.parent.iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from enginegate.triton.server import connect
from enginegate.shadow.record import TraceLimits, record_traces

server = connect(sys.argv[1])
limits = TraceLimits(one_in=1, max_requests=1000, max_bytes=1 << 30)
with record_traces(server, "scale", limits, notes=Path(sys.argv[2])), server.client() as client:
    for _ in range(40):
        client.infer("scale", {"x": np.zeros((1, 4), np.float32)})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("scale")
def test_killed_recording_is_recovered_by_the_next_start(server, client, notes):
    """SIGKILL leaves tracing on and files behind; the note left with them undoes both."""
    client.set_trace({"trace_rate": ("77",)}, "scale")
    before = client.trace_settings("scale")
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, server.grpc, str(notes)], check=False, timeout=60
    )
    left_on = client.trace_settings("scale")["trace_level"]
    left_files = list(server.trace_file.parent.iterdir())

    complaints = recover_traces(notes)

    after = client.trace_settings("scale")
    client.set_trace({"trace_rate": None}, "scale")
    assert killed.returncode == -9
    assert left_on == ("TIMESTAMPS", "TENSORS")
    assert left_files
    assert complaints == ()
    assert after == before
    assert list(server.trace_file.parent.iterdir()) == []
    assert not list(notes.glob("*.json"))


@pytest.mark.usefixtures("scale")
def test_two_recordings_of_one_model_do_not_mix(server, client, notes):
    """The second is refused and told who is at it; the first goes on, and is not undone."""
    with record_traces(server, "scale", ALL, notes=notes) as first:
        with (
            pytest.raises(ServerError, match=r"being recorded already \(pid \d+"),
            record_traces(server, "scale", ALL, notes=notes),
        ):
            pass
        client.infer("scale", {"x": np.zeros((1, 4), np.float32)})
        requests = list(first.stop())

    assert len(requests) == 1


@pytest.mark.usefixtures("scale")
def test_server_started_elsewhere_says_where_it_traces(server, client, notes):
    """A running server of this machine can be recorded by its address alone."""
    with record_traces(connect(server.grpc), "scale", ALL, notes=notes) as recorder:
        client.infer("scale", {"x": np.ones((1, 4), np.float32)})
        requests = list(recorder.stop())

    assert recorder.traces == server.trace_file
    assert len(requests) == 1


def test_types_that_a_trace_cannot_hold_are_refused(server, scale_model, notes):
    """Bytes are printed as characters by Triton, so such a model is refused before tracing."""
    model = replace(
        scale_model("bytes"), inputs=(TensorSpec(name="x", dtype="uint8", shape=(-1, 4)),)
    )
    with deploy(server, model) as deployment:
        config = deployment.model.config(
            ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1)
        )
        deployment.client.load("bytes", config, timeout_s=30)

        with (
            pytest.raises(ModelError, match=r"cannot hold x: uint8"),
            record_traces(server, "bytes", ALL, notes=notes),
        ):
            pass


@pytest.mark.parametrize("named", [(), ("",), ("trace.json",), ("/no/such/folder/trace.json",)])
def test_server_of_another_machine_cannot_be_recorded(named):
    """Trace files that cannot be reached, or are not named, are refused with the flag to set."""
    with pytest.raises(ServerError, match=r"(?s)--trace-config.*\[data\] shadow"):
        _trace_prefix(Server(grpc="127.0.0.1:1", version="2"), {"trace_file": named})
