import logging
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import numpy as np
import pytest

from enginegate.errors import DataError
from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.schedule import due_times
from enginegate.loadgen.traffic import Traffic, run_load
from enginegate.measurement import Load
from enginegate.policy.recording import Shadow
from enginegate.shadow import (
    expire_samples,
    latest_sample,
    read_traffic_sample,
    record_live,
    recording_notes,
)
from enginegate.triton.server import connect

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("shadow")]

EVERY = Shadow(trace_rate=1, max_samples=1000)


@pytest.fixture
def home(tmp_path):
    return tmp_path / "shadow"


@pytest.fixture
def sent():
    """Fifty single requests, each with its own values."""
    source = np.random.default_rng(0)
    return [{"x": source.normal(size=(1, 4)).astype(np.float32)} for _ in range(50)]


@pytest.fixture
def visitors(server, scale, sent):
    """Makes a steady load that lasts for a block, however long that takes."""
    traffic = Traffic.of(scale, sent)
    return lambda rate_per_s: BackgroundLoad(server.grpc, traffic, rate_per_s=rate_per_s)


def _wait(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def _is_traced(client, model):
    return client.trace_settings(model)["trace_level"] != ("OFF",)


def _visit(server, model, sent, load):
    """Send a whole load once the model's requests are recorded."""
    with server.client() as client:
        _wait(lambda: _is_traced(client, model))
    run_load(server.grpc, Traffic.of(model, sent), load)


def test_live_requests_become_a_sample(server, scale, home, sent, caplog):
    """Inputs, outputs, versions, stages and arrival times of live requests are kept, privately."""
    caplog.set_level(logging.DEBUG)
    load = Load(rate_per_s=100, duration_s=1.5, seed=3)
    due = np.fromiter(due_times(load), float)
    every = Shadow(trace_rate=1, max_samples=len(due))

    with ThreadPoolExecutor(1) as visitor:
        visit = visitor.submit(_visit, server, scale, sent, load)
        path, info = record_live(connect(server.grpc), scale, every, home=home, duration_s=60.0)
    visit.result()
    sample = read_traffic_sample(path)

    assert path == latest_sample(home, scale)
    assert (info.lost, info.one_in, info.capped) == (0, 1, False)
    assert info.requests == len(due)
    assert info.model_versions == {1: info.rows}
    expected = np.concatenate([sent[int(name)]["x"] for name in sample.request_ids])
    np.testing.assert_allclose(sample.data.inputs["x"], expected, rtol=1e-5)
    np.testing.assert_allclose(sample.outputs["y"], 2 * expected, rtol=1e-5)
    assert all((spent > 0).all() for spent in sample.stages_us.values())
    late = sample.arrivals_s - due
    assert np.median(np.abs(late - np.median(late))) < 0.05
    modes = {stat.S_IMODE(place.stat().st_mode) for place in path.iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(home.stat().st_mode) == 0o700
    assert list(server.trace_file.parent.iterdir()) == []
    assert str(float(expected[0, 0]))[:7] not in caplog.text


def test_limit_on_requests_ends_it(server, scale, home, visitors):
    """Recording stops as soon as there are enough requests, long before the time is over."""
    wanted = Shadow(trace_rate=2, max_samples=20)

    with visitors(200):
        path, info = record_live(server, scale, wanted, home=home, duration_s=60.0)

    assert info.requests == 20
    assert info.one_in == 2
    sample = read_traffic_sample(path)
    assert sample.arrivals_s[-1] < 30.0
    assert sample.replay_s[-1] == pytest.approx(sample.arrivals_s[-1] / 2)


def test_redacted_inputs_never_reach_the_disk(server, scale, home, visitors):
    """Dropped inputs are gone, and Triton's own files are deleted at the end."""
    wanted = EVERY.model_copy(update={"hash": ("x", "request_id"), "max_samples": 30})

    with visitors(100):
        path, info = record_live(server, scale, wanted, home=home, duration_s=60.0)

    assert info.withheld == ("x",)
    assert read_traffic_sample(path).data.inputs == {}
    assert list(server.trace_file.parent.iterdir()) == []


def test_no_traffic_is_an_error_and_leaves_nothing(server, scale, home):
    """Without a request there is no sample, and tracing is off again."""
    with (
        server.client() as client,
        pytest.raises(DataError, match=r"(?s)live traffic of scale.*no request was recorded"),
    ):
        record_live(server, scale, EVERY, home=home, duration_s=0.2)

    with server.client() as client:
        assert client.trace_settings(scale) == client.trace_settings()
    assert [path.name for path in home.iterdir()] == [".tracing"]


_RECORD = """
import sys
from pathlib import Path
from enginegate.policy.recording import Shadow
from enginegate.shadow import record_live
from enginegate.triton.server import connect

print("ready", flush=True)
record_live(
    connect(sys.argv[1]), "scale", Shadow(trace_rate=1), home=Path(sys.argv[2]), duration_s=60.0
)
"""


def test_killed_recording_is_recovered_by_the_next_one(server, scale, home, visitors):
    """After SIGKILL the next recording finds clean settings and none of the old requests."""
    process = subprocess.Popen(
        [sys.executable, "-c", _RECORD, server.grpc, str(home)], stdout=subprocess.PIPE
    )
    with server.client() as client, process, visitors(100):
        _wait(lambda: _is_traced(client, scale) or process.poll() is not None)
        _wait(lambda: list(server.trace_file.parent.iterdir()) or process.poll() is not None)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        left_on = client.trace_settings(scale)["trace_level"]

        path, info = record_live(
            server, scale, Shadow(trace_rate=1, max_samples=10), home=home, duration_s=60.0
        )

        assert left_on == ("TIMESTAMPS", "TENSORS")
        assert client.trace_settings(scale) == client.trace_settings()
    assert info.requests == 10
    assert info.lost == 0
    assert list(server.trace_file.parent.iterdir()) == []
    assert not list(recording_notes(home).glob("*.json"))
    assert expire_samples(home, 1, datetime.now(tz=UTC)) == ()
    assert path.is_dir()
