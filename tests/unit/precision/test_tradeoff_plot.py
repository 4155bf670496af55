"""The trade-off curve is drawn from whatever a repair recorded."""

import pytest

from enginegate.candidate import Candidate
from enginegate.evidence import Outcome
from enginegate.precision import PrecisionTrial, Sensitivity, TradeoffCurve, tradeoff_chart


def trial(kept, **fields):
    known = {"divergence": 0.1, "size_bytes": 2048, "latency_ms": 0.5, **fields}
    passed = len(kept) > 1
    outcome = Outcome.PASSED if passed else Outcome.FAILED
    return PrecisionTrial(
        kept=kept, passed=passed, outcome=outcome, reason="", measure="kl_p99", **known
    )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="all-known"),
        pytest.param({"latency_ms": None}, id="not-run-here"),
        pytest.param({"latency_ms": None, "size_bytes": None}, id="not-built"),
        pytest.param({"divergence": None}, id="not-finite"),
        pytest.param({"divergence": 0.0}, id="equal"),
    ],
)
def test_every_record_can_be_drawn(fields):
    """SVG comes out, the same for the same record."""
    trials = (trial(()), trial(("a", "b"), **fields), trial(("a",)))
    curve = TradeoffCurve(
        candidate=Candidate.parse("onnxruntime-int8"),
        nodes=4,
        ranked=(Sensitivity(node="a", error=0.5, samples=8),),
        trials=trials,
        repaired=trials[1],
        reason="passes with 2 of 4 nodes at fp32",
    )

    assert b"<svg" in tradeoff_chart(curve)
    assert tradeoff_chart(curve) == tradeoff_chart(curve)
