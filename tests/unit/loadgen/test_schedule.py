import numpy as np
import pytest

from enginegate.errors import InputError
from enginegate.loadgen.schedule import arrivals
from enginegate.measurement import Load

RECORDED = (0.0, 0.1, 0.15, 0.9, 1.0, 1.6)
KINDS = ("poisson", "constant", "bursts", "replay")


def _times(recorded=RECORDED, **changes):
    load = Load(**{"rate_per_s": 500.0, "duration_s": 20.0, "seed": 1, **changes})
    return np.array(list(arrivals(load, recorded)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_keeps_its_rate_and_its_time(kind):
    """Times ascend from 0 or later to before the end, as many as the rate asks for."""
    times_s = _times(arrivals=kind)

    assert times_s[0] >= 0
    assert times_s[-1] < 20.0
    assert (np.diff(times_s) >= 0).all()
    assert abs(len(times_s) / 10_000 - 1) < 0.04


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_a_schedule_and_another_moves_it(kind):
    """The same seed gives the same times, other seeds others."""
    first = _times(arrivals=kind).tolist()

    assert first == _times(arrivals=kind).tolist()
    assert any(first != _times(arrivals=kind, seed=seed).tolist() for seed in range(2, 6))


def test_constant_arrivals_have_equal_gaps():
    """Every gap is one over the rate."""
    assert np.allclose(np.diff(_times(arrivals="constant")), 1 / 500)


def test_bursts_come_in_the_first_tenth_of_each_second():
    """Nothing is due in the rest of a second, and within a burst gaps are exponential."""
    times_s = _times(arrivals="bursts")

    assert (times_s % 1.0 < 0.1).all()
    assert set(times_s.astype(int)) == set(range(20))
    gaps_s = np.diff(times_s)[np.diff(times_s.astype(int)) == 0]
    assert gaps_s.mean() == pytest.approx(1 / 5000, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.05)


def test_a_replay_repeats_the_recorded_gaps_at_the_rate_asked_for():
    """Gaps keep their proportions; a turn ends with one mean gap, the seam, and takes N / rate."""
    times_s = _times(arrivals="replay", rate_per_s=3.0, duration_s=100.0)

    mean_s = 1.6 / 5
    turn = [*np.diff(RECORDED), mean_s]
    gaps_s = np.diff(times_s) * 3.0 * mean_s
    starts = [
        start for start in range(6) if np.allclose(np.roll(turn, -start), gaps_s[:6], atol=1e-9)
    ]
    assert len(starts) == 1
    assert np.allclose(gaps_s[6:], gaps_s[:-6])
    assert times_s[6] == pytest.approx(6 / 3.0)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        pytest.param(None, "this traffic has 0", id="none"),
        pytest.param((0.0,), "this traffic has 1", id="one"),
        pytest.param((0.0, 0.0), "not all the same", id="no-time-passes"),
        pytest.param((0.0, 2.0, 1.0), "ascending", id="unordered"),
        pytest.param((0.0, float("nan"), 1.0), "finite", id="nan"),
    ],
)
def test_a_replay_without_a_usable_recording(recorded, message):
    """What cannot be replayed is refused at once, saying what to record or choose."""
    with pytest.raises(InputError, match=message):
        arrivals(Load(rate_per_s=1.0, duration_s=1.0, seed=0, arrivals="replay"), recorded)
