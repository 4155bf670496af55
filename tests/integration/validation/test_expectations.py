"""Great Expectations as the gate engine, for real."""

import json
import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from enginegate.evidence import Outcome, worst
from validation import gate
from validation.checks import checks_for
from validation.expectations import judge, run_suite
from validation.gate import Tail, worst_slice
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

        assert {finding.outcome for finding in judged.findings} == {PASSED}
        assert len(judged.findings) == 6 + 13 + 1
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
