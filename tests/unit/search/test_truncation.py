"""Whether a search may have missed a higher rate, told from its progress."""

from dataclasses import replace

import numpy as np
import pytest

from enginegate.evidence import Rival
from enginegate.measurement import LatencySample, Load, Measurement
from enginegate.measuring.p99 import percentiles
from enginegate.policy.benchmarking import Search, Slo
from enginegate.search.search import SearchResult
from enginegate.search.trial_history import TrialHistory
from enginegate.search.trial_runner import Champion, SearchProgress
from enginegate.search.truncation import Noting, SearchTruncation, bounded
from enginegate.serving import ServingConfig
from tests.fakes.evidence import sha

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
SLO = Slo(p99_ms=20, min_throughput_per_s=1, confidence=0.95, confirm_requests=900)
WHY = "the generator was late: send less"


def sampled(rate_per_s, latency_ms=5.0, *, invalid=()):
    """Measured for two seconds; half a percent slower than that never comes."""
    latencies_ms = np.full(int(2 * rate_per_s), latency_ms)
    made = Measurement(
        config=CONFIG,
        load=Load(rate_per_s=rate_per_s, duration_s=2, seed=0),
        invalid=invalid,
        sent=len(latencies_ms),
        completed=len(latencies_ms),
        failed=0,
        throughput_per_s=rate_per_s,
        percentiles=percentiles(latencies_ms),
        late_p99_ms=0.0,
        stages=None,
        latencies_sha256=sha("7"),
    )
    return LatencySample(made, latencies_ms)


def ending(*steps, budget_s=100.0, max_measurements=60):
    """After these steps, each ``(step, rate, reasons why it is void)``, of two seconds and one."""
    bounds = Search(
        max_batch_sizes=(8,),
        queue_delays_us=(0,),
        instances=(1,),
        min_rate_per_s=50,
        max_rate_per_s=1000,
        measurement_s=2,
        budget_s=budget_s,
        max_measurements=max_measurements,
    )
    found = SearchTruncation(bounds, SLO)
    for done, (step, rate, *invalid) in enumerate(steps, 1):
        made = sampled(rate, invalid=tuple(invalid)).measurement
        found.saw(SearchProgress(step, done, 3.0 * done, budget_s, made))
    return found


LOOKED = [("search", 100), ("search", 400), ("search", 420)]
CONFIRMED = [("confirm", 400)] * 3 + [("overload", 540)]
ANSWER = SearchResult((), CONFIG, 400.0, None, ())


@pytest.mark.parametrize(
    ("bounds", "cut"),
    [
        pytest.param({}, False, id="enough"),
        pytest.param({"budget_s": 25.0}, False, id="one-more-look-fitted"),
        pytest.param({"budget_s": 23.0}, True, id="time"),
        pytest.param({"max_measurements": 8}, False, id="one-more-measurement-fitted"),
        pytest.param({"max_measurements": 7}, True, id="count"),
    ],
)
def test_a_budget_that_left_no_room_for_another_look_cut_it_short(bounds, cut):
    """After the last look: a look, three confirmations and one past them, 3 s each, after 9 s."""
    said = ending(*LOOKED, *CONFIRMED, **bounds).cut_short(ANSWER)

    assert said == ("the budget ended the search: raise [search] budget_s" if cut else "")


@pytest.mark.parametrize(
    ("steps", "rejected", "cut"),
    [
        pytest.param([("search", 800, WHY), ("search", 800, WHY)], None, True, id="never-made"),
        pytest.param([("search", 800, WHY), ("search", 800)], None, False, id="made-when-repeated"),
        pytest.param([("search", 200, WHY)], None, False, id="below-the-answer"),
        pytest.param([("overload", 800, WHY)], None, False, id="past-the-answer"),
        pytest.param([("search", 800, WHY)], 420.0, False, id="above-what-did-not-hold"),
    ],
)
def test_a_rate_that_could_not_be_made_cut_it_short(steps, rejected, cut):
    """What was void every time may have held; the reason says what to do."""
    said = ending(*steps, *LOOKED).cut_short(replace(ANSWER, rejected_rate_per_s=rejected))

    assert said == (f"no measurement at 800/s is valid: {WHY}" if cut else "")


def test_whoever_else_listens_is_told():
    """People see the same progress."""
    heard = []
    found = ending()
    found.then = heard.append
    at = SearchProgress("search", 1, 3.0, 100.0, sampled(100).measurement)

    found.saw(at)

    assert heard == [at]


def test_the_rate_at_which_what_is_live_failed_is_kept_with_the_comparison():
    """The lowest one that is shown; void measurements show nothing."""
    answers = {
        200: sampled(200, 5.0),
        300: sampled(300, 50.0, invalid=(WHY,)),
        350: sampled(350, 50.0),
        400: sampled(400, 50.0),
    }
    measure = Noting(lambda _config, load, **_: answers[load.rate_per_s], TrialHistory(SLO))
    for rate in answers:
        measure(CONFIG, Load(rate_per_s=rate, duration_s=2, seed=0))
    rival = Rival(
        release=1,
        rate_per_s=400,
        candidate_p99_ms=(5.0,),
        champion_p99_ms=(5.0,),
        noise_ms=0.1,
        champion_throughput_per_s=200,
    )

    assert bounded(rival, Champion(measure, CONFIG, 1)).champion_rejected_per_s == 350
    assert bounded(None, None) is None
