"""How a release can be loaded follows from free memory and what was measured of it."""

import re

import pytest

from enginegate.repository.deploy.memory import MemoryDemand, Room, decide_room
from enginegate.triton.gpu_memory import GpuMemory

GIB = 1 << 30
NEW = MemoryDemand(10 * GIB)


def gpus(*free_gib, numbered=True):
    return tuple(
        GpuMemory(number if numbered else None, 80 * GIB, round((80 - free) * GIB))
        for number, free in enumerate(free_gib)
    )


def taking(gib):
    return None if gib is None else MemoryDemand(round(gib * GIB))


@pytest.mark.parametrize(
    ("free", "live", "standby", "expected"),
    [
        pytest.param(11.0, 10, 10, Room.BESIDE, id="enough-with-a-tenth-to-spare"),
        pytest.param(10.9, 10, None, Room.ALONE, id="not-with-less-to-spare"),
        pytest.param(10.9, 10, 10, Room.WITHOUT_STANDBY, id="the-standby-goes-first"),
        pytest.param(0.5, 10, 10, Room.ALONE, id="the-standby-is-not-enough"),
        pytest.param(0.5, 10, None, Room.NONE, id="not-even-alone"),
        pytest.param(0.5, None, None, Room.NONE, id="neighbours-have-it-all"),
    ],
)
def test_each_way_needs_less_than_the_one_before(free, live, standby, expected):
    """The first that frees enough is taken; neighbours' memory is not free already."""
    found = decide_room(NEW, gpus(free), live=taking(live), standby=taking(standby))

    assert found.room is expected
    assert "10,240 MiB of each GPU" in found.words
    assert "GPU 0 has" in found.words


def test_release_that_was_never_measured_is_tried_without():
    """What unloading it frees is not known, so that it would be too little is not either."""
    unmeasured = MemoryDemand(None)

    assert decide_room(NEW, gpus(1), live=unmeasured, standby=None).room is Room.ALONE
    assert decide_room(NEW, gpus(1), live=taking(1), standby=unmeasured).room is Room.ALONE


@pytest.mark.parametrize(
    ("demand", "found", "words"),
    [
        pytest.param(MemoryDemand(0), gpus(0), "on the processor", id="on-a-processor"),
        pytest.param(MemoryDemand(None), gpus(0), "was not measured", id="never-measured"),
        pytest.param(NEW, (), "is not known.*target.metrics", id="no-metrics"),
        pytest.param(
            MemoryDemand(10 * GIB, (1,)), gpus(0, 0, numbered=False), "is not known", id="which-gpu"
        ),
    ],
)
def test_what_is_not_known_is_said_and_refuses_nothing(demand, found, words):
    """A server without metrics is loaded as before."""
    decision = decide_room(demand, found, live=taking(1), standby=None)

    assert decision.room is Room.BESIDE
    assert re.search(words, decision.words)


@pytest.mark.parametrize(
    ("placed", "expected"), [((), Room.ALONE), ((1,), Room.BESIDE), ((0, 1), Room.ALONE)]
)
def test_only_gpus_with_instances_count_and_the_fullest_of_them_decides(placed, expected):
    """Every one has to hold an instance; others may be as full as they like."""
    demand = MemoryDemand(10 * GIB, placed)

    assert decide_room(demand, gpus(1, 20), live=taking(10), standby=None).room is expected


def test_processes_that_share_a_gpu_are_counted_together_and_named():
    """The benchmark's figure is of all of them: whoever reads it is told of how many."""
    found = decide_room(MemoryDemand(3 * GIB, processes=3), gpus(4), live=None, standby=None)

    assert found.room is Room.BESIDE
    assert "3,072 MiB of each GPU in 3 processes by its benchmark" in found.words


def test_downtime_is_the_cold_start_or_said_to_be_unknown():
    """People read it before they let a release be replaced."""
    assert "about 12 s" in MemoryDemand(1, cold_start_s=12.3).downtime
    assert "was not measured" in MemoryDemand(1).downtime


@pytest.mark.parametrize(
    ("free", "expected"),
    [(31, Room.BESIDE), (29, Room.WITHOUT_STANDBY), (12, Room.WITHOUT_STANDBY), (11, Room.ALONE)],
)
def test_what_is_loaded_once_more_meanwhile_needs_its_memory_twice(free, expected):
    """Of 10 GiB live and 9 GiB standing by, beside 10 GiB that are new with a tenth to spare."""
    found = decide_room(
        MemoryDemand(10 * GIB), gpus(free), live=taking(10), standby=taking(9), twice=True
    )

    assert found.room is expected
    assert "once more meanwhile, 19,456 MiB" in found.words


def test_live_release_is_loaded_once_more_before_the_standby_leaves():
    """What the standby gives back comes too late for it."""
    found = decide_room(
        MemoryDemand(5 * GIB), gpus(6), live=taking(10), standby=taking(10), twice=True
    )

    assert found.room is Room.ALONE
