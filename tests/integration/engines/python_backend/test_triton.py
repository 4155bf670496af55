"""The pipeline of our runner inside a real Triton; threads stand in for a GPU's streams."""

import hashlib
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from enginegate.candidate import TensorSpec
from enginegate.engines.python_backend import runner_files
from enginegate.errors import ServerError
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.client import TritonClient
from enginegate.triton.config import config_text, model_config
from enginegate.triton.install import find_triton
from enginegate.triton.metrics import read_metrics
from enginegate.triton.server import start
from tests.fakes import host_device

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("engines")]

ROWS = 8
TOGETHER, FAILING, SLOW = 1001.0, 1002.0, 1003.0
# Doubles; two runs that begin with TOGETHER go on only when both are inside.
ENGINE = f"""
import ctypes, threading, time
import numpy as np

def open_for_triton(folder, content, manifest, parameters, device_id):
    return Engine()

class Engine:
    buckets = (1, 4, {ROWS})
    both = threading.Barrier(2)

    def lane(self, stream):
        return Lane(self, stream)

class Lane:
    def __init__(self, engine, stream):
        self.engine, self.stream = engine, stream

    def bind(self, inputs, memory, *, warm):
        x = inputs["x"]
        y = memory("y", x.shape, x.dtype)

        def run():
            given, answer = array(x), array(y)
            first = float(given[0, 0])
            if first == {TOGETHER}:
                self.engine.both.wait(timeout=60)
            if first == {SLOW}:
                time.sleep(0.3)
            np.multiply(given, 2, out=answer)

        def launch():
            if float(array(x)[0, 0]) == {FAILING}:
                raise MemoryError("no room")
            self.stream.queue(run)

        def careful():
            self.stream.wait()
            launch()

        return {{"y": y}}, careful

def array(memory):
    count = int(np.prod(memory.shape))
    raw = (ctypes.c_uint8 * (count * 4)).from_address(memory.address)
    return np.frombuffer(raw, np.float32).reshape(memory.shape)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with two models that double.

    ``doubling`` is one process with two streams that sends its answers; ``sharing`` is two
    processes that return them.
    """
    root = tmp_path_factory.mktemp("runner")
    place(root, "doubling", instances=2, answers="sent")
    place(root, "sharing", processes=2)
    install = find_triton(root / "triton")
    folder, models = root / "server", ["doubling", "sharing"]
    with start(install, root / "repository", folder=folder, load=models) as running:
        yield running


def place(root, model, instances=1, processes=1, **parameters):
    version = root / "repository" / model / "1"
    version.mkdir(parents=True)
    module = root / "engine_toy.py"
    module.write_text(ENGINE)
    for name, source in runner_files("toy", module, gpu=True).items():
        shutil.copyfile(source, version / name)
    shutil.copyfile(host_device.__file__, version / "device.py")
    (version / "model.toy").write_bytes(b"weights")
    manifest = {
        "candidate": {"kind": "toy", "precision": "fp32"},
        "filename": "model.toy",
        "file": {"sha256": hashlib.sha256(b"weights").hexdigest()},
    }
    (version / "engine.json").write_text(json.dumps(manifest))
    config = model_config(
        name=model,
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 2)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 2)),),
        serving=ServingConfig(
            max_batch_size=2 * ROWS,
            max_queue_delay_us=500,
            instances=instances,
            processes=processes,
        ),
        backend="python",
        parameters=parameters,
        gpu=True,
        options=ServingOptions(warmup_batch_sizes=(1, ROWS)),
    )
    group = config.message.instance_group[0]
    assert group.count == processes
    group.kind = group.KIND_CPU
    (version.parent / "config.pbtxt").write_text(config_text(config))


@pytest.fixture
def client(server):
    with server.client(timeout_s=60) as opened:
        yield opened


def ask(client, value, rows=1, model="doubling"):
    x = np.full((rows, 2), value, np.float32)
    return client.infer(model, {"x": x}).outputs["y"]


def until(condition, within_s=60):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_batches_compute_at_once_in_one_instance(client):
    """Each of two full batches waits inside the engine for the other: both are answered."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, client, TOGETHER, ROWS) for _ in range(2)]

        for each in asked:
            np.testing.assert_array_equal(each.result(), np.full((ROWS, 2), 2 * TOGETHER))


@pytest.mark.parametrize("model", ["doubling", "sharing"])
def test_every_request_gets_its_own_rows_under_load(client, model):
    """Requests of all sizes from many clients, in batches that are cut where they do not fit."""
    asked = [(number, int(size)) for number, size in enumerate(np.tile([1, 2, 3, 5, ROWS], 40))]

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda each: ask(client, *each, model), asked))

    for (number, size), answer in zip(asked, answers, strict=True):
        np.testing.assert_array_equal(answer, np.full((size, 2), 2.0 * number))


@pytest.mark.parametrize("model", ["doubling", "sharing"])
def test_requests_that_fail_do_not_cost_others_their_answers(client, model):
    """A request with too many rows and a batch whose run fails get errors, the others answers."""

    def outcome(value, rows):
        try:
            return float(ask(client, value, rows, model)[0, 0])
        except ServerError as error:
            return str(error)

    asked = [(1.0, 1), (2.0, ROWS + 1), (FAILING, ROWS), (3.0, 2)] * 6
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: outcome(*each), asked))

    for (value, _), answer in zip(asked, found, strict=True):
        if value == 2.0:
            assert "it has more rows than the 8 of the engine" in answer
        elif value == FAILING:
            assert "MemoryError: no room" in answer
        else:
            assert answer == 2 * value


def test_time_of_returned_answers_is_triton_s_own(server, client):
    """Triton has counted the wait, so the runner adds nothing to it."""
    before = client.statistics("sharing")
    ask(client, SLOW, ROWS, "sharing")
    counted = client.statistics_since("sharing", before, answers=1)
    time.sleep(0.2)

    found = read_metrics(server.metrics).matching("enginegate_runner", model="sharing")
    totals = [each.value for each in found if each.labels["counted"] == "batches"]
    pending = [each.value for each in found if each.labels["counted"] == "pending"]
    assert counted.compute_infer_ns >= 0.3e9
    assert (len(totals), sum(totals) >= 1, sum(pending)) == (2, True, 0.0)


def test_every_process_of_a_model_takes_batches(server, client):
    """While one process computes a batch, another one takes the next."""
    with ThreadPoolExecutor(6) as pool:  # three batches
        list(pool.map(lambda _: ask(client, SLOW, ROWS, "sharing"), range(6)))
    time.sleep(0.2)

    found = read_metrics(server.metrics).matching(
        "enginegate_runner", model="sharing", counted="batches"
    )
    assert [each.value >= 1 for each in found] == [True, True]


def test_client_that_went_away_blocks_nobody(server, client):
    """Clients that stop waiting leave slots that others get."""
    for _ in range(6):
        with TritonClient(server.grpc, timeout_s=0.02) as hasty, pytest.raises(ServerError):
            ask(hasty, SLOW, ROWS)

    np.testing.assert_array_equal(ask(client, 4.0), [[8.0, 8.0]])


def test_unload_waits_for_what_is_under_way(client):
    """Requests that were taken before an unload are answered; then the model can be loaded."""
    before = client.statistics("doubling").requests
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, client, SLOW, ROWS) for _ in range(3)]
        until(lambda: client.statistics("doubling").requests >= before + 3)
        client.unload("doubling")
        answers = [each.result() for each in asked]
    until(lambda: ("doubling", "UNAVAILABLE") in [(row.name, row.state) for row in client.index()])
    client.load("doubling")

    assert [answer[0, 0] for answer in answers] == [2 * SLOW] * 3
    np.testing.assert_array_equal(ask(client, 5.0), [[10.0, 10.0]])


def test_stages_are_counted_where_metrics_are(server, client):
    """What Triton's counters cannot see is a counter of the runner's own."""
    for number in range(5):
        ask(client, float(number))

    deadline = time.monotonic() + 30
    counted = {}
    while counted.get("requests", 0) < 5 and time.monotonic() < deadline:
        found = read_metrics(server.metrics).matching("enginegate_runner", model="doubling")
        counted = {series.labels["counted"]: series.value for series in found}
        time.sleep(0.05)

    assert counted["batches"] >= 1
    assert 0 < counted["compute"] <= counted["pending"]
