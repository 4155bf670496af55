from collections import Counter
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.errors import InputError
from enginegate.loadgen import schedule
from enginegate.loadgen.grpc_message import parse_request
from enginegate.loadgen.schedule import PATTERNS, LoadPattern, batches, due_times, load_pattern
from enginegate.loadgen.traffic import Traffic
from enginegate.measurement import ArrivalPattern, Load
from enginegate.policy.benchmarking import LoadShape
from tests.fakes.load_patterns import RampParameters, ramp_schedule

RECORDED = (0.0, 0.1, 0.15, 0.9, 1.0, 1.6)
PATTERN_NAMES = ("poisson", "constant", "bursts", "replay")


def _times(recorded=RECORDED, **changes):
    load = Load(**{"rate_per_s": 500.0, "duration_s": 20.0, "seed": 1, **changes})
    return np.array(list(due_times(load, recorded)))


@pytest.mark.parametrize("name", PATTERN_NAMES)
def test_every_schedule_keeps_its_rate_and_its_time(name):
    """Times ascend from 0 or later to before the end, as many as the rate asks for."""
    times_s = _times(arrivals=name)

    assert times_s[0] >= 0
    assert times_s[-1] < 20.0
    assert (np.diff(times_s) >= 0).all()
    assert abs(len(times_s) / 10_000 - 1) < 0.04


@pytest.mark.parametrize("name", PATTERN_NAMES)
def test_seed_decides_the_schedule(name):
    """The same seed gives the same times, other seeds others."""
    first = _times(arrivals=name).tolist()

    assert first == _times(arrivals=name).tolist()
    assert any(first != _times(arrivals=name, seed=seed).tolist() for seed in range(2, 6))


def test_poisson_gaps_are_exponential():
    """Their mean is one over the rate, and their spread is their mean."""
    gaps_s = np.diff(_times(arrivals="poisson"))

    assert gaps_s.mean() == pytest.approx(1 / 500, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.0, abs=0.05)


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


def test_replay_repeats_the_recorded_gaps_at_the_loads_rate():
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
def test_replay_without_usable_recording_is_refused(recorded, message):
    """The error says at once what to record or choose."""
    with pytest.raises(InputError, match=message):
        due_times(Load(rate_per_s=1.0, duration_s=1.0, seed=0, arrivals="replay"), recorded)


@pytest.fixture
def ramp(monkeypatch):
    """A load pattern that a package outside this one adds, as one entry."""
    monkeypatch.setitem(PATTERNS, "ramp", LoadPattern(ramp_schedule, RampParameters))


def _ramp(**parameters):
    return ArrivalPattern(name="ramp", **parameters)


@pytest.mark.usefixtures("ramp")
def test_added_pattern_is_used_with_its_own_parameters():
    """A load follows it; the policy's parameters reach its schedule, defaults fill in the rest."""
    flat = _times(arrivals=_ramp(start_share=1.0), duration_s=2.0)
    rising = _times(arrivals=_ramp(start_share=0.2), duration_s=2.0)

    assert np.allclose(np.diff(flat), 1 / 500)
    assert np.diff(rising)[0] > np.diff(rising)[-1]
    assert _times(arrivals="ramp").tolist() == _times(arrivals=_ramp(start_share=0.5)).tolist()


@pytest.mark.usefixtures("ramp")
def test_added_pattern_may_be_named_in_a_policy():
    """The table [load] takes the name, or the name with the pattern's own fields."""
    plain = LoadShape(arrivals="ramp")
    full = LoadShape.model_validate({"arrivals": {"name": "ramp", "start_share": 0.2}})

    assert load_pattern(plain.arrivals) is load_pattern(full.arrivals) is PATTERNS["ramp"]
    load = Load(rate_per_s=3, duration_s=1, seed=0, arrivals=full.arrivals)
    assert Load.model_validate_json(load.canonical_json()) == load
    assert str(load) == "3/s ramp (start_share 0.2)"


def test_pattern_is_found_by_its_entry_point(monkeypatch):
    """An installed package adds a pattern without any change here."""
    entry = EntryPoint("ramp", "tests.fakes.load_patterns:RAMP", "enginegate.load_patterns")
    monkeypatch.setattr(schedule, "PATTERNS", dict(PATTERNS))
    monkeypatch.setattr(schedule, "entry_points", lambda **_: [entry])

    assert load_pattern("ramp").schedule is ramp_schedule


@pytest.mark.usefixtures("ramp")
@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        pytest.param("posson", "no load pattern 'posson'.*poisson, constant", id="name"),
        pytest.param(_ramp(start_share=-1.0), "(?s)'ramp'.*start_share: must be", id="value"),
        pytest.param(_ramp(start=1.0), "(?s)start: there is no such key", id="key"),
        pytest.param(
            ArrivalPattern(name="poisson", rate=1), "(?s)'poisson'.*rate: there is no", id="none"
        ),
    ],
)
def test_unknown_pattern_or_parameter_is_refused(arrivals, message):
    """The error names the pattern, the key, and the patterns that are installed."""
    with pytest.raises(InputError, match=message):
        load_pattern(arrivals)


def _data(count):
    x = np.arange(count, dtype=np.float32).reshape(count, 1)
    return DataSet("here", {"x": x}, None, np.arange(count).astype(np.str_), {})


def _rows(request):
    message = parse_request(request)
    return np.frombuffer(message.raw_input_contents[0], np.float32).astype(int).tolist()


def test_mixed_batch_sizes_use_every_sample_in_the_given_proportion():
    """Each round holds every size as often as it is named; all samples travel, under a first id."""
    traffic = Traffic.from_data("m", _data(20), batch_sizes=(1, 1, 1, 8), order_seed=3)

    sent = [_rows(request) for request in traffic.requests]
    assert Counter(map(len, sent)) == {1: 6, 8: 2}
    assert {row for rows in sent for row in rows} == set(range(20))
    assert [parse_request(r).id for r in traffic.requests] == [str(rows[0]) for rows in sent]


def test_request_may_hold_more_samples_than_there_are():
    """Samples repeat then, rather than the request being smaller than asked for."""
    assert sorted(next(iter(batches(3, (6,), seed=0)))) == [0, 0, 1, 1, 2, 2]


def test_single_samples_keep_their_order():
    """Without a mix, request i is sample i."""
    assert list(batches(4, (1, 1), seed=9)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("sizes", [(), (0,), (4, -1)])
def test_unusable_batch_sizes_are_refused(sizes):
    """A size below 1, or no size, is refused."""
    with pytest.raises(InputError, match="cannot be sent"):
        list(batches(4, sizes, seed=0))
