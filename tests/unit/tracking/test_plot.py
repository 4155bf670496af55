"""Plots are drawn from any benchmark there can be."""

import struct
import sys

import pytest

from enginegate.evidence import Point
from enginegate.tracking.plot import candidate_plot, overview_plot, plots_available
from enginegate.tracking.serving_plots import delay_load_plot, pareto_plot, stage_plot
from tests.fakes.evidence import FP32, INT8, benchmark
from tests.fakes.qualification import plan, qualification

CARD = qualification()


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(CARD.benchmark(INT8), id="chosen-and-invalid"),
        pytest.param(CARD.benchmark(plan("bf16")), id="none-chosen"),
        pytest.param(benchmark(), id="nothing-measured"),
    ],
)
def test_candidate(drawn):
    """A PNG of the same size, so that MLflow shows candidates side by side."""
    picture = candidate_plot(drawn, slo_p99_ms=25.0)

    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (880, 550)


def test_same_evidence_same_picture():
    """No date or version gets into the file."""
    pictures = {overview_plot("digits", CARD.benchmarks, slo_p99_ms=25.0) for _ in range(2)}

    assert len(pictures) == 1
    assert pictures != {overview_plot("digits", [CARD.benchmark(FP32)], slo_p99_ms=25.0)}


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(CARD.benchmark(INT8), id="chosen-and-invalid"),
        pytest.param(CARD.benchmark(plan("bf16")), id="none-chosen"),
        pytest.param(benchmark(), id="nothing-measured"),
    ],
)
def test_serving_plots(drawn):
    """Delay and load, stages and Pareto are drawn of whatever was found, in the same size."""
    card = CARD.model_copy(update={"benchmarks": (drawn,)})
    pictures = (
        delay_load_plot(drawn, slo_p99_ms=25.0),
        stage_plot("digits", [drawn]),
        pareto_plot(card, slo_p99_ms=25.0),
    )

    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert {struct.unpack(">II", picture[16:24]) for picture in pictures} == {(880, 550)}


def test_pareto_shows_cost_where_it_is_known():
    """The same points lie elsewhere once they have a price."""
    free = CARD.benchmark(INT8)
    point = Point(config=free.chosen, rate_per_s=400, p99=free.p99_at_slo, cost_per_million=0.14)
    priced = free.model_copy(update={"cost_per_million": 0.14, "pareto": (point,)})

    pictures = {
        pareto_plot(CARD.model_copy(update={"benchmarks": (found,)}), slo_p99_ms=25.0)
        for found in (free, priced)
    }

    assert len(pictures) == 2


def test_plots_are_optional(monkeypatch):
    """Without matplotlib the ledger goes without plots; it is not imported to find out."""
    assert plots_available()
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert not plots_available()
