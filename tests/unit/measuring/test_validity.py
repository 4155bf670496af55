import numpy as np
import pytest

from enginegate.measuring.validity import allowed_lateness_ms, slow_until_s

COUNT, LASTED_S = 2000, 10.0
DUE_S = np.arange(COUNT) * LASTED_S / COUNT


def _steady(seed=0):
    return 0.010 * np.random.default_rng(seed).lognormal(0.0, 0.2, COUNT)


def _found(latency_s):
    return slow_until_s(DUE_S, latency_s)


@pytest.mark.parametrize("seed", range(20))
def test_steady_run_has_no_slow_start(seed):
    """Without a slow start nothing is found, but for a window by chance."""
    assert _found(_steady(seed)) <= LASTED_S / 20


@pytest.mark.parametrize("until_s", [1.0, 2.5, 4.0])
def test_slow_start_is_found(until_s):
    """A start at twice the latency is found whole, and at most a window of the rest."""
    latency_s = np.where(until_s > DUE_S, 2.0, 1.0) * _steady()

    assert until_s <= _found(latency_s) <= until_s + LASTED_S / 20


def test_start_that_gets_faster_slowly_is_found():
    """A decay to the usual latency is found until it is close to it."""
    latency_s = _steady() * (1.0 + 3.0 * np.exp(-DUE_S / 1.0))

    assert 2.0 < _found(latency_s) < 5.0


def test_at_most_half_is_found():
    """A run that takes more than half to settle has no rest to compare the middle with."""
    latency_s = np.where(DUE_S < 6.0, 10.0, 1.0) * _steady()

    assert _found(latency_s) == 5.0


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(np.where((DUE_S > 4.0) & (DUE_S < 4.5), 50.0, 1.0), id="stall"),
        pytest.param(np.where((DUE_S > 1.0) & (DUE_S < 1.2), 50.0, 1.0), id="early-stall"),
        pytest.param(np.where(DUE_S > 9.5, 50.0, 1.0), id="late-stall"),
        pytest.param(1.0 + DUE_S, id="overload"),
        pytest.param(np.where(DUE_S > 3.0, np.inf, 1.0), id="failing"),
        pytest.param(np.where(DUE_S < 3.0, np.inf, 1.0), id="failing-first"),
        pytest.param(np.where(np.arange(COUNT) % 50 == 0, np.inf, 1.0), id="some-fail"),
        pytest.param(
            np.where(DUE_S < 3.0, np.where(np.arange(COUNT) % 50 == 0, np.inf, 9.0), 1.0),
            id="some-fail-in-a-slow-start",
        ),
    ],
)
def test_stalls_queues_and_failures_are_no_warm_up(shape):
    """Stalls, a growing queue and failures are the server's."""
    assert _found(_steady() * shape) <= LASTED_S / 20


@pytest.mark.parametrize("count", [0, 1, 79])
def test_few_requests_show_no_slow_start(count):
    """With too few requests for medians nothing is found."""
    assert slow_until_s(DUE_S[:count], np.linspace(1.0, 0.1, count)) == 0.0


@pytest.mark.parametrize(
    ("slo_ms", "expected"), [(0.01, 5.0), (2.0, 5.0), (20.0, 5.0), (100.0, 25.0)]
)
def test_late_limit(slo_ms, expected):
    """A quarter of the SLO, and at least what timers of a busy machine do."""
    assert allowed_lateness_ms(slo_ms) == expected
