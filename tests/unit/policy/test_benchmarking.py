"""What a policy may ask of a search: a space that is not empty, and rates that are numbers."""

import math

import pytest
from pydantic import ValidationError

from enginegate.policy.benchmarking import LoadShape, Search, Slo
from enginegate.search.space import configurations


def _search(**fields):
    asked = {
        "max_batch_sizes": (1, 8),
        "queue_delays_us": (0,),
        "instances": (1, 2),
        "min_rate_per_s": 10.0,
        "max_rate_per_s": 100.0,
        "measurement_s": 1.0,
        "budget_s": 60.0,
    }
    return Search(**{**asked, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param(
            {"max_batch_sizes": (8,), "preferred_batch_sizes": ((16,),)},
            "preferred_batch_sizes has a size above the largest of max_batch_sizes, 8",
            id="no-configuration",
        ),
        pytest.param({"queue_delays_us": ()}, "queue_delays_us is empty: nothing", id="empty"),
        pytest.param(
            {"queue_delays_us": tuple(range(6000))},
            "24000 configurations; 10000 at most: shorten a list",
            id="enormous",
        ),
        pytest.param({"max_rate_per_s": math.inf}, "max_rate_per_s", id="infinite-rate"),
        pytest.param({"budget_s": math.nan}, "budget_s", id="no-number"),
        pytest.param({"max_rate_per_s": 1.0}, "max_rate_per_s is below", id="upside-down"),
        pytest.param({"objective": "latency"}, "needs at_rate_per_s", id="no-rate"),
        pytest.param(
            {"objective": "latency", "at_rate_per_s": 101.0},
            "at_rate_per_s, 101, is not between",
            id="rate-too-high",
        ),
        pytest.param({"at_rate_per_s": 9.0}, "at_rate_per_s, 9, is not between", id="rate-too-low"),
    ],
)
def test_unsearchable_space_is_refused(fields, said):
    """The message names the key and what is wrong with it."""
    with pytest.raises(ValidationError, match=said):
        _search(**fields)


def test_infinite_slo_is_refused():
    """Nothing misses a limit that is infinite."""
    with pytest.raises(ValidationError, match="p99_ms"):
        Slo(p99_ms=math.inf, min_throughput_per_s=1.0, confidence=0.99)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        pytest.param({}, 4, id="plain"),
        pytest.param({"max_batch_sizes": (1, 8, 8)}, 4, id="twice"),
        pytest.param({"preferred_batch_sizes": ((), (4,))}, 6, id="some-too-large"),
        pytest.param({"objective": "cost", "gpus": (0, 1)}, 8, id="fewer-gpus"),
        pytest.param({"gpus": (0, 1)}, 4, id="all-gpus"),
    ],
)
def test_configurations_that_can_be_used_are_counted(fields, count):
    """The number that is said is the number that can be tried."""
    bounds = _search(**fields)

    assert bounds.configurations == len(configurations(bounds)) == count


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(None, None, id="as-recorded"),
        pytest.param(8, (8,), id="one-size"),
        pytest.param((1, 1, 8), (1, 1, 8), id="mix"),
    ],
)
def test_rows_of_a_request(rows, sizes):
    """One number, or each size as often as it is drawn."""
    assert LoadShape(rows=rows).batch_sizes == sizes


@pytest.mark.parametrize("rows", [0, (), (1, 0)])
def test_requests_without_rows_are_refused(rows):
    """Nothing would be asked."""
    with pytest.raises(ValidationError, match="rows"):
        LoadShape(rows=rows)
