"""Plots are drawn from any benchmark there can be."""

import struct
import sys

import pytest

from enginegate.ledger.plot import candidate_plot, overview_plot, plots_available
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


def test_plots_are_optional(monkeypatch):
    """Without matplotlib the ledger goes without plots; it is not imported to find out."""
    assert plots_available()
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert not plots_available()
