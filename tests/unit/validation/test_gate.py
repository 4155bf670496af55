"""Judging: numbers and limits in, findings out."""

import math

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.evidence import Outcome, worst
from validation.agreement import compare
from validation.checks import GateCheck
from validation.gate import (
    Tail,
    errored,
    judge_counts,
    judge_family,
    judge_number,
    judge_slice_sizes,
    notes_on,
    unlabelled,
)
from validation.outputs import CLASSIFY
from validation.statistics import Pairs, Share

TRIALS = 2000
PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED


class TestJudgeNumber:
    @pytest.mark.parametrize(
        ("gate", "value", "samples", "expected"),
        [
            pytest.param("samples", 400, 400, PASSED, id="enough"),
            pytest.param("samples", 399, 399, INCONCLUSIVE, id="too-few"),
            pytest.param("nonfinite", 0, 400, PASSED, id="finite"),
            pytest.param("nonfinite", 1, 10_000, FAILED, id="one-nan-in-ten-thousand"),
            pytest.param("max_abs_error", 1.0, 400, PASSED, id="at-limit"),
            pytest.param("max_abs_error", 1.0001, 400, FAILED, id="above-limit"),
            pytest.param("max_abs_error", math.inf, 400, FAILED, id="infinite"),
            pytest.param("max_abs_error", math.nan, 400, FAILED, id="nan"),
            pytest.param("max_abs_error", math.nan, 0, INCONCLUSIVE, id="error-of-nothing"),
            pytest.param("nonfinite", 0, 0, INCONCLUSIVE, id="nothing-is-not-finite"),
            pytest.param("samples", 0, 0, INCONCLUSIVE, id="no-samples"),
        ],
    )
    def test_outcome(self, gates, gate, value, samples, expected):
        """The gate closes beyond the limit, on NaN, and abstains when there is nothing."""
        finding = judge_number(GateCheck.of(gate, "evaluation", gates), value, samples)

        assert finding.outcome is expected
        assert bool(finding.remedy) is (expected is not PASSED)

    def test_finding_is_filled(self, gates):
        """A finding carries number, relation, limit, unit and count, and says them in words."""
        finding = judge_number(GateCheck.of("max_abs_error", "shadow", gates), 2.5, 500)

        assert (finding.gate, finding.scope) == ("max_abs_error", "shadow")
        assert (finding.value, finding.limit, finding.relation) == (2.5, 1.0, "<=")
        assert finding.samples == 500
        assert finding.reason == "largest absolute error 2.5 > 1; 500 samples"


class TestJudge:
    @pytest.mark.parametrize(
        ("counts", "expected"),
        [
            pytest.param(Pairs(3, 2, 900), PASSED, id="clean"),
            pytest.param(Pairs(0, 0, 189), PASSED, id="fewest-samples-that-can-pass"),
            pytest.param(Pairs(0, 0, 188), INCONCLUSIVE, id="one-fewer"),
            pytest.param(Pairs(3, 2, 100), INCONCLUSIVE, id="clean-but-few"),
            pytest.param(Pairs(18, 0, 900), INCONCLUSIVE, id="exactly-the-margin"),
            pytest.param(Pairs(22, 0, 900), INCONCLUSIVE, id="beyond-but-not-surely"),
            pytest.param(Pairs(60, 0, 900), FAILED, id="lost-much"),
            pytest.param(Pairs(0, 60, 900), PASSED, id="better-than-fp32"),
            pytest.param(Pairs(90, 90, 900), INCONCLUSIVE, id="noisy"),
            pytest.param(Pairs(0, 0, 0), INCONCLUSIVE, id="nothing"),
        ],
    )
    def test_accuracy_loss(self, gates, counts, expected):
        """Passed, failed or inconclusive by where the whole interval lies."""
        finding = judge_counts(GateCheck.of("accuracy_loss", "evaluation", gates), counts)

        assert finding.outcome is expected

    @pytest.mark.parametrize(
        ("counts", "expected"),
        [
            pytest.param(Share(895, 900), PASSED, id="agrees"),
            pytest.param(Share(873, 900), INCONCLUSIVE, id="at-the-limit"),
            pytest.param(Share(868, 900), INCONCLUSIVE, id="below-but-not-surely"),
            pytest.param(Share(800, 900), FAILED, id="disagrees"),
            pytest.param(Share(50, 50), INCONCLUSIVE, id="too-few"),
            pytest.param(Share(0, 0), INCONCLUSIVE, id="nothing"),
        ],
    )
    def test_top1_agreement(self, gates, counts, expected):
        """The lower end must be within to pass, the upper end below to fail."""
        finding = judge_counts(GateCheck.of("top1_agreement", "evaluation", gates), counts)

        assert finding.outcome is expected

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            pytest.param(np.full(900, 0.05), PASSED, id="at-limit"),
            pytest.param(np.r_[np.zeros(897), 9.0, 9.0, 9.0], PASSED, id="three-in-900"),
            pytest.param(np.r_[np.zeros(891), np.full(9, 9.0)], INCONCLUSIVE, id="nine-in-900"),
            pytest.param(np.r_[np.zeros(880), np.full(20, 9.0)], FAILED, id="twenty-in-900"),
            pytest.param(np.r_[np.zeros(880), np.full(20, np.inf)], FAILED, id="infinite"),
            pytest.param(np.r_[np.zeros(880), np.full(20, np.nan)], FAILED, id="nan"),
            pytest.param(np.zeros(367), INCONCLUSIVE, id="too-few-for-a-percentile"),
            pytest.param(np.zeros(0), INCONCLUSIVE, id="nothing"),
        ],
    )
    def test_kl_p99(self, gates, values, expected):
        """The percentile is judged with its distribution-free interval."""
        check = GateCheck.of("kl_p99", "evaluation", gates)

        assert judge_counts(check, Tail.of(check, values)).outcome is expected

    def test_finding_is_filled(self, gates):
        """Interval, counts and unit are there as numbers and in words; the high end would pass."""
        finding = judge_counts(GateCheck.of("accuracy_loss", "evaluation", gates), Pairs(3, 2, 900))

        assert finding.reason == (
            "accuracy loss 0.001111 (95 % interval -0.005087 to 0.007781) <= 0.02; "
            "900 samples, 3 lost, 2 gained"
        )
        assert finding.low < finding.value < finding.high <= finding.limit
        assert (finding.unit, finding.samples, finding.remedy) == ("fraction", 900, "")

    def test_inconclusive_says_what_would_decide(self, gates):
        """An inconclusive finding names the number of samples that would decide it."""
        finding = judge_counts(GateCheck.of("accuracy_loss", "evaluation", gates), Pairs(0, 0, 100))

        assert finding.remedy == "About 189 samples like these would decide it."

    def test_endless_is_said(self, gates):
        """A loss equal to the margin is decided by no number of samples, and that is said."""
        finding = judge_counts(GateCheck.of("accuracy_loss", "evaluation", gates), Pairs(2, 0, 100))

        assert finding.remedy.startswith("No number of samples")

    def test_missing_upper_end(self, gates):
        """Too few samples for a percentile leave its upper end open, and say how many it takes."""
        check = GateCheck.of("kl_p99", "shadow", gates)

        finding = judge_counts(check, Tail.of(check, np.zeros(200)))

        assert finding.high is None
        assert finding.remedy == "About 381 samples like these would decide it."


class TestJudgeFamily:
    def test_clean_slices_pass(self, gates):
        """Ten clean slices of about 90 samples pass a 10 % margin, as does the whole at 2 %."""
        slices = [
            (_slice(gates, digit), Pairs(digit % 2, digit % 3 // 2, 90)) for digit in range(10)
        ]

        findings = judge_family(slices)

        assert {finding.outcome for finding in findings} == {PASSED}
        whole = judge_counts(GateCheck.of("accuracy_loss", "evaluation", gates), Pairs(5, 3, 900))
        assert whole.outcome is PASSED

    def test_single_broken_slice_fails(self, gates):
        """A slice of 5 % of the data that lost a quarter is found; the aggregate hides it."""
        whole = judge_counts(GateCheck.of("accuracy_loss", "evaluation", gates), Pairs(26, 1, 2000))
        slices = [(_slice(gates, 0), Pairs(25, 0, 100))]
        slices += [(_slice(gates, digit), Pairs(0, 0, 100)) for digit in range(1, 20)]

        findings = judge_family(slices)

        assert whole.outcome is PASSED
        assert findings[0].scope == "evaluation/digit=0"
        assert findings[0].outcome is FAILED
        assert {finding.outcome for finding in findings[1:]} == {PASSED}

    def test_suspicion_among_many_is_inconclusive(self, gates):
        """What would fail alone is inconclusive among forty, and still cannot pass."""
        counts = Pairs(17, 0, 90)
        alone = judge_family([(_slice(gates, 0), counts)])
        others = [(_slice(gates, digit), Pairs(0, 0, 90)) for digit in range(1, 40)]

        among = judge_family([(_slice(gates, 0), counts), *others])

        assert alone[0].outcome is FAILED
        assert among[0].outcome is INCONCLUSIVE
        assert "not surely among 40 slices" in among[0].reason
        assert worst(among) is INCONCLUSIVE

    def test_most_harm_first(self, gates):
        """Slices are ranked by how far they are beyond the limit."""
        lost = [3, 30, 0, 12]
        slices = [(_slice(gates, digit), Pairs(n, 0, 100)) for digit, n in enumerate(lost)]

        findings = judge_family(slices)

        assert [finding.value for finding in findings] == [0.30, 0.12, 0.03, 0.0]

    def test_agreement(self, gates):
        """Without labels a slice is judged by agreement, failing when it surely disagrees."""
        checks = [
            GateCheck.of("slice_top1_agreement", "shadow", gates, part=("digit", name))
            for name in "abc"
        ]
        counts = [Share(90, 90), Share(60, 90), Share(82, 90)]

        findings = judge_family(list(zip(checks, counts, strict=True)))

        assert [finding.scope for finding in findings] == [f"shadow/digit={d}" for d in "bca"]
        assert [finding.outcome for finding in findings] == [FAILED, INCONCLUSIVE, PASSED]

    def test_no_slices(self):
        """No slices give no findings."""
        assert judge_family([]) == ()

    def test_empty_slice(self, gates):
        """A slice without samples is inconclusive and does not disturb the others."""
        slices = [(_slice(gates, 0), Pairs(0, 0, 0)), (_slice(gates, 1), Pairs(50, 0, 90))]

        findings = {finding.scope: finding.outcome for finding in judge_family(slices)}

        assert findings == {"evaluation/digit=0": INCONCLUSIVE, "evaluation/digit=1": FAILED}

    def test_clean_candidates_do_not_cry_wolf(self, gates):
        """Of 2,000 clean candidates of ten slices none fails, and 90 % pass throughout."""
        rng = np.random.default_rng(5)
        outcomes = [self._simulated(gates, rng, loss=0.01, gain=0.01) for _ in range(TRIALS)]

        assert FAILED not in outcomes
        assert np.mean([outcome is PASSED for outcome in outcomes]) >= 0.90

    def test_false_alarms_at_the_margin(self, gates):
        """Even if all ten slices truly lose the whole margin, a false alarm is rare: 2.5 %."""
        rng = np.random.default_rng(6)
        outcomes = [self._simulated(gates, rng, loss=0.11, gain=0.01) for _ in range(TRIALS)]

        alarms = np.mean([outcome is FAILED for outcome in outcomes])

        assert alarms <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / TRIALS)
        assert PASSED not in outcomes

    def test_broken_slices_do_not_slip_through(self, gates):
        """A slice in ten that truly loses three times the margin never passes, and mostly fails."""
        rng = np.random.default_rng(7)
        rates = {"loss": 0.005, "gain": 0.005, "slices": 9, "broken": 0.3}
        outcomes = [self._simulated(gates, rng, **rates) for _ in range(TRIALS)]

        assert PASSED not in outcomes
        assert np.mean([outcome is FAILED for outcome in outcomes]) >= 0.93

    def test_false_passes_at_the_margin(self, gates):
        """If one slice of ten truly loses the whole margin, all ten pass in at most 2.5 %."""
        rng = np.random.default_rng(8)
        rates = {"loss": 0.0, "gain": 0.0, "slices": 9, "broken": 0.1}
        outcomes = [self._simulated(gates, rng, **rates) for _ in range(TRIALS)]

        passes = np.mean([outcome is PASSED for outcome in outcomes])

        assert passes <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / TRIALS)

    @staticmethod
    def _simulated(gates, rng, *, loss, gain, slices=10, broken=None):
        losses = [loss] * slices + ([] if broken is None else [broken])
        members = []
        for digit, rate in enumerate(losses):
            lost, gained, _ = rng.multinomial(90, [rate, gain, 1.0 - rate - gain])
            members.append((_slice(gates, digit), Pairs(int(lost), int(gained), 90)))
        return worst(judge_family(members))


class TestJudgeSliceSizes:
    def test_small_slices_are_named(self, gates):
        """Slices that were not judged are named with their sizes, in one advisory finding."""
        sizes = {("digit", "1"): 90, ("digit", "8"): 12, ("ink", "faint"): 39}

        finding = judge_slice_sizes("evaluation", sizes, gates)

        assert (finding.gate, finding.scope) == ("slice_samples", "evaluation")
        assert finding.outcome is INCONCLUSIVE
        assert finding.advisory
        assert finding.reason == (
            "2 of 3 slices have < 40 samples, so were not judged: digit=8 (12), ink=faint (39)"
        )

    def test_many_small_slices(self, gates):
        """A column of ten thousand values does not make an endless sentence."""
        sizes = {("user", str(n)): 1 for n in range(10_000)}

        finding = judge_slice_sizes("evaluation", sizes, gates)

        assert finding.reason.endswith("and 9992 more")
        assert len(finding.reason) < 300

    def test_all_large_enough(self, gates):
        """When every slice was judged the note says so."""
        finding = judge_slice_sizes("evaluation", {("digit", "1"): 40}, gates)

        assert finding.outcome is PASSED
        assert finding.reason == "all 1 slices have >= 40 samples"

    def test_no_slices(self, gates):
        """Data without slice columns needs no note."""
        assert judge_slice_sizes("evaluation", {}, gates) is None


def test_unlabelled_is_inconclusive(gates):
    """Accuracy without labels is not passed, and the remedy says what to add."""
    finding = unlabelled("evaluation", gates)

    assert finding.outcome is INCONCLUSIVE
    assert (finding.gate, finding.value) == ("accuracy_loss", None)
    assert "label" in finding.remedy


def test_errored_is_the_worst(gates):
    """A check that broke is errored, with what it said."""
    finding = errored(GateCheck.of("kl_p99", "shadow", gates), "no column kl_nats")

    assert finding.outcome is Outcome.ERRORED
    assert "no column kl_nats" in finding.reason


def test_advisory_gate_cannot_decide(gates):
    """An advisory finding is judged as any other, and does not count."""
    trial = gates.model_copy(update={"advisory": frozenset({"accuracy_loss"})})
    finding = judge_counts(GateCheck.of("accuracy_loss", "evaluation", trial), Pairs(90, 0, 900))
    passed = judge_number(GateCheck.of("nonfinite", "evaluation", trial), 0, 900)

    assert finding.outcome is FAILED
    assert worst((finding, passed)) is PASSED


def _slice(gates, digit):
    return GateCheck.of("slice_accuracy_loss", "evaluation", gates, part=("digit", str(digit)))


class TestConstantAnswers:
    """An engine that does not compute is refused; one that rounds coarsely is not."""

    @staticmethod
    def found(gates, reference, candidate):
        samples = len(reference)
        data = DataSet(
            "d.npz",
            {"x": np.zeros((samples, 1), np.float32)},
            None,
            np.arange(samples).astype(str),
            {},
        )
        compared = compare({"y": reference}, {"y": candidate}, data, "evaluation")
        notes = notes_on(compared, gates, CLASSIFY)
        return next((note for note in notes if note.gate == "constant_answers"), None)

    @pytest.fixture
    def logits(self):
        return np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)

    @pytest.mark.parametrize("make", [np.zeros_like, lambda x: np.repeat(x[:1], len(x), axis=0)])
    def test_one_answer_to_everything_failed(self, gates, logits, make):
        """Zeros, or any other answer, whatever the limits are."""
        finding = self.found(gates, logits, make(logits))

        assert (finding.outcome, finding.samples, finding.advisory) == (FAILED, 50, False)

    @pytest.mark.parametrize(
        "make",
        [
            pytest.param(np.round, id="coarse"),
            pytest.param(
                lambda x: np.where(np.arange(len(x))[:, None] > 0, x[:1], x[1:2]), id="two"
            ),
            pytest.param(lambda x: np.full_like(x, np.nan), id="nan-fails-elsewhere"),
        ],
    )
    def test_answers_that_vary_do_not_fail(self, gates, logits, make):
        """Other gates say how far they are off."""
        assert self.found(gates, logits, make(logits)) is None

    def test_fp32_that_hardly_varies_fails_nobody(self, gates, logits):
        """A quantised output may round such differences away."""
        nearly = 1.0 + 1e-4 * logits

        assert self.found(gates, nearly, np.ones_like(nearly)) is None
