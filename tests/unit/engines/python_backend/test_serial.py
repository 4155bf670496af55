"""One batch after the other: each request gets its own rows, and a failure costs one batch."""

import numpy as np
import pytest

from enginegate.engines.python_backend.memory import Memory
from enginegate.engines.python_backend.serial import Serial
from tests.fakes import host_device
from tests.fakes.host_device import GpuDevice, host_array


class Doubling:
    """Doubles its input on the fake device."""

    buckets = (1, 4, 8)

    def __init__(self):
        self.ran, self.fails = [], None

    def lane(self, stream):
        self.stream = stream
        return self

    def bind(self, inputs, memory, **_):
        x = inputs["x"]
        output = memory("y", x.shape, x.dtype)

        def run():
            host_array(output)[...] = host_array(x) * 2
            self.ran.append(host_array(x).copy())

        def launch():
            if self.fails:
                raise self.fails
            self.stream.queue(run)

        return {"y": output}, launch


@pytest.fixture
def engine():
    return Doubling()


@pytest.fixture
def serial(engine):
    opened = Serial(engine, GpuDevice(), {"x": np.ones((1, 2), np.float32)})
    engine.ran.clear()
    yield opened
    opened.close()


def rows(*values, width=2):
    return {"x": np.repeat(np.array(values, np.float32)[:, None], width, axis=1)}


def test_requests_of_a_batch_are_joined_in_order(serial, monkeypatch):
    """Rows of all requests run together and come back in their order, however late copies are."""
    monkeypatch.setattr(host_device, "LATE_S", 0.002)

    for first in (1.0, 10.0, 20.0):
        found = serial.run([rows(first), rows(first + 1, first + 2), rows(first + 3)])

        np.testing.assert_array_equal(found["y"][:, 0], 2 * (first + np.arange(4)))


def test_padding_repeats_the_last_row(serial, engine):
    """Five rows run in the bucket of eight, and five come back."""
    found = serial.run([rows(1, 2, 3), rows(4, 5)])

    np.testing.assert_array_equal(engine.ran[0][:, 0], [1, 2, 3, 4, 5, 5, 5, 5])
    assert found["y"].shape == (5, 2)


def test_tensors_of_the_device_are_copied_there(serial, engine):
    """Requests in device memory and in host memory make one batch."""
    device = serial._bindings._device
    there = Memory(device.allocate(16), (2, 2), np.dtype("float32"))
    host_array(there)[...] = [[7, 7], [8, 8]]

    found = serial.run([rows(1), {"x": there}])

    np.testing.assert_array_equal(found["y"][:, 0], [2, 14, 16])
    np.testing.assert_array_equal(engine.ran[0][:, 0], [1, 7, 8, 8])


def test_shapes_that_were_not_made_warm_are_answered(serial):
    """Another width is bound when it comes."""
    found = serial.run([rows(3, width=5)])

    np.testing.assert_array_equal(found["y"], np.full((1, 5), 6.0))


def test_failure_costs_one_batch(serial, engine):
    """A run that fails raises; the next one is computed, and only it is counted."""
    engine.fails = MemoryError("no room")
    with pytest.raises(MemoryError, match="no room"):
        serial.run([rows(1)])
    engine.fails = None

    np.testing.assert_array_equal(serial.run([rows(4)])["y"], [[8, 8]])
    totals = serial.totals()
    assert (totals["batches"], totals["requests"], totals["pending"]) == (1, 1, 0)
    assert totals["compute"] > 0
