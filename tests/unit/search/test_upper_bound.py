"""A look just past a confirmed rate, so that a comparison knows it closely enough."""

from dataclasses import replace

import pytest

from enginegate.evidence import Outcome, PointDecision
from enginegate.search.search import SearchResult
from enginegate.search.upper_bound import confirm_upper_bound
from enginegate.serving import ServingConfig

ANSWER_PER_S = 1000.0


@pytest.fixture
def slow_config():
    return ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1)


@pytest.fixture
def quick_config():
    return ServingConfig(max_batch_size=16, max_queue_delay_us=0, instances=2)


@pytest.fixture
def looked(simulated, bounds, slo):
    """What comes of a look past an answer, and at which rates was looked.

    Two instances of batches up to sixteen make 4,000 requests/s, one without batches about 235.
    """

    def look(config, *, rejected=None, outcome=None, **changes):
        found = SearchResult((), config, ANSWER_PER_S, None, (), rejected_rate_per_s=rejected)
        if outcome is not None:
            known = PointDecision(
                config=config, rate_per_s=rejected, outcome=outcome, requests=900, over=12
            )
            found = replace(found, decisions=(known,))
        within = bounds.model_copy(update=changes)
        after = confirm_upper_bound(found, simulated.measure, within, slo, arrivals="poisson")
        rates = [load.rate_per_s / ANSWER_PER_S for _, load in simulated.calls]
        assert [m.load for m in after.measurements] == [load for _, load in simulated.calls]
        return after, rates

    return look


def test_what_does_not_hold_there_is_the_rate_that_did_not(looked, slow_config):
    """Two resolutions above, which is as exact as the search is; then no more is asked."""
    after, rates = looked(slow_config)

    assert rates == [pytest.approx(1.05**2)]
    assert after.rejected_rate_per_s == pytest.approx(ANSWER_PER_S * 1.05**2)


def test_what_holds_there_leaves_it_open(looked, quick_config):
    """And one more look, which would bound it."""
    after, rates = looked(quick_config, rejected=1350.0)

    assert rates == [pytest.approx(1.05**2), pytest.approx(1.05**4)]
    assert after.rejected_rate_per_s == 1350.0


def test_a_void_look_shows_nothing(looked, simulated, slow_config):
    """What the sender could not make is no rate that did not hold."""
    simulated.void = lambda _config, _load: True

    after, _ = looked(slow_config, rejected=1350.0)

    assert after.rejected_rate_per_s == 1350.0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"rejected": 1100.0, "outcome": Outcome.FAILED}, id="one-that-close-is-refuted"
        ),
        pytest.param({"max_rate_per_s": 1050.0}, id="above-the-highest-rate"),
        pytest.param({"objective": "latency", "at_rate_per_s": 1000.0}, id="one-rate-only"),
    ],
)
def test_nothing_is_measured_where_it_would_say_nothing_more(looked, slow_config, changes):
    """The result is what it was."""
    after, rates = looked(slow_config, **changes)

    assert (rates, after.rejected_rate_per_s) == ([], changes.get("rejected"))


def test_what_was_only_not_seen_to_hold_is_looked_at(looked, slow_config):
    """An undecided rate just above the answer makes no throughput exact."""
    after, rates = looked(slow_config, rejected=1050.0, outcome=Outcome.INCONCLUSIVE)

    assert rates == [pytest.approx(1.05**2)]
    assert after.rejected_rate_per_s == 1050.0
    assert after.decisions[-1].outcome is Outcome.FAILED


def test_without_an_answer_there_is_nothing_to_look_past(simulated, bounds, slo, slow_config):
    """Nothing was confirmed."""
    found = replace(SearchResult((), slow_config, 0.0, None, ()), chosen=None)

    assert confirm_upper_bound(found, simulated.measure, bounds, slo, arrivals="poisson") is found
