import pytest

from enginegate.candidate import Precision
from enginegate.engines.roofline import PeakThroughput, peak_throughput, roofline
from enginegate.precision import GraphStats

FP32 = Precision.FP32
DEVICE = PeakThroughput(flops_per_s=1e12, bytes_per_s=1e11, one_thread_flops_per_s=4e11)


@pytest.mark.parametrize(
    ("flops", "moved", "instances", "bound", "reached"),
    [
        pytest.param(1e9, 1e7, 4, "compute", 0.4, id="compute"),
        pytest.param(1e9, 1e7, 1, "compute", 1.0, id="one-thread"),
        pytest.param(1e7, 1e8, 4, "memory", 0.4, id="memory"),
        pytest.param(0.0, 1e8, 4, "unknown", 0.4, id="nothing-multiplied"),
    ],
)
def test_the_larger_time_is_the_bound(flops, moved, instances, bound, reached):
    """Arithmetic or traffic limits, whichever takes longer; reached is the share of that limit."""
    stats = GraphStats({}, batch_size=8, flops=flops, bytes_moved=moved, nodes=10)

    line = roofline(stats, DEVICE, samples_per_s=8 * 400.0, instances=instances)

    assert line.bound == bound
    assert line.reached == pytest.approx(reached)


def test_unknown_ceilings_decide_nothing():
    """Without a device's ceilings nothing is concluded."""
    stats = GraphStats({}, batch_size=8, flops=1e9, bytes_moved=1e7, nodes=10)

    line = roofline(stats, PeakThroughput(bytes_per_s=1e11), samples_per_s=100.0)

    assert (line.bound, line.reached) == ("unknown", None)


def test_mostly_unknown_graph_gets_no_bound():
    """With a third of its nodes counted, which of the two limits it would be a guess."""
    stats = GraphStats({}, flops=1e9, bytes_moved=1e7, nodes=3, uncounted={"Sparkle": 2})

    assert roofline(stats, DEVICE).bound == "unknown"


def test_the_ceilings_of_this_processor():
    """A real device multiplies and copies; threads together are no slower than one."""
    found = peak_throughput("cpu", FP32)

    assert found.flops_per_s >= found.one_thread_flops_per_s > 1e8
    assert found.bytes_per_s > 1e8
    assert found.flops_for(1) == found.one_thread_flops_per_s
    assert found.flops_for(10_000) == found.flops_per_s
