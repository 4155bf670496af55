"""Looking again and again: the promise holds over all looks together."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginegate.evidence import Outcome
from validation.checks import GateCheck
from validation.growing import judge_growing
from validation.sequential import confidence_sequence

TRIALS = 2000
BINOMIAL = 3 * math.sqrt(0.05 * 0.95 / TRIALS)


class TestConfidenceSequence:
    @pytest.mark.parametrize("rates", [(0.03, 0.96, 0.01), (0.3, 0.4, 0.3), (0.0, 0.9, 0.1)])
    def test_holds_at_every_look(self, rates):
        """Over 2,000 samples looked at after each value, at most 5 % ever miss the mean."""
        rng = np.random.default_rng(1)
        mean = rates[2] - rates[0]

        missed = 0
        for _ in range(TRIALS):
            values = rng.choice([-1, 0, 1], p=rates, size=400)
            found = confidence_sequence(values, (-1.0, 1.0), 0.95)
            missed += bool(((found.low > mean) | (found.high < mean)).any())

        assert missed / TRIALS <= 0.05 + BINOMIAL

    def test_an_ordinary_interval_does_not(self):
        """The same looks with the normal interval miss the mean several times as often."""
        rng = np.random.default_rng(2)
        values = rng.choice([-1, 0, 1], p=[0.05, 0.9, 0.05], size=(TRIALS, 400))
        count = np.arange(1, 401)
        means = np.cumsum(values, axis=1) / count
        spread = np.sqrt(np.cumsum(values**2, axis=1) / count - means**2)

        missed = (np.abs(means) > 1.96 * spread / np.sqrt(count))[:, 50:].any(axis=1)

        assert missed.mean() > 0.15

    @given(values=st.lists(st.integers(-1, 1), min_size=1, max_size=60))
    def test_never_widens_nor_leaves_its_bounds(self, values):
        """Each look can only narrow the interval; a prefix has the interval it had."""
        found = confidence_sequence(np.array(values), (-1.0, 1.0), 0.9)

        assert (np.diff(found.low) >= 0.0).all()
        assert (np.diff(found.high) <= 0.0).all()
        assert found.low[0] >= -1.0
        assert found.high[0] <= 1.0
        half = confidence_sequence(np.array(values[: len(values) // 2 + 1]), (-1.0, 1.0), 0.9)
        assert np.array_equal(half.low, found.low[: len(half.low)])

    def test_narrows_as_samples_arrive(self):
        """Where hardly anything differs 5,000 samples settle a margin of one per cent."""
        values = np.random.default_rng(3).choice([-1, 0, 1], p=[0.002, 0.996, 0.002], size=5000)

        found = confidence_sequence(values, (-1.0, 1.0), 0.95)

        assert found.high[4999] - found.low[4999] < 0.01

    @pytest.mark.parametrize("bad", [1.5, -0.1, math.nan])
    def test_values_out_of_bounds(self, bad):
        """A value that cannot be is refused: the promise needs the bounds."""
        with pytest.raises(ValueError, match="between 0 and 1"):
            confidence_sequence(np.array([0.5, bad]), (0.0, 1.0), 0.95)


class TestJudgeGrowing:
    @pytest.mark.parametrize(
        ("lost", "samples", "expected"),
        [
            pytest.param(0.0, 3000, Outcome.PASSED, id="same-answers"),
            pytest.param(0.2, 1000, Outcome.FAILED, id="lost-a-fifth"),
            pytest.param(0.0, 100, Outcome.INCONCLUSIVE, id="just-begun"),
            pytest.param(0.0, 0, Outcome.INCONCLUSIVE, id="nothing-yet"),
        ],
    )
    def test_accuracy(self, gates, lost, samples, expected):
        """Passed, failed or not yet known, by where the sequence stands now."""
        values = -(np.random.default_rng(4).random(samples) < lost).astype(np.int8)

        finding = judge_growing(GateCheck.of("accuracy_loss", "shadow", gates), values)

        assert finding.outcome is expected
        assert bool(finding.remedy) is (expected is not Outcome.PASSED)

    def test_agreement(self, gates):
        """Without labels agreement is watched; the reason says that every look counts."""
        finding = judge_growing(
            GateCheck.of("top1_agreement", "shadow", gates), np.ones(2000, dtype=bool)
        )

        assert finding.outcome is Outcome.PASSED
        assert "interval at every look" in finding.reason

    def test_false_alarms_under_peeking(self, gates):
        """A release that truly loses exactly the margin is failed at any of 20 looks in < 5 %."""
        rng = np.random.default_rng(5)
        check = GateCheck.of("slice_accuracy_loss", "shadow", gates, part=("camera", "new"))
        alarms = 0
        for _ in range(TRIALS):
            values = -(rng.random(1000) < check.limit).astype(np.int8)
            looks = confidence_sequence(-values.astype(float), (-1.0, 1.0), 0.95).low[49::50]
            alarms += bool((looks > check.limit).any())

        assert alarms / TRIALS <= 0.025 + BINOMIAL

    def test_unbounded_numbers_are_refused(self, gates):
        """An error has no bounds, so no sequence holds it."""
        with pytest.raises(ValueError, match="no bounds"):
            judge_growing(GateCheck.of("max_abs_error", "shadow", gates), np.zeros(10))
