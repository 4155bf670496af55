"""A node that leaves the range of its type is a failed finding, with its number."""

import pytest

from enginegate.evidence import Outcome
from enginegate.precision import RangeReport, judge_range
from enginegate.precision.overflow_emulation import Peak

SOUND = {"samples": 8, "finite_max": 65504.0, "peak": 9.5, "overflowing": (), "nonfinite": 0}


@pytest.mark.parametrize(
    ("changed", "outcome", "said"),
    [
        pytest.param({}, Outcome.PASSED, "largest value 9.5 <= 65504; 8 samples", id="within"),
        pytest.param({"samples": 0}, Outcome.INCONCLUSIVE, "nothing was run", id="none"),
        pytest.param(
            {"overflowing": (Peak(node="square", magnitude=1.1e6), Peak(node="mean"))},
            Outcome.FAILED,
            "2 nodes overflow on 8 samples: square reaches 1.1e+06 > 65504; then mean",
            id="overflow",
        ),
        pytest.param(
            {"overflowing": (Peak(node="exp"),), "peak": None},
            Outcome.FAILED,
            "exp reaches Inf",
            id="infinite",
        ),
        pytest.param({"nonfinite": 3}, Outcome.FAILED, "3 of 8 samples give NaN", id="nan"),
        pytest.param({"finite_max": None}, Outcome.PASSED, "values saturate", id="saturates"),
    ],
)
def test_judgement(changed, outcome, said):
    """The reason names the first node, what it reached and the limit."""
    finding = judge_range(RangeReport(**{**SOUND, **changed}), "evaluation")

    assert finding.outcome is outcome
    assert said in finding.reason
    assert bool(finding.remedy) == (outcome is not Outcome.PASSED)
    assert not finding.advisory


def test_rounding_to_the_largest_value_is_no_overflow():
    """65,512 becomes 65,504 in fp16; a finding that passed with more would contradict itself."""
    finding = judge_range(RangeReport(**{**SOUND, "peak": 65512.0}), "emulated")

    assert (finding.outcome, finding.value, finding.limit) == (Outcome.PASSED, 65504.0, 65504.0)
