"""Great Expectations as the gate engine, for real: what is said of candidates of each task."""

import json
from dataclasses import replace

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.evidence import Outcome, worst
from enginegate.policy.gates import CLASSIFICATION_LIMITS, Gates, Metric
from tests.fakes.judged import find, results_of, worst_slice
from validation import gate
from validation.agreement import compare
from validation.checks import checks_for
from validation.expectations import judge_comparison
from validation.gate import Tail
from validation.outputs import OutputSpec
from validation.statistics import Pairs, Share

PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED


class TestCandidates:
    def test_clean_candidate_passes(self, case, clean, gates):
        """A well made candidate passes every gate at 900 samples, slices of 90 included."""
        judged = judge_comparison(case.compare(clean), gates)

        counting = [finding for finding in judged.findings if not finding.advisory]
        assert {finding.outcome for finding in counting} == {PASSED}
        assert len(counting) == 6 + 13
        assert json.loads(judged.result_json)["success"] is True

    def test_findings_are_the_pure_judges(self, case, clean, gates):
        """A rule exists once: what comes out is what the pure functions say of the same numbers."""
        comparison = case.compare(np.where(case.data.labels[:, None] == 8, -clean, clean))
        checks = {(check.gate, check.scope): check for check in checks_for(comparison, gates)}

        found = {(f.gate, f.scope): f for f in judge_comparison(comparison, gates).findings}

        delta = comparison.accuracy_delta
        kl_check = checks["kl_p99", "evaluation"]
        accuracy = gate.judge_counts(checks["accuracy_loss", "evaluation"], Pairs.of(delta))
        agreement = gate.judge_counts(
            checks["top1_agreement", "evaluation"], Share.of(comparison.top1_match)
        )
        kl = gate.judge_counts(kl_check, Tail.of(kl_check, comparison.kl_nats))
        family = gate.judge_family(
            [
                (check, Pairs.of(delta[comparison.slices[check.part[0]] == check.part[1]]))
                for check in checks.values()
                if check.in_family
            ]
        )
        for finding in (accuracy, agreement, kl, *family):
            assert found[finding.gate, finding.scope] == finding

    def test_single_broken_slice_fails(self, case_of, gates):
        """A slice of 5 % that lost a quarter fails although the aggregate gates pass."""
        case = case_of(2000)
        part = np.where(np.arange(2000) < 100, "new-camera", "usual")
        data = replace(case.data, slices={"source": part.astype(np.str_)})
        candidate = case.reference.copy()
        candidate[:100:4] = -candidate[:100:4]
        lenient = gates.model_copy(update={"max_kl_p99_nats": 100.0, "max_abs_error": 100.0})

        judged = judge_comparison(replace(case, data=data).compare(candidate), lenient)

        assert find(judged.findings, "accuracy_loss").outcome is PASSED
        assert find(judged.findings, "top1_agreement").outcome is PASSED
        harmed = worst_slice(judged.findings)
        assert harmed.scope == "evaluation/source=new-camera"
        assert harmed.outcome is FAILED
        assert worst(judged.findings) is FAILED

    def test_nan_rows(self, case, clean, gates):
        """One NaN in 900 fails, is counted, and the evidence names the sample."""
        clean[123, 4] = np.nan

        judged = judge_comparison(case.compare(clean), gates)

        nonfinite = find(judged.findings, "nonfinite")
        assert (nonfinite.outcome, nonfinite.value) == (FAILED, 1.0)
        assert find(judged.findings, "max_abs_error").outcome is FAILED
        assert find(judged.findings, "max_abs_error").value is None
        assert find(judged.findings, "accuracy_loss").outcome is PASSED
        rows = results_of(judged)["nonfinite", "evaluation"]["result"]
        assert rows["partial_unexpected_index_list"] == [{"sample_id": "s123", "nonfinite": True}]

    def test_column_by_column_is_as_all_at_once(self, case, clean, gates, monkeypatch):
        """Many samples are measured with one column in memory; the record is the same bytes."""
        clean[3] = np.nan
        compared = case.compare(clean)
        at_once = judge_comparison(compared, gates)

        monkeypatch.setattr("validation.expectations._AT_ONCE", 0)

        assert judge_comparison(compared, gates) == at_once
        assert any("=" in finding.scope for finding in at_once.findings)

    def test_everything_nan(self, case, gates):
        """A candidate that gives only NaN fails every gate but the sample count."""
        judged = judge_comparison(case.compare(np.full_like(case.reference, np.nan)), gates)

        passed = [f.gate for f in judged.findings if f.outcome is PASSED and not f.of_fp32]
        assert passed == ["samples", "slice_samples"]

    @pytest.mark.parametrize(
        ("change", "gate_name"),
        [
            pytest.param(np.zeros_like, "accuracy_loss", id="constant"),
            pytest.param(lambda y: y[:, ::-1], "top1_agreement", id="swapped-classes"),
            pytest.param(lambda y: y * 3, "max_abs_error", id="scaled-logits"),
            pytest.param(lambda y: y * 0.5, "kl_p99", id="flattened-logits"),
        ],
    )
    def test_faults_are_caught(self, case, gates, change, gate_name):
        """Each fault fails the gate that exists for it."""
        judged = judge_comparison(case.compare(change(case.reference)), gates)

        assert find(judged.findings, gate_name).outcome is FAILED


class TestSlices:
    @pytest.mark.parametrize("column", ["ink", "two words", "été", "a-b.c:d+e", "index", "1st"])
    def test_values_and_names_select_the_right_rows(self, case, clean, gates, column):
        """Quotes, backticks, line breaks and the like in a slice value select that slice only."""
        odd = ["it's", 'a"b', "`x`", "@x", "\\", "😀", "new\nline", "", "None", "x` == 'y", "nan"]
        values = np.array([odd[row % len(odd)] for row in range(900)], dtype=np.str_)
        data = replace(case.data, slices={column: values})

        judged = judge_comparison(replace(case, data=data).compare(clean), gates)

        found = {f.scope: f for f in judged.findings if f.gate == "slice_accuracy_loss"}
        assert set(found) == {f"evaluation/{column}={value}" for value in odd}
        for value in odd:
            assert found[f"evaluation/{column}={value}"].samples == (values == value).sum()
            assert found[f"evaluation/{column}={value}"].outcome is PASSED


class TestOtherTasks:
    def _judged(self, task, metrics, outputs, *, labels, margins, slices=None):
        samples, classes = len(outputs[0]), labels is not None and labels.dtype.kind == "i"
        data = DataSet(
            origin="eval.npz",
            inputs={"x": np.zeros((samples, 1), np.float32)},
            labels=labels if classes else None,
            ids=np.arange(samples).astype(np.str_),
            slices=slices or {},
            targets={} if classes or labels is None else {"y": labels},
        )
        asked = OutputSpec(task=task, metrics=metrics)
        limits = Gates(
            confidence=0.95,
            min_samples=400,
            min_slice_samples=40,
            max_accuracy_loss=None,
            max_slice_accuracy_loss=None,
            min_top1_agreement=None,
            max_kl_p99_nats=None,
            max_abs_error=None,
            min_sqnr_db=20.0,
            min_cosine_p1=0.9,
            max_metric_loss=margins,
            max_slice_metric_loss=margins if slices else {},
        )
        reference, candidate = ({"y": output.astype(np.float32)} for output in outputs)
        compared = compare(reference, candidate, data, "evaluation", asked=asked)
        return judge_comparison(compared, limits, asked).findings

    @pytest.mark.parametrize(
        ("noise", "expected"), [pytest.param(0.02, PASSED, id="clean"), (0.9, FAILED)]
    )
    def test_regression(self, noise, expected):
        """MAE and RMSE are judged paired, each in its own unit."""
        rng = np.random.default_rng(0)
        truth = rng.normal(size=(800, 2))
        reference = truth + rng.normal(scale=0.3, size=truth.shape)
        outputs = (reference, reference + rng.normal(scale=noise, size=truth.shape))
        metrics = {"price": Metric(kind="mae"), "spread": Metric(kind="rmse")}

        found = self._judged(
            "regression", metrics, outputs, labels=truth, margins={"price": 0.05, "spread": 0.05}
        )

        for name in ("price_loss", "spread_loss"):
            finding = find(found, name)
            assert finding.outcome is expected
            assert "FP32 " in finding.reason
        assert find(found, "sqnr").outcome is expected
        assert "accuracy_loss" not in {finding.gate for finding in found}

    def test_regression_slice(self):
        """One site of ten whose errors doubled fails, though the mean over all hardly moved."""
        rng = np.random.default_rng(1)
        truth = rng.normal(size=2000)
        reference = truth + rng.normal(scale=0.1, size=2000)
        candidate = reference.copy()
        candidate[::20] += 0.5
        site = np.where(np.arange(2000) % 20 == 0, "north", "other").astype(np.str_)

        found = self._judged(
            "regression",
            {"price": Metric(kind="mae")},
            (reference, candidate),
            labels=truth,
            margins={"price": 0.05},
            slices={"site": site},
        )

        assert find(found, "price_loss").outcome is PASSED
        assert find(found, "slice_price_loss", "evaluation/site=north").outcome is FAILED
        assert find(found, "slice_price_loss", "evaluation/site=other").outcome is PASSED

    def test_embedding(self):
        """Ranking recall and cosine: a rotated space ranks alike, and is another space."""
        rng = np.random.default_rng(2)
        labels = rng.integers(0, 5, 1000)
        vectors = np.eye(8)[labels] + rng.normal(scale=0.1, size=(1000, 8))
        turned = np.linalg.qr(rng.normal(size=(8, 8)))[0]

        found = self._judged(
            "embedding",
            {"ranking": Metric(kind="recall", k=1)},
            (vectors, vectors @ turned),
            labels=labels,
            margins={"ranking": 0.02},
        )

        assert find(found, "ranking_loss").outcome is PASSED
        assert find(found, "cosine_p1").outcome is FAILED

    def test_macro_f1_and_top_k(self, case, clean, gates):
        """A rare class that vanished costs macro F1 more than accuracy."""
        asked = OutputSpec(
            metrics={"f1": Metric(kind="macro_f1"), "top3": Metric(kind="topk", k=3)}
        )
        margins = {"f1": 0.03, "top3": 0.02}
        limits = gates.model_copy(update={"max_metric_loss": margins})
        broken = clean.copy()
        broken[:, 8] = -50.0

        good, bad = (
            judge_comparison(
                compare({"y": case.reference}, {"y": output}, case.data, "evaluation", asked=asked),
                limits,
                asked,
            ).findings
            for output in (clean, broken)
        )

        assert {find(good, name).outcome for name in ("f1_loss", "top3_loss")} == {PASSED}
        assert {find(bad, name).outcome for name in ("f1_loss", "top3_loss")} == {FAILED}
        assert find(bad, "f1_loss").value > find(bad, "accuracy_loss").value

    def test_metric_without_labels(self):
        """A metric that the data has no labels for is inconclusive, and says what to add."""
        asked = OutputSpec(task="regression", metrics={"price": Metric(kind="mae")})

        found = self._judged(
            asked.task,
            asked.metrics,
            (np.arange(500.0), np.arange(500.0)),
            labels=None,
            margins={"price": 1.0},
        )

        finding = find(found, "price_loss")
        assert finding.outcome is INCONCLUSIVE
        assert "no labels" in finding.reason
        assert "an array named label or label.OUTPUT" in finding.remedy


class TestClassesOfPixelsAndBoxes:
    """Each class of labels, pixels or boxes is a slice of its own."""

    SAMPLES, CLASSES, SIDE = 120, 4, 8

    @pytest.fixture
    def limits(self, gates):
        unlimited = dict.fromkeys((*CLASSIFICATION_LIMITS, "max_abs_error"))
        further = {"min_samples": 100, "min_decision_agreement": 0.5}
        return gates.model_copy(
            update={
                **unlimited,
                **further,
                "max_metric_loss": {"m": 0.5},
                "max_slice_metric_loss": {"m": 0.1},
            }
        )

    def judged(self, limits, truth, reference, candidate, metric):
        data = DataSet(
            origin="eval.npz",
            inputs={"x": np.zeros((self.SAMPLES, 1), np.float32)},
            labels=None,
            ids=np.arange(self.SAMPLES).astype(np.str_),
            slices={"half": np.where(np.arange(self.SAMPLES) < 60, "first", "last")},
            targets={"y": truth},
        )
        task = "segmentation" if metric == "miou" else "multi-label"
        asked = OutputSpec(task=task, metrics={"m": Metric(kind=metric)})
        compared = compare({"y": reference}, {"y": candidate}, data, "evaluation", asked=asked)
        return judge_comparison(compared, limits, asked)

    def test_class_of_pixels_that_is_lost_fails_alone(self, limits):
        """Its pixels are called another class: its own overlap is 0, that of the other falls."""
        truth = np.random.default_rng(0).integers(0, self.CLASSES, (self.SAMPLES, 8, 8))
        reference = 5.0 * np.eye(self.CLASSES, dtype=np.float32)[truth].transpose(0, 3, 1, 2)
        broken = reference.copy()
        broken[:, 0] += 9.0 * (truth == 2)

        judged = self.judged(limits, truth, reference, broken, "miou")

        failed = {f.scope: f for f in judged.findings if f.gate == "slice_m_loss"}
        outcomes = {scope: f.outcome for scope, f in failed.items()}
        assert outcomes["evaluation/class=2"] is outcomes["evaluation/class=0"] is FAILED
        assert outcomes["evaluation/class=1"] is outcomes["evaluation/class=3"] is PASSED
        assert failed["evaluation/class=2"].value == pytest.approx(1.0)
        assert find(judged.findings, "m_loss").outcome is PASSED
        assert find(judged.findings, "decision_agreement").value == pytest.approx(0.75, abs=0.02)

    def test_labels_that_agree_pass_in_every_slice(self, limits):
        truth = np.random.default_rng(0).random((self.SAMPLES, self.CLASSES)) < 0.5
        logits = np.where(truth, 3.0, -3.0).astype(np.float32)

        judged = self.judged(limits, truth.astype(np.int64), logits, logits + 0.1, "label_f1")

        slices = [f for f in judged.findings if f.gate == "slice_m_loss"]
        assert {f.outcome for f in slices} == {PASSED}
        assert len(slices) == self.CLASSES + 2
        assert find(judged.findings, "m_fp32").value == 1.0
