"""Intervals and tests: known answers, properties, and the error rates they promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaln, ndtr
from scipy.stats import binom

from validation.statistics import (
    Pairs,
    Share,
    holm,
    loss_interval,
    loss_p_value,
    quantile_interval,
    samples_to_decide_loss,
    samples_to_decide_share,
    share_interval,
    share_p_value,
    tango_z,
)

Z95 = 1.959963984540054
TRIALS = 4000


@st.composite
def _pairs(draw):
    samples = draw(st.integers(1, 5000))
    lost = draw(st.integers(0, samples))
    return Pairs(lost, draw(st.integers(0, samples - lost)), samples)


class TestLossInterval:
    @pytest.mark.parametrize(
        ("pairs", "value", "low", "high"),
        [
            pytest.param(Pairs(6, 16, 161), -0.0621, -0.1240, -0.0054, id="cavo-2012"),
            pytest.param(Pairs(1, 7, 21), -0.2857, -0.5172, -0.0260, id="bentur-2009"),
        ],
    )
    def test_published_examples(self, pairs, value, low, high):
        """Agrees with R's contingencytables on the examples of Fagerland, Lydersen and Laake."""
        found = loss_interval(pairs, 0.95)

        assert (found.value, found.low, found.high) == pytest.approx((value, low, high), abs=5e-5)

    @given(pairs=_pairs())
    def test_ends_solve_the_score_test(self, pairs):
        """An end inside (-1, 1) is where the score statistic reaches the critical value."""
        found = loss_interval(pairs, 0.95)

        assert -1.0 <= found.low <= found.value <= found.high <= 1.0
        for end, critical in ((found.low, Z95), (found.high, -Z95)):
            if abs(end) < 0.999:
                z = tango_z(pairs.lost, pairs.gained, pairs.samples, end)
                assert float(z) == pytest.approx(critical, abs=1e-4)

    @given(pairs=_pairs())
    def test_mirrored(self, pairs):
        """What one model loses the other gains."""
        found = loss_interval(pairs, 0.95)
        mirrored = loss_interval(Pairs(pairs.gained, pairs.lost, pairs.samples), 0.95)

        assert (found.low, found.high) == pytest.approx((-mirrored.high, -mirrored.low), abs=1e-9)

    @pytest.mark.parametrize("samples", [1, 35, 900, 1_000_000])
    def test_no_discordant_pairs(self, samples):
        """Perfect agreement still leaves room for a loss: z^2 / (n + z^2), as for one share."""
        found = loss_interval(Pairs(0, 0, samples), 0.95)

        assert found.high == pytest.approx(Z95**2 / (samples + Z95**2), rel=1e-6)
        assert found.low == -found.high

    def test_no_samples(self):
        """Without samples nothing is estimated."""
        found = loss_interval(Pairs(0, 0, 0), 0.95)

        assert math.isnan(found.value)
        assert found.samples == 0
        assert loss_p_value(Pairs(0, 0, 0), 0.1) == 1.0

    @pytest.mark.parametrize(
        ("samples", "margin"), [(35, 0.1), (90, 0.1), (300, 0.05), (900, 0.02)]
    )
    @pytest.mark.parametrize("gained", [0.0, 0.002, 0.01, 0.05])
    def test_false_pass_rate(self, samples, margin, gained):
        """A candidate that truly loses the margin passes at most 2.5 % of the time (exact)."""
        probability, lost, also_gained = _trinomial(samples, margin + gained, gained)

        passes = tango_z(lost, also_gained, samples, margin) <= -Z95

        assert probability[passes].sum() <= 0.0255

    @pytest.mark.parametrize(("samples", "margin"), [(90, 0.1), (300, 0.05), (900, 0.02)])
    @pytest.mark.parametrize("gained", [0.0, 0.002, 0.01, 0.05])
    def test_false_fail_rate(self, samples, margin, gained):
        """A candidate that loses exactly the margin fails at most 3.5 % of the time (exact)."""
        probability, lost, also_gained = _trinomial(samples, margin + gained, gained)

        fails = tango_z(lost, also_gained, samples, margin) >= Z95

        assert probability[fails].sum() <= 0.035

    @pytest.mark.parametrize(("samples", "margin"), [(60, 0.08), (90, 0.1), (400, 0.02)])
    @pytest.mark.parametrize("gained", [0.0, 0.01, 0.05])
    def test_p_values_hold_far_in_the_tail(self, samples, margin, gained):
        """Where Holm's method looks among ten slices, a p value of 0.25 % comes that rarely."""
        probability, lost, also_gained = _trinomial(samples, margin + gained, gained)
        likely = np.flatnonzero(probability > 1e-9)

        small = [
            loss_p_value(Pairs(int(lost[i]), int(also_gained[i]), samples), margin) <= 0.0025
            for i in likely
        ]

        assert probability[likely][small].sum() <= 0.0025 * 1.25

    def test_p_value_where_the_normal_takes_over(self):
        """The exact value and the normal one are close where the one replaces the other."""
        pairs = Pairs(2030, 0, 19_000)

        exact, normal = loss_p_value(pairs, 0.1), ndtr(-tango_z(2030, 0, 19_000, 0.1))

        assert exact == pytest.approx(float(normal), rel=0.25)
        assert 1e-4 < exact < 2e-3

    @pytest.mark.parametrize("rates", [(0.01, 0.01), (0.03, 0.01), (0.002, 0.006)])
    def test_coverage(self, rates):
        """The 95 % interval holds the true loss in 95 % of simulated samples, within its error."""
        rng = np.random.default_rng(1)
        counts = rng.multinomial(1200, [*rates, 1 - sum(rates)], size=TRIALS)

        z = tango_z(counts[:, 0], counts[:, 1], 1200, rates[0] - rates[1])

        assert abs((np.abs(z) <= Z95).mean() - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / TRIALS) + 0.005


class TestShareInterval:
    def test_wilson(self):
        """Wilson's interval, on the worked example of Newcombe (1998a): 81 of 263."""
        found = share_interval(Share(81, 263), 0.95)

        assert (found.low, found.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)

    def test_all_have_it(self):
        """A perfect share is not certain to be perfect."""
        found = share_interval(Share(100, 100), 0.95)

        assert found.value == found.high == 1.0
        assert found.low == pytest.approx(100 / (100 + Z95**2))

    def test_no_samples(self):
        """Without samples nothing is estimated."""
        assert math.isnan(share_interval(Share(0, 0), 0.95).low)
        assert share_p_value(Share(0, 0), 0.9) == 1.0

    def test_coverage(self):
        """The 95 % interval holds the true share about as often, for shares near one too."""
        counts = np.arange(1001)
        ends = [share_interval(Share(int(k), 1000), 0.95) for k in range(960, 1001)]
        covered = np.zeros(1001, dtype=bool)
        covered[960:] = [e.low <= 0.985 <= e.high for e in ends]

        assert binom.pmf(counts, 1000, 0.985)[covered].sum() == pytest.approx(0.95, abs=0.01)


class TestQuantileInterval:
    def test_upper_end_needs_368_samples(self):
        """The upper end of a 99th percentile at 95 % exists from 368 samples on."""
        values = np.linspace(0.0, 1.0, 368)

        assert quantile_interval(values[:367], 0.99, 0.95).high == math.inf
        assert quantile_interval(values, 0.99, 0.95).high == 1.0

    def test_infinite_values(self):
        """Infinite values are the largest there are, and do not spoil the rest."""
        values = np.concatenate([np.zeros(994), np.full(6, np.inf)])

        found = quantile_interval(values, 0.99, 0.95)

        assert (found.value, found.low, found.high) == (0.0, 0.0, math.inf)

    def test_no_samples(self):
        """Without samples nothing is estimated."""
        assert quantile_interval(np.array([]), 0.99, 0.95).samples == 0

    def test_coverage(self):
        """At least 95 % of intervals hold the true percentile of an exponential."""
        rng = np.random.default_rng(2)
        truth = -math.log(0.01)
        found = [quantile_interval(rng.exponential(size=600), 0.99, 0.95) for _ in range(2000)]

        covered = np.mean([e.low <= truth <= e.high for e in found])

        assert covered >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 2000)


class TestHolm:
    def test_worked_example(self):
        """The example of Wikipedia's article on the method, with its adjusted values."""
        assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])

    def test_empty(self):
        """No hypotheses need no adjustment."""
        assert holm([]).shape == (0,)

    @given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50))
    def test_between_single_and_bonferroni(self, p_values):
        """Adjusted values are never smaller than given ones nor larger than Bonferroni's."""
        adjusted, given_values = holm(p_values), np.array(p_values)

        assert (adjusted >= given_values).all()
        assert (adjusted <= np.minimum(given_values * len(p_values), 1.0) + 1e-12).all()
        assert (np.diff(adjusted[np.argsort(given_values)]) >= 0.0).all()

    def test_family_wise_error(self):
        """With 40 true hypotheses some is rejected in at most 5 % of trials, not in 87 %."""
        p_values = np.random.default_rng(3).uniform(size=(TRIALS, 40))

        rejected = np.array([(holm(row) <= 0.05).any() for row in p_values])

        assert rejected.mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)


class TestSamplesToDecide:
    def test_no_discordant_pairs(self):
        """The smallest sample that can pass a 10 % margin has 35 pairs, all concordant."""
        needed = samples_to_decide_loss(Pairs(0, 0, 20), 0.1, 0.95)

        assert needed == 35
        assert loss_interval(Pairs(0, 0, 35), 0.95).high <= 0.1
        assert loss_interval(Pairs(0, 0, 34), 0.95).high > 0.1

    @pytest.mark.parametrize(
        ("pairs", "margin"), [(Pairs(3, 2, 250), 0.02), (Pairs(12, 0, 100), 0.08)]
    )
    def test_decides_four_times_in_five(self, pairs, margin):
        """A sample of that size decides in about 80 % of trials, whichever way."""
        needed = samples_to_decide_loss(pairs, margin, 0.95)
        rates = [pairs.lost / pairs.samples, pairs.gained / pairs.samples]
        counts = np.random.default_rng(4).multinomial(needed, [*rates, 1 - sum(rates)], TRIALS)

        z = tango_z(counts[:, 0], counts[:, 1], needed, margin)

        assert (np.abs(z) >= Z95).mean() == pytest.approx(0.8, abs=0.06)

    @pytest.mark.parametrize("pairs", [Pairs(0, 0, 0), Pairs(2, 0, 100)])
    def test_none_would(self, pairs):
        """Nothing seen, or a loss equal to the margin, is decided by no number of samples."""
        assert samples_to_decide_loss(pairs, 0.02, 0.95) is None

    def test_share(self):
        """A perfect share needs z^2 L / (1 - L) samples to be above a limit L."""
        assert samples_to_decide_share(Share(50, 50), 0.99, 0.95) == math.ceil(Z95**2 * 99)
        assert samples_to_decide_share(Share(99, 100), 0.99, 0.95) is None
        assert samples_to_decide_share(Share(0, 0), 0.99, 0.95) is None


def _trinomial(samples, lost_rate, gained_rate):
    """Every likely outcome of ``samples`` pairs, with its exact probability."""
    most_lost = int(binom.isf(1e-9, samples, lost_rate))
    most_gained = int(binom.isf(1e-9, samples, gained_rate)) if gained_rate else 0
    lost, gained = np.meshgrid(np.arange(most_lost + 1), np.arange(most_gained + 1))
    possible = lost + gained <= samples
    lost, gained = lost[possible], gained[possible]
    same = samples - lost - gained
    log_p = gammaln(samples + 1) - gammaln(lost + 1) - gammaln(gained + 1) - gammaln(same + 1)
    log_p += lost * math.log(lost_rate) + same * math.log(1.0 - lost_rate - gained_rate)
    log_p += gained * math.log(gained_rate) if gained_rate else 0.0
    return np.exp(log_p), lost, gained
