"""Great Expectations as the gate engine, for real."""

import html
import json
import math
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from enginegate.data import DataSet
from enginegate.evidence import Outcome, worst
from enginegate.gates import Gates, Metric
from validation import gate
from validation.agreement import compare
from validation.asked import Asked
from validation.checks import checks_for
from validation.expectations import judge, run_suite
from validation.gate import worst_slice
from validation.reading import Tail
from validation.statistics import Pairs, Share
from validation.translate import findings_from

PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED


def _find(findings, gate_name, scope="evaluation"):
    return next(f for f in findings if (f.gate, f.scope) == (gate_name, scope))


def _results(judged):
    """Results of the evidence by gate and scope."""
    entries = json.loads(judged.result_json)["results"]
    metas = [entry["expectation_config"]["meta"] for entry in entries]
    return {
        (meta["gate"], meta["scope"]): entry for meta, entry in zip(metas, entries, strict=True)
    }


class TestCandidates:
    def test_clean_candidate_passes(self, case, clean, gates):
        """A well made candidate passes every gate at 900 samples, slices of 90 included."""
        judged = judge(case.compare(clean), gates)

        counting = [finding for finding in judged.findings if not finding.advisory]
        assert {finding.outcome for finding in counting} == {PASSED}
        assert len(counting) == 6 + 13
        assert json.loads(judged.result_json)["success"] is True

    def test_findings_are_the_pure_judges(self, case, clean, gates):
        """A rule exists once: what comes out is what the pure functions say of the same numbers."""
        comparison = case.compare(np.where(case.data.labels[:, None] == 8, -clean, clean))
        checks = {(check.gate, check.scope): check for check in checks_for(comparison, gates)}

        found = {(f.gate, f.scope): f for f in judge(comparison, gates).findings}

        delta = comparison.accuracy_delta
        kl_check = checks["kl_p99", "evaluation"]
        accuracy = gate.judge(checks["accuracy_loss", "evaluation"], Pairs.of(delta))
        agreement = gate.judge(
            checks["top1_agreement", "evaluation"], Share.of(comparison.top1_match)
        )
        kl = gate.judge(kl_check, Tail.of(kl_check, comparison.kl_nats))
        family = gate.judge_family(
            [
                (check, Pairs.of(delta[comparison.slices[check.part[0]] == check.part[1]]))
                for check in checks.values()
                if check.in_family
            ]
        )
        for finding in (accuracy, agreement, kl, *family):
            assert found[finding.gate, finding.scope] == finding

    def test_one_broken_slice_of_five_per_cent(self, case_of, gates):
        """A slice of 5 % that lost a quarter fails although the aggregate gates pass."""
        case = case_of(2000)
        part = np.where(np.arange(2000) < 100, "new-camera", "usual")
        data = replace(case.data, slices={"source": part.astype(np.str_)})
        candidate = case.reference.copy()
        candidate[:100:4] = -candidate[:100:4]
        lenient = gates.model_copy(update={"max_kl_p99_nats": 100.0, "max_abs_error": 100.0})

        judged = judge(replace(case, data=data).compare(candidate), lenient)

        assert _find(judged.findings, "accuracy_loss").outcome is PASSED
        assert _find(judged.findings, "top1_agreement").outcome is PASSED
        harmed = worst_slice(judged.findings)
        assert harmed.scope == "evaluation/source=new-camera"
        assert harmed.outcome is FAILED
        assert worst(judged.findings) is FAILED

    def test_nan_rows(self, case, clean, gates):
        """One NaN in 900 fails, is counted, and the evidence names the sample."""
        clean[123, 4] = np.nan

        judged = judge(case.compare(clean), gates)

        nonfinite = _find(judged.findings, "nonfinite")
        assert (nonfinite.outcome, nonfinite.value) == (FAILED, 1.0)
        assert _find(judged.findings, "max_abs_error").outcome is FAILED
        assert _find(judged.findings, "max_abs_error").value is None
        assert _find(judged.findings, "accuracy_loss").outcome is PASSED
        rows = _results(judged)["nonfinite", "evaluation"]["result"]
        assert rows["partial_unexpected_index_list"] == [{"sample_id": "s123", "nonfinite": True}]

    def test_everything_nan(self, case, gates):
        """A candidate that gives only NaN fails every gate but the sample count."""
        judged = judge(case.compare(np.full_like(case.reference, np.nan)), gates)

        passed = [finding.gate for finding in judged.findings if finding.outcome is PASSED]
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
        judged = judge(case.compare(change(case.reference)), gates)

        assert _find(judged.findings, gate_name).outcome is FAILED


class TestMissingEvidence:
    def test_no_samples(self, case, gates):
        """An empty comparison passes nothing, though Great Expectations calls it a success."""
        empty = replace(
            case,
            data=replace(
                case.data,
                ids=case.data.ids[:0],
                labels=case.data.labels[:0],
                slices={"digit": case.data.slices["digit"][:0]},
            ),
            reference=case.reference[:0],
        )

        judged = judge(empty.compare(empty.reference), gates)

        assert {finding.outcome for finding in judged.findings} == {INCONCLUSIVE}
        assert _results(judged)["nonfinite", "evaluation"]["success"] is True

    def test_no_labels_on_evaluation(self, case, clean, gates):
        """Evaluation data without labels is inconclusive, and says what to add."""
        unlabelled = replace(case, data=replace(case.data, labels=None))

        judged = judge(unlabelled.compare(clean), gates)

        finding = _find(judged.findings, "accuracy_loss")
        assert finding.outcome is INCONCLUSIVE
        assert "label" in finding.remedy
        assert _find(judged.findings, "top1_agreement").outcome is PASSED

    def test_shadow_needs_no_labels(self, case, clean, gates):
        """A shadow sample is judged by agreement, overall and for each slice."""
        shadow = replace(case, data=replace(case.data, labels=None))

        judged = judge(shadow.compare(clean, scope="shadow"), gates)

        assert worst(judged.findings) is PASSED
        assert "accuracy_loss" not in {finding.gate for finding in judged.findings}
        slices = [f for f in judged.findings if f.gate == "slice_top1_agreement"]
        assert len(slices) == 13

    def test_few_samples(self, case, clean, gates):
        """A clean candidate on few samples is inconclusive, not passed and not failed."""
        few = replace(case, data=case.data.head(60), reference=case.reference[:60])

        judged = judge(few.compare(clean[:60]), gates)

        assert worst(judged.findings) is INCONCLUSIVE
        assert "About 189 samples" in _find(judged.findings, "accuracy_loss").remedy
        small = _find(judged.findings, "slice_samples")
        assert small.advisory
        assert "digit=0 (6)" in small.reason

    @pytest.mark.parametrize(
        ("column", "gate_name"),
        [
            ("max_abs_error", "max_abs_error"),
            ("nonfinite", "nonfinite"),
            ("kl_nats", "kl_p99"),
            ("accuracy_delta", "slice_accuracy_loss"),
        ],
    )
    def test_missing_column_is_errored(self, case, clean, gates, column, gate_name):
        """A column that is not there could not be judged: errored, with the cause."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)

        result = run_suite(checks, comparison.frame().drop(columns=column), name="evaluation")
        findings = findings_from(result, checks, rows=len(comparison))

        errored = [finding for finding in findings if finding.gate == gate_name]
        assert {finding.outcome for finding in errored} == {Outcome.ERRORED}
        assert column in errored[0].reason
        assert _find(findings, "top1_agreement").outcome is PASSED
        assert len(findings) == len(checks)

    def test_missing_slice_column_is_errored(self, case, clean, gates):
        """A slice column that vanished errs its slices only."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)

        result = run_suite(checks, comparison.frame().drop(columns="slice.ink"), name="evaluation")
        findings = findings_from(result, checks, rows=len(comparison))

        broken = {finding.scope for finding in findings if finding.outcome is Outcome.ERRORED}
        assert broken == {f"evaluation/ink={ink}" for ink in ("faint", "heavy", "usual")}

    def test_wrong_type_of_column_is_errored(self, case, clean, gates):
        """A column of text where numbers belong is errored, not a crash."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)
        frame = comparison.frame().astype({"kl_nats": str})

        result = run_suite(checks, frame, name="evaluation")

        kl = _find(findings_from(result, checks, rows=len(comparison)), "kl_p99")
        assert kl.outcome is Outcome.ERRORED

    def test_check_without_a_result_is_errored(self, case, clean, gates):
        """A gate that did not run is not a gate that passed."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)

        result = run_suite(checks[1:], comparison.frame(), name="evaluation")

        findings = findings_from(result, checks, rows=len(comparison))
        assert _find(findings, "samples").outcome is Outcome.ERRORED


class TestSlices:
    @pytest.mark.parametrize("column", ["ink", "two words", "été", "a-b.c:d+e", "index", "1st"])
    def test_values_and_names_select_the_right_rows(self, case, clean, gates, column):
        """Quotes, backticks, line breaks and the like in a slice value select that slice only."""
        odd = ["it's", 'a"b', "`x`", "@x", "\\", "😀", "new\nline", "", "None", "x` == 'y", "nan"]
        values = np.array([odd[row % len(odd)] for row in range(900)], dtype=np.str_)
        data = replace(case.data, slices={column: values})

        judged = judge(replace(case, data=data).compare(clean), gates)

        found = {f.scope: f for f in judged.findings if f.gate == "slice_accuracy_loss"}
        assert set(found) == {f"evaluation/{column}={value}" for value in odd}
        for value in odd:
            assert found[f"evaluation/{column}={value}"].samples == (values == value).sum()
            assert found[f"evaluation/{column}={value}"].outcome is PASSED


class TestEvidence:
    def test_same_data_same_bytes(self, case, clean, gates):
        """The evidence of the same data is the same, and is strict JSON."""
        clean[5, 5] = np.inf
        comparison = case.compare(clean)

        first, second = judge(comparison, gates), judge(comparison, gates)

        assert first == second
        assert first.digest == second.digest
        json.loads(first.result_json, parse_constant=pytest.fail)

    def test_shows_what_was_asked(self, case, clean, gates):
        """Each entry says which expectation it was, in words, with its limit and outcome."""
        entry = _results(judge(case.compare(clean), gates))["accuracy_loss", "evaluation"]

        config = entry["expectation_config"]
        assert config["type"] == "expect_column_paired_loss_to_be_at_most"
        assert config["description"] == "accuracy_loss on evaluation: accuracy loss <= 0.02"
        assert entry["result"]["details"]["finding"]["outcome"] == "passed"
        assert entry["success"] is True

    def test_inconclusive_is_no_success(self, case, clean, gates):
        """Great Expectations never shows a success for what did not pass."""
        few = replace(case, data=case.data.head(60), reference=case.reference[:60])

        judged = judge(few.compare(clean[:60]), gates)

        results = _results(judged)
        for finding in judged.findings:
            if (finding.gate, finding.scope) in results:
                success = results[finding.gate, finding.scope]["success"]
                assert success is (finding.outcome is PASSED)

    def test_advisory_gates_are_warnings(self, case, gates):
        """An advisory gate is judged and shown, and cannot change the outcome."""
        trial = gates.model_copy(update={"advisory": frozenset({"max_abs_error"})})

        judged = judge(case.compare(case.reference + np.float32(2.0)), trial)

        finding = _find(judged.findings, "max_abs_error")
        assert (finding.outcome, finding.advisory) == (FAILED, True)
        assert worst(judged.findings) is PASSED
        entry = _results(judged)["max_abs_error", "evaluation"]
        assert entry["expectation_config"]["severity"] == "warning"

    def test_threads(self, case, clean, gates):
        """Candidates judged at the same time do not disturb one another."""
        comparisons = [case.compare(clean + np.float32(0.1 * step)) for step in range(6)]

        with ThreadPoolExecutor(3) as pool:
            judged = list(pool.map(lambda comparison: judge(comparison, gates), comparisons))

        errors = [_find(each.findings, "max_abs_error").value for each in judged]
        expected = [float(comparison.max_abs_error.max()) for comparison in comparisons]
        assert errors == pytest.approx(expected)
        assert math.isclose(expected[5] - expected[0], 0.5, abs_tol=0.2)

    def test_nothing_is_sent(self, case, clean, gates, monkeypatch):
        """Judging opens no connection, and Great Expectations is told not to."""
        monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it connected"))

        judge(case.compare(clean), gates)

        assert os.environ["GX_ANALYTICS_ENABLED"] == "false"


class TestOtherTasks:
    def _judged(self, task, metrics, outputs, *, labels, margins, slices=None):
        samples = len(labels)
        data = DataSet(
            origin="eval.npz",
            inputs={"x": np.zeros((samples, 1), np.float32)},
            labels=labels if labels.dtype.kind == "i" else None,
            ids=np.arange(samples).astype(np.str_),
            slices=slices or {},
            targets={} if labels.dtype.kind == "i" else {"y": labels},
        )
        asked = Asked(task=task, metrics=metrics)
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
        return judge(compared, limits, asked).findings

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
            finding = _find(found, name)
            assert finding.outcome is expected
            assert "FP32 " in finding.reason
        assert _find(found, "sqnr").outcome is expected
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

        assert _find(found, "price_loss").outcome is PASSED
        assert _find(found, "slice_price_loss", "evaluation/site=north").outcome is FAILED
        assert _find(found, "slice_price_loss", "evaluation/site=other").outcome is PASSED

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

        assert _find(found, "ranking_loss").outcome is PASSED
        assert _find(found, "cosine_p1").outcome is FAILED

    def test_macro_f1_and_top_k(self, case, clean, gates):
        """A rare class that vanished costs macro F1 more than accuracy."""
        asked = Asked(metrics={"f1": Metric(kind="macro_f1"), "top3": Metric(kind="topk", k=3)})
        margins = {"f1": 0.03, "top3": 0.02}
        limits = gates.model_copy(update={"max_metric_loss": margins})
        broken = clean.copy()
        broken[:, 8] = -50.0

        good, bad = (
            judge(
                compare({"y": case.reference}, {"y": output}, case.data, "evaluation", asked=asked),
                limits,
                asked,
            ).findings
            for output in (clean, broken)
        )

        assert {_find(good, name).outcome for name in ("f1_loss", "top3_loss")} == {PASSED}
        assert {_find(bad, name).outcome for name in ("f1_loss", "top3_loss")} == {FAILED}
        assert _find(bad, "f1_loss").value > _find(bad, "accuracy_loss").value

    def test_metric_without_labels(self):
        """A metric that the data has no labels for is inconclusive, and says what to add."""
        asked = Asked(task="regression", metrics={"price": Metric(kind="mae")})
        labels = np.zeros(500, dtype=np.int64)

        found = self._judged(
            asked.task,
            asked.metrics,
            (np.arange(500.0), np.arange(500.0)),
            labels=labels,
            margins={"price": 1.0},
        )

        finding = _find(found, "price_loss")
        assert finding.outcome is INCONCLUSIVE
        assert "label." in finding.remedy


class TestBadData:
    def test_a_column_of_ten_thousand_values_is_no_slice(self, case, clean, gates):
        """It is named and not judged; the other columns are."""
        users = np.array([f"user-{row}" for row in range(900)], dtype=np.str_)
        data = replace(case.data, slices={**case.data.slices, "user": users})

        found = judge(replace(case, data=data).compare(clean), gates).findings

        finding = _find(found, "slice_values")
        assert finding.outcome is INCONCLUSIVE
        assert "user has 900 values > 200" in finding.reason
        assert not [f for f in found if "user=" in f.scope]
        assert len([f for f in found if f.gate == "slice_accuracy_loss"]) == 13

    def test_constant_reference(self, case, gates):
        """FP32 that answers the same to everything is no evidence, though nothing differs."""
        same = np.repeat(case.reference[:1], 900, axis=0)

        found = judge(replace(case, reference=same).compare(same), gates).findings

        assert _find(found, "constant_reference").outcome is INCONCLUSIVE
        assert worst(found) is INCONCLUSIVE

    def test_numbers_without_a_limit_are_shown(self, case, clean, gates):
        """What the policy does not limit is measured all the same, and decides nothing."""
        found = judge(case.compare(clean), gates).findings

        sqnr = _find(found, "sqnr")
        assert sqnr.advisory
        assert 30.0 < sqnr.value < 50.0
        assert sqnr.would_pass == sqnr.low


class TestPage:
    def test_says_what_the_findings_say(self, case, clean, gates):
        """Great Expectations' page shows each expectation with its finding's own words."""
        judged = judge(case.compare(clean), gates)

        for gate_name in ("accuracy_loss", "max_abs_error", "samples"):
            finding = _find(judged.findings, gate_name)
            assert html.escape(f"passed: {finding.reason}") in judged.page_html

    def test_needs_nothing_from_elsewhere(self, case, clean, gates):
        """No script, no font, no address: it opens offline, and is small."""
        page = judge(case.compare(clean), gates).page_html

        assert not re.search(r"https?://|<script|<link", page)
        assert len(page) < 60_000

    def test_hostile_slices_stay_text(self, case, clean, gates):
        """A slice's value cannot add markup to the page."""
        data = replace(case.data, slices={"ink": np.full(900, "<script>alert(1)</script>")})

        page = judge(replace(case, data=data).compare(clean), gates).page_html

        assert "<script" not in page
        assert "&lt;script&gt;alert(1)" in page
