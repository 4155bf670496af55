"""Batches overlap, and each request gets its own rows. Threads stand in for a GPU's streams."""

import threading
from queue import SimpleQueue

import numpy as np
import pytest

from enginegate.engines.python_backend import pipeline as pipelines
from enginegate.engines.python_backend.memory import Memory
from enginegate.engines.python_backend.pipeline import Pipeline
from tests.fakes import host_device
from tests.fakes.host_device import GpuDevice, host_array


class Doubling:
    """Doubles its input on the fake device; a gate holds the runs back until a test opens it."""

    buckets = (1, 4, 8)

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.entered = SimpleQueue()
        self.lanes, self.bound, self.ran = [], [], []

    def lane(self, stream):
        self.lanes.append(stream)
        return _Lane(self, stream)


class _Lane:
    def __init__(self, engine, stream):
        self._engine, self._stream = engine, stream

    def bind(self, inputs, memory, *, warm):
        x = inputs["x"]
        self._engine.bound.append((x.shape, warm))
        output = memory("y", x.shape, x.dtype)

        def run():
            self._engine.entered.put(len(host_array(x)))
            self._engine.gate.wait()
            host_array(output)[...] = host_array(x) * 2
            self._engine.ran.append(host_array(x).copy())

        return {"y": output}, lambda: self._stream.queue(run)


@pytest.fixture
def engine():
    return Doubling()


@pytest.fixture
def open_pipeline(engine):
    opened = []

    def run(lanes=1):
        device = GpuDevice()
        opened.append(Pipeline(engine, device, {"x": np.ones((1, 2), np.float32)}, lanes=lanes))
        engine.ran.clear()
        while not engine.entered.empty():
            engine.entered.get()
        return opened[-1]

    yield run
    engine.gate.set()
    for each in opened:
        each.close()


class Answers:
    """Collects answers, which come from other threads, a range of requests at a time."""

    def __init__(self):
        self._come = SimpleQueue()

    def of(self, name):
        def answer(outcome, numbers):
            if numbers.start == 0:
                self._come.put((name, outcome))

        return answer

    def get(self, count):
        return dict(self._come.get(timeout=30) for _ in range(count))


def rows(*values, width=2):
    return {"x": np.repeat(np.array(values, np.float32)[:, None], width, axis=1)}


def test_requests_of_a_batch_are_joined_in_order(open_pipeline):
    """Rows of all requests run together, and come back in the order of the requests."""
    pipeline, answers = open_pipeline(), Answers()

    pipeline.submit([rows(1), rows(2, 3), rows(4)], answers.of("all"))

    np.testing.assert_array_equal(answers.get(1)["all"]["y"][:, 0], [2, 4, 6, 8])


def test_outcome_can_be_waited_for(open_pipeline):
    """Batches that were begun give all of their rows, or the failure, to whoever asks."""
    pipeline = open_pipeline()
    torn = [{"x": np.ones((1, 2), np.float32)}, {"x": np.ones((1, 3), np.float32)}]

    first, second = pipeline.begin([rows(1), rows(2)]), pipeline.begin(torn)

    np.testing.assert_array_equal(first()["y"][:, 0], [2, 4])
    assert isinstance(second(), ValueError)
    assert (pipeline.totals()["requests"], pipeline.totals()["pending"]) == (2, 0)


def test_many_requests_to_a_quick_engine_are_worth_waiting_for(open_pipeline, engine, monkeypatch):
    """An engine that takes longer than sending the answers is better overlapped."""
    monkeypatch.setattr(host_device, "LATE_S", 0.02)
    slow = open_pipeline()
    monkeypatch.setattr(host_device, "LATE_S", 0.0)
    monkeypatch.setattr(pipelines, "_SENDING_S", 1e3)

    assert not [size for size in engine.buckets if slow.is_worth_waiting(0, size)]
    assert all(slow.is_worth_waiting(1, size) for size in engine.buckets)
    assert min(slow._takes_s.values()) >= 0.02


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_padding_repeats_the_last_row(open_pipeline, engine, count):
    """A batch runs at the next bucket, filled with its own last row, and loses the padding."""
    pipeline, answers = open_pipeline(), Answers()

    pipeline.submit([rows(*range(1, count + 1))], answers.of("one"))

    assert len(answers.get(1)["one"]["y"]) == count
    (ran,) = engine.ran
    assert len(ran) == next(size for size in engine.buckets if size >= count)
    assert set(ran[count:, 0]) <= {count}


def test_next_batches_are_taken_while_one_computes(open_pipeline, engine):
    """With one lane, two more batches are copied in or out while it computes; a fourth waits."""
    pipeline, answers = open_pipeline(lanes=1), Answers()
    engine.gate.clear()

    for number in range(3):
        pipeline.submit([rows(number)], answers.of(number))
    fourth = threading.Thread(target=pipeline.submit, args=([rows(3)], answers.of(3)))
    fourth.start()
    engine.entered.get(timeout=30)
    assert fourth.is_alive()
    engine.gate.set()
    fourth.join(timeout=30)

    found = answers.get(4)
    assert {name: float(found[name]["y"][0, 0]) for name in found} == {0: 0, 1: 2, 2: 4, 3: 6}


def test_lanes_compute_at_once(open_pipeline, engine):
    """Two streams are inside the engine together."""
    pipeline, answers = open_pipeline(lanes=2), Answers()
    engine.gate.clear()

    pipeline.submit([rows(1)], answers.of(1))
    pipeline.submit([rows(2)], answers.of(2))

    assert [engine.entered.get(timeout=30) for _ in range(2)] == [1, 1]
    engine.gate.set()
    answers.get(2)
    assert len(engine.lanes) == 2


@pytest.mark.parametrize("lanes", [1, 2])
def test_no_batch_sees_another_ones_rows(open_pipeline, monkeypatch, lanes):
    """Many batches of changing sizes, on streams that lag behind, are all answered rightly."""
    pipeline, answers = open_pipeline(lanes), Answers()
    monkeypatch.setattr(host_device, "LATE_S", 0.0003)
    sizes = np.random.default_rng(7).integers(1, 9, 60)

    for number, size in enumerate(sizes):
        parts = [rows(100 * number + at) for at in range(size)]
        pipeline.submit(parts, answers.of(number))

    for number, found in answers.get(len(sizes)).items():
        expected = [2 * (100 * number + at) for at in range(sizes[number])]
        np.testing.assert_array_equal(found["y"][:, 0], expected)


def test_tensors_of_the_device_are_copied_there(open_pipeline):
    """Inputs in device memory are read before submitting returns, beside those of the host."""
    pipeline, answers = open_pipeline(), Answers()
    there = np.full((2, 2), 5, np.float32)
    tensor = Memory(there.ctypes.data, there.shape, "float32")

    pipeline.submit([rows(1), {"x": tensor}, rows(2)], answers.of("mixed"))
    there[...] = -1
    pipeline.submit([{"x": tensor}, {"x": tensor}, {"x": tensor}], answers.of("device"))
    there[...] = -2

    found = answers.get(2)
    np.testing.assert_array_equal(found["mixed"]["y"][:, 0], [2, 10, 10, 4])
    np.testing.assert_array_equal(found["device"]["y"][:, 0], [-2] * 6)


def test_shapes_that_were_not_made_warm_are_answered(open_pipeline, engine):
    """Another length than the tuned one gets buffers of its own, once."""
    pipeline, answers = open_pipeline(), Answers()

    for number in range(3):
        pipeline.submit([rows(number, width=7)], answers.of(number))

    assert answers.get(3)[2]["y"].shape == (1, 7)
    assert [bound for bound in engine.bound if bound[0][1] == 7] == [((1, 7), False)]


def test_unusual_shapes_give_their_memory_back(open_pipeline, monkeypatch):
    """Only so many shapes are kept; the one that was used least recently is freed."""
    from enginegate.engines.python_backend import bindings as module

    monkeypatch.setattr(module, "_KEPT_SHAPES", 2)
    pipeline, answers = open_pipeline(), Answers()
    device = pipeline._device

    for width in (3, 4, 5, 6):
        pipeline.submit([rows(1, width=width)], answers.of(width))
        np.testing.assert_array_equal(answers.get(1)[width]["y"], np.full((1, width), 2))

    assert {array.nbytes for array in device.freed} >= {12, 16}


def test_failure_is_the_answer_of_its_batch_alone(open_pipeline):
    """A run that fails answers its own requests; the batches after it are computed."""
    pipeline, answers = open_pipeline(), Answers()
    wrong = {"x": np.ones((1, 2, 2), np.float32)}

    class Broken:
        def bind(self, *_arguments, **_options):
            raise MemoryError("no room")

    bindings = pipeline._lanes[0]._bindings
    real, bindings._lane = bindings._lane, Broken()
    pipeline.submit([wrong], answers.of("wrong"))
    found = answers.get(1)
    bindings._lane = real
    pipeline.submit([rows(4)], answers.of("right"))

    assert isinstance(found["wrong"], MemoryError)
    np.testing.assert_array_equal(answers.get(1)["right"]["y"], [[8, 8]])


def test_want_of_memory_costs_one_batch_and_leaks_nothing(open_pipeline, monkeypatch):
    """What was freed to make room for a larger tensor is not used again, and the rest is freed."""
    pipeline, answers = open_pipeline(), Answers()
    device, allocate = pipeline._device, GpuDevice.allocate
    for _ in range(3):  # each slot once
        pipeline.submit([rows(1)], answers.of("before"))
        answers.get(1)
    held = set(device.memory)

    def full(self, size_bytes):
        if size_bytes > 64:
            raise MemoryError("out of memory")
        return allocate(self, size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(GpuDevice, "allocate", full)
        for number in range(6):
            pipeline.submit([rows(number, width=100)], answers.of(number))
        assert {type(found) for found in answers.get(6).values()} == {MemoryError}
        for number in range(3):
            pipeline.submit([rows(number)], answers.of(number))
        found = answers.get(3)

    assert [found[number]["y"][0, 0] for number in range(3)] == [0, 2, 4]
    assert len(device.memory) <= len(held)


def test_answer_that_fails_costs_no_slot(open_pipeline):
    """More of them than there are slots, and the next batch is still carried."""
    pipeline, answers = open_pipeline(), Answers()

    def fail(_outcome, _numbers):
        raise RuntimeError("the client is gone")

    for _ in range(9):
        pipeline.submit([rows(1)], fail)
    pipeline.submit([rows(4)], answers.of("last"))

    np.testing.assert_array_equal(answers.get(1)["last"]["y"], [[8, 8]])


def test_lane_that_does_not_open_says_why():
    """What the engine raised when it was opened is raised where the pipeline is made."""

    class Refusing:
        buckets = (1,)

        def lane(self, _stream):
            raise RuntimeError("no such plan")

    with pytest.raises(RuntimeError, match="no such plan"):
        Pipeline(Refusing(), GpuDevice(), {"x": np.ones((1, 2), np.float32)})


def test_closing_waits_for_what_is_under_way(engine):
    """Batches that were taken are answered before the threads end."""
    pipeline, answers = (
        Pipeline(engine, GpuDevice(), {"x": np.ones((1, 2), np.float32)}),
        Answers(),
    )
    engine.gate.clear()
    pipeline.submit([rows(1)], answers.of(1))
    pipeline.submit([rows(2)], answers.of(2))
    closing = threading.Thread(target=pipeline.close)
    closing.start()
    engine.gate.set()
    closing.join(timeout=30)

    assert not closing.is_alive()
    assert len(answers.get(2)) == 2


def test_totals_tell_the_stages_of_what_was_answered(open_pipeline):
    """Batches and requests are counted, with the time of every stage."""
    pipeline, answers = open_pipeline(), Answers()
    pipeline.submit([rows(1), rows(2)], answers.of(1))
    pipeline.submit([rows(3)], answers.of(2))
    answers.get(2)
    pipeline.close()
    pipeline.close = lambda: None

    totals = pipeline.totals()

    assert (totals["batches"], totals["requests"]) == (2, 3)
    assert all(totals[stage] > 0 for stage in ("slot", "fill", "compute", "answer", "pending"))
    assert totals["pending"] >= totals["fill"] + totals["compute"] + totals["answer"]
