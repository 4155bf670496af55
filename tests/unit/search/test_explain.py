"""Why a configuration was chosen, and what nothing beats."""

import pytest

from tests.fakes.searches import search_on


def test_reasons_for_every_chosen_value(simulated, bounds, slo):
    """Each field says what its other values did: measured where they were, else expected."""
    result = search_on(simulated, bounds, slo)

    assert set(result.reasons) == {
        "max_batch_size",
        "max_queue_delay_us",
        "instances",
        "preferred_batch_sizes",
        "gpus",
    }
    assert result.reasons["max_batch_size"].startswith("16 was confirmed at ")
    assert "1 not measured: at most" in result.reasons["max_batch_size"]
    assert result.reasons["gpus"] == "none is the only value in the search space"


def test_pareto_points(simulated, bounds, slo):
    """The Pareto points rise in rate and p99 together, the confirmed one among them, with cost."""
    result = search_on(simulated, bounds, slo, price_per_hour=3.6)

    rates = [point.rate_per_s for point in result.pareto]
    tails = [point.p99.value_ms for point in result.pareto]
    confirmed = [point for point in result.pareto if point.confirmed]
    assert len(rates) > 1
    assert rates == sorted(rates, reverse=True)
    assert tails == sorted(tails, reverse=True)
    assert [(point.config, point.rate_per_s) for point in confirmed] == [
        (result.chosen, result.throughput_at_slo_per_s)
    ]
    assert confirmed[0].cost_per_million == pytest.approx(1000.0 / confirmed[0].rate_per_s)
