"""Batch sizes are measured in windows, within a time, on a clock that the tests move."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from enginegate.engines.engine_sweep import (
    sweep_batches,
    sweep_sizes,
    window_length_s,
    window_runs,
    windows_that_fit,
)


@dataclass
class Device:
    """A run takes ``fixed_s`` and ``item_s`` a row; opening a batch size costs ``bind_s``."""

    fixed_s: float = 1e-3
    item_s: float = 1e-4
    bind_s: float = 0.0
    breaks_at: int | None = None
    now_s: float = 0.0
    ran: list = field(default_factory=list)

    def clock(self):
        return self.now_s

    @contextmanager
    def bind(self, inputs):
        size = len(inputs["x"])
        if size == self.breaks_at:
            raise RuntimeError("out of memory")
        self.now_s += self.bind_s

        def repeat(count):
            self.ran.append((size, count))
            took_s = count * (self.fixed_s + self.item_s * size)
            self.now_s += took_s
            return took_s

        yield repeat

    def sweep(self, *sizes, limit_s=60.0, **how):
        return sweep_batches(
            self.bind,
            lambda count: {"x": np.zeros((count, 1))},
            sizes,
            limit_s=limit_s,
            clock=self.clock,
            **how,
        )


@pytest.mark.parametrize(
    ("largest", "wanted", "expected"),
    [
        pytest.param(1, (), (1,), id="one"),
        pytest.param(8, (), (1, 8), id="largest-is-a-step"),
        pytest.param(64, (), (1, 8, 32, 64), id="largest-is-last"),
        pytest.param(128, (16, 256), (1, 8, 16, 32, 128), id="the-searchs-own"),
    ],
)
def test_sizes_are_spread_up_to_the_engines_largest(largest, wanted, expected):
    """Those that serving may form are among them; none is larger than the engine takes."""
    assert sweep_sizes(largest, wanted) == expected


@pytest.mark.parametrize(("run_s", "expected"), [(1e-4, 1000), (0.03, 4), (2.0, 1), (0.0, 1)])
def test_windows_are_long_enough(run_s, expected):
    """A window lasts a tenth of a second, or one run."""
    assert window_runs(run_s) == expected


@pytest.mark.parametrize(
    ("run_s", "left_s", "expected"),
    [(0.001, 10.0, 5), (0.1, 0.45, 4), (0.1, 0.25, 0), (2.0, 5.0, 0)],
)
def test_fewer_windows_than_three_are_none(run_s, left_s, expected):
    """Two numbers have no median and no spread."""
    assert windows_that_fit(run_s, left_s) == expected


@pytest.mark.parametrize(("left_s", "expected"), [(9.0, 0.1), (0.3, 0.05), (0.0, 0.02)])
def test_windows_are_shorter_where_time_is_short(left_s, expected):
    """Every batch size gets its share of the time."""
    assert window_length_s(left_s) == pytest.approx(expected)


def test_little_time_is_shared_by_all_sizes():
    """The first one does not take it all."""
    found = Device().sweep(1, 8, 32, limit_s=0.6)

    assert [batch.batch_size for batch in found.batches] == [1, 8, 32]


def test_speed_is_samples_over_time():
    """Of each window; the median is the batch size's."""
    found = Device().sweep(1, 8)

    assert [batch.batch_size for batch in found.batches] == [1, 8]
    assert [len(batch.windows_per_s) for batch in found.batches] == [5, 5]
    assert found.batches[0].samples_per_s == pytest.approx(1 / 1.1e-3, rel=1e-5)
    assert found.batches[1].samples_per_s == pytest.approx(8 / 1.8e-3, rel=1e-5)
    assert found.batches[1].batch_ms == pytest.approx(1.8, rel=1e-5)
    assert found.unmeasured == ""


def test_each_size_is_warm_before_it_is_timed():
    """Runs of the warm-up are in no window."""
    device = Device()

    found = device.sweep(4)

    timed = 5 * found.batches[0].runs
    assert sum(count for _, count in device.ran) > timed + 1


@pytest.mark.parametrize("limit_s", [0.5, 2.0, 5.0])
@pytest.mark.parametrize(
    "device",
    [
        pytest.param({"fixed_s": 0.0, "item_s": 0.02}, id="slow-processor"),
        pytest.param({"fixed_s": 0.3, "item_s": 0.0}, id="slow-start"),
        pytest.param({"fixed_s": 5e-4, "item_s": 2e-5}, id="gpu"),
        pytest.param({"fixed_s": 5e-4, "item_s": 2e-5, "bind_s": 0.4}, id="slow-to-bind"),
    ],
)
def test_the_time_is_kept(device, limit_s):
    """Whatever does not fit is named; nothing is left out silently."""
    device, sizes = Device(**device), (1, 8, 32, 128)

    found = device.sweep(*sizes, limit_s=limit_s)

    one_run_s = device.fixed_s + device.item_s * sizes[len(found.batches) - len(sizes)]
    measured = [batch.batch_size for batch in found.batches]
    assert device.now_s <= limit_s + device.bind_s + 2 * one_run_s
    assert measured == list(sizes[: len(measured)])
    for size in sizes[len(measured) :]:
        assert str(size) in found.unmeasured


def test_a_size_that_is_too_slow_is_said_with_its_time():
    """Its time is expected from the size before, so that it is not even tried."""
    device = Device(fixed_s=0.0, item_s=0.05)

    found = device.sweep(1, 64, limit_s=2.0)

    assert [batch.batch_size for batch in found.batches] == [1]
    assert found.unmeasured.startswith("batch 64: a run takes about 3.2 s")
    assert {size for size, _ in device.ran} == {1}


def test_a_size_that_fails_is_said_with_the_reason():
    """What was measured before it counts."""
    found = Device(breaks_at=8).sweep(1, 8, 32)

    assert [batch.batch_size for batch in found.batches] == [1]
    assert found.unmeasured.startswith("batch 8, 32: not measured")
    assert "out of memory" in found.unmeasured


def test_memory_is_read_once_the_size_has_run():
    """Libraries allocate much of it in the first run, not when inputs are bound."""
    device, largest_run = Device(), []

    device.sweep(1, 8, at_largest=lambda: largest_run.append(device.ran[-1][0]))

    assert largest_run == [1, 8]
