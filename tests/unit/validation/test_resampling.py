"""Bootstrap intervals: SciPy's, the error rates they promise, and what has no spread."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import f1_score

from validation.resampling import Resampled, bootstrap, resampled_f1, resampled_numbers
from validation.score import BITS, NONE
from validation.statistics import Estimate

TRIALS = 2000
FEWER = 300  # replicates, where thousands of intervals are made
WITHIN = 3 * math.sqrt(0.05 * 0.95 / TRIALS)


def _numbers(rng, samples, shift=0.0):
    before = rng.exponential(size=samples)
    paired = np.empty(samples, dtype=np.complex128)
    paired.real, paired.imag = before, before + rng.normal(shift, 0.1, size=samples)
    return paired


def _codes(labels, reference, candidate):
    return (labels << 2 * BITS) | (reference << BITS) | candidate


def _classes(rng, samples, *, right=0.9, changed=0.05, classes=4):
    labels = rng.integers(0, classes, samples)
    other = rng.integers(0, classes, samples)
    reference = np.where(rng.random(samples) < right, labels, other)
    flipped = rng.integers(0, classes, samples)
    return labels, reference, np.where(rng.random(samples) < changed, flipped, reference)


class TestNumbers:
    def test_equals_scipy(self):
        """The paired BCa interval of a difference of RMSEs is SciPy's, up to its replicates."""
        found = resampled_numbers(_numbers(np.random.default_rng(0), 300, 0.02), "rmse", 0.95)
        paired = _numbers(np.random.default_rng(0), 300, 0.02)

        scipys = stats.bootstrap(
            (paired.real, paired.imag),
            lambda x, y, axis: np.sqrt(y.mean(axis)) - np.sqrt(x.mean(axis)),
            paired=True,
            rng=np.random.default_rng(1),
        )

        low, high = scipys.confidence_interval
        assert (found.estimate.low, found.estimate.high) == pytest.approx((low, high), abs=6e-4)
        assert found.spread == pytest.approx(scipys.standard_error, rel=0.06)

    @pytest.mark.parametrize("kind", ["mae", "mean"])
    def test_pooling_changes_little(self, kind):
        """A hundred thousand samples in groups give the interval that theory gives."""
        paired = _numbers(np.random.default_rng(2), 100_000, 0.01)

        found = resampled_numbers(paired, kind, 0.95).estimate

        theory = 2 * 1.96 * (paired.imag - paired.real).std() / math.sqrt(100_000)
        assert found.high - found.low == pytest.approx(theory, rel=0.07)

    def test_coverage(self, monkeypatch):
        """Of 2,000 intervals of 200 skewed pairs about 95 % hold the true difference."""
        monkeypatch.setattr("validation.resampling.REPLICATES", FEWER)
        rng = np.random.default_rng(3)
        found = [resampled_numbers(_numbers(rng, 60, 0.05), "mae", 0.95) for _ in range(TRIALS)]

        covered = np.mean([f.estimate.low <= 0.05 <= f.estimate.high for f in found])

        assert covered == pytest.approx(0.95, abs=WITHIN + 0.015)

    def test_direction(self):
        """A loss is worse than nothing: more error, or a lower score."""
        worse = np.array([1.0 + 2.0j] * 5 + [1.0 + 2.5j] * 5)

        assert resampled_numbers(worse, "mae", 0.95).estimate.value == pytest.approx(1.25)
        assert resampled_numbers(worse, "mean", 0.95).estimate.value == pytest.approx(-1.25)

    def test_signal_to_noise(self):
        """Noise of a hundredth of the signal's power is 20 dB; none at all is infinite."""
        power = np.full(50, 100.0 + 1.0j)

        assert resampled_numbers(power, "sqnr", 0.95).estimate.value == pytest.approx(20.0)
        assert resampled_numbers(power.real + 0j, "sqnr", 0.95).estimate.low == math.inf

    def test_infinite_scores(self):
        """One infinite error makes the loss infinite for certain, not NaN."""
        paired = np.array([1.0 + 1.0j, complex(1.0, math.inf)])

        assert resampled_numbers(paired, "mae", 0.95).estimate.low == math.inf

    def test_zero_and_one_sample(self):
        """No samples say nothing, and one has no spread."""
        one = resampled_numbers(np.array([1.0 + 2.0j]), "mae", 0.95)

        assert resampled_numbers(np.zeros(0, complex), "mae", 0.95).estimate.samples == 0
        assert (one.estimate.low, one.estimate.high) == (-math.inf, math.inf)
        assert one.p_value(0.1) == 1.0


class TestF1:
    @pytest.mark.parametrize("samples", [300, 6000])
    def test_equals_scikit_learn(self, samples):
        """The loss is the difference of scikit-learn's macro F1, alone or in groups."""
        labels, reference, candidate = _classes(np.random.default_rng(4), samples)

        found = resampled_f1(_codes(labels, reference, candidate), 0.95).estimate

        expected = f1_score(labels, reference, average="macro")
        expected -= f1_score(labels, candidate, average="macro")
        assert found.value == pytest.approx(expected, abs=1e-12)
        assert found.low < found.value < found.high

    def test_coverage(self, monkeypatch):
        """About 95 % of 2,000 intervals hold the loss of a large population."""
        monkeypatch.setattr("validation.resampling.REPLICATES", FEWER)
        rng = np.random.default_rng(5)
        truth = resampled_f1(_codes(*_classes(rng, 2_000_000)), 0.95).estimate.value
        found = [resampled_f1(_codes(*_classes(rng, 150)), 0.95).estimate for _ in range(TRIALS)]

        covered = np.mean([each.low <= truth <= each.high for each in found])

        assert 0.95 - WITHIN - 0.015 <= covered <= 0.99

    def test_same_answers_are_not_certain(self):
        """Without a difference the interval is still as wide as that of accuracy."""
        labels, reference, _ = _classes(np.random.default_rng(6), 200)

        found = resampled_f1(_codes(labels, reference, reference), 0.95).estimate

        assert found.value == 0.0
        assert found.high == pytest.approx(1.96**2 / (200 + 1.96**2), rel=0.01)

    def test_no_class(self):
        """A sample without a class counts as wrong, and its class as one that does not exist."""
        labels = np.array([0, 0, 1, 1] * 10)
        candidate = labels.copy()
        candidate[0] = NONE

        found = resampled_f1(_codes(labels, labels, candidate), 0.95).estimate

        assert 0.0 < found.value < 0.05


@pytest.mark.parametrize(
    ("value", "spread", "margin", "expected"),
    [(0.0, 0.01, 0.0, 0.5), (0.03, 0.01, 0.01, 0.0228), (0.5, 0.0, 0.1, 0.0), (0.1, 0.0, 0.5, 1.0)],
)
def test_p_value(value, spread, margin, expected):
    """The normal tail beyond the margin; without spread it is certain."""
    found = Resampled(Estimate(value, 0.0, 1.0, 100), spread).p_value(margin)

    assert found == pytest.approx(expected, abs=1e-4)


def test_samples_to_decide():
    """Half the distance to the margin takes four times the samples."""
    seen = Resampled(Estimate(0.0, -0.1, 0.1, 100), 0.05)

    far, near = seen.samples_to_decide(0.2, 0.95), seen.samples_to_decide(0.1, 0.95)

    assert near == pytest.approx(4 * far, abs=4)
    assert seen.samples_to_decide(0.0, 0.95) is None


def test_the_same_samples_give_the_same_interval():
    """Seeds are fixed, so a verdict can be reproduced."""
    units = np.random.default_rng(7).random((50, 3)) + 1.0

    first, second = (bootstrap(units, lambda s: s[:, 1] / s[:, 0], 0.95) for _ in range(2))

    assert first == second
