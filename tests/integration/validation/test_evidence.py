"""The evidence of Great Expectations: what is judged where some is missing, and what is kept."""

import json
import math
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from enginegate.evidence import Outcome, worst
from tests.fakes.judged import find, results_of
from validation.checks import checks_for
from validation.expectations import _run, findings_from, judge_comparison

PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED


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

        judged = judge_comparison(empty.compare(empty.reference), gates)

        assert {finding.outcome for finding in judged.findings} == {INCONCLUSIVE}
        assert results_of(judged)["nonfinite", "evaluation"]["success"] is True

    def test_no_labels_on_evaluation(self, case, clean, gates):
        """Evaluation data without labels is inconclusive, and says what to add."""
        unlabelled = replace(case, data=replace(case.data, labels=None))

        judged = judge_comparison(unlabelled.compare(clean), gates)

        finding = find(judged.findings, "accuracy_loss")
        assert finding.outcome is INCONCLUSIVE
        assert "label" in finding.remedy
        assert find(judged.findings, "top1_agreement").outcome is PASSED

    def test_shadow_needs_no_labels(self, case, clean, gates):
        """A shadow sample is judged by agreement, overall and for each slice."""
        shadow = replace(case, data=replace(case.data, labels=None))

        judged = judge_comparison(shadow.compare(clean, scope="shadow"), gates)

        assert worst(judged.findings) is PASSED
        assert "accuracy_loss" not in {finding.gate for finding in judged.findings}
        slices = [f for f in judged.findings if f.gate == "slice_top1_agreement"]
        assert len(slices) == 13

    def test_few_samples(self, case, clean, gates):
        """A clean candidate on few samples is inconclusive, not passed and not failed."""
        few = replace(case, data=case.data.head(60), reference=case.reference[:60])

        judged = judge_comparison(few.compare(clean[:60]), gates)

        assert worst(judged.findings) is INCONCLUSIVE
        assert "About 189 samples" in find(judged.findings, "accuracy_loss").remedy
        small = find(judged.findings, "slice_samples")
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

        result = _run(
            checks, comparison.frame().drop(columns=column), name="evaluation"
        ).to_json_dict()
        findings = findings_from(result, checks, rows=len(comparison))

        errored = [finding for finding in findings if finding.gate == gate_name]
        assert {finding.outcome for finding in errored} == {Outcome.ERRORED}
        assert column in errored[0].reason
        assert find(findings, "top1_agreement").outcome is PASSED
        assert len(findings) == len(checks)

    def test_missing_slice_column_is_errored(self, case, clean, gates):
        """A slice column that vanished errs its slices only."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)

        result = _run(
            checks, comparison.frame().drop(columns="slice.ink"), name="evaluation"
        ).to_json_dict()
        findings = findings_from(result, checks, rows=len(comparison))

        broken = {finding.scope for finding in findings if finding.outcome is Outcome.ERRORED}
        assert broken == {f"evaluation/ink={ink}" for ink in ("faint", "heavy", "usual")}

    def test_wrong_type_of_column_is_errored(self, case, clean, gates):
        """A column of text where numbers belong is errored, not a crash."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)
        frame = comparison.frame().astype({"kl_nats": str})

        result = _run(checks, frame, name="evaluation").to_json_dict()

        kl = find(findings_from(result, checks, rows=len(comparison)), "kl_p99")
        assert kl.outcome is Outcome.ERRORED

    def test_check_without_a_result_is_errored(self, case, clean, gates):
        """A gate that did not run is not a gate that passed."""
        comparison = case.compare(clean)
        checks = checks_for(comparison, gates)

        result = _run(checks[1:], comparison.frame(), name="evaluation").to_json_dict()

        findings = findings_from(result, checks, rows=len(comparison))
        assert find(findings, "samples").outcome is Outcome.ERRORED


class TestEvidence:
    def test_same_data_same_bytes(self, case, clean, gates):
        """The evidence of the same data is the same, and is strict JSON."""
        clean[5, 5] = np.inf
        comparison = case.compare(clean)

        first, second = judge_comparison(comparison, gates), judge_comparison(comparison, gates)

        assert first == second
        assert first.digest == second.digest
        json.loads(first.result_json, parse_constant=pytest.fail)

    def test_shows_what_was_asked(self, case, clean, gates):
        """Each entry says which expectation it was, in words, with its limit and outcome."""
        entry = results_of(judge_comparison(case.compare(clean), gates))[
            "accuracy_loss", "evaluation"
        ]

        config = entry["expectation_config"]
        assert config["type"] == "expect_column_paired_loss_to_be_at_most"
        assert config["description"] == "accuracy_loss on evaluation: accuracy loss <= 0.02"
        assert entry["result"]["details"]["finding"]["outcome"] == "passed"
        assert entry["success"] is True

    def test_inconclusive_is_no_success(self, case, clean, gates):
        """Great Expectations never shows a success for what did not pass."""
        few = replace(case, data=case.data.head(60), reference=case.reference[:60])

        judged = judge_comparison(few.compare(clean[:60]), gates)

        results = results_of(judged)
        for finding in judged.findings:
            if (finding.gate, finding.scope) in results:
                success = results[finding.gate, finding.scope]["success"]
                assert success is (finding.outcome is PASSED)

    def test_advisory_gates_are_warnings(self, case, gates):
        """An advisory gate is judged and shown, and cannot change the outcome."""
        trial = gates.model_copy(update={"advisory": frozenset({"max_abs_error"})})

        judged = judge_comparison(case.compare(case.reference + np.float32(2.0)), trial)

        finding = find(judged.findings, "max_abs_error")
        assert (finding.outcome, finding.advisory) == (FAILED, True)
        assert worst(judged.findings) is PASSED
        entry = results_of(judged)["max_abs_error", "evaluation"]
        assert entry["expectation_config"]["severity"] == "warning"

    def test_threads(self, case, clean, gates):
        """Candidates judged at the same time do not disturb one another."""
        comparisons = [case.compare(clean + np.float32(0.1 * step)) for step in range(6)]

        with ThreadPoolExecutor(3) as pool:
            judged = list(
                pool.map(lambda comparison: judge_comparison(comparison, gates), comparisons)
            )

        errors = [find(each.findings, "max_abs_error").value for each in judged]
        expected = [float(comparison.max_abs_error.max()) for comparison in comparisons]
        assert errors == pytest.approx(expected)
        assert math.isclose(expected[5] - expected[0], 0.5, abs_tol=0.2)

    def test_judging_opens_no_connection(self, case, clean, gates, monkeypatch):
        """Judging opens no connection, and Great Expectations is told not to."""
        connected = []

        def connect(*_):
            connected.append(threading.current_thread())
            raise OSError

        monkeypatch.setattr(socket.socket, "connect", connect)

        judge_comparison(case.compare(clean), gates)

        assert threading.current_thread() not in connected
        assert os.environ["GX_ANALYTICS_ENABLED"] == "false"


class TestBadData:
    def test_column_with_ten_thousand_values_is_no_slice(self, case, clean, gates):
        """It is named and not judged; the other columns are."""
        users = np.array([f"user-{row}" for row in range(900)], dtype=np.str_)
        data = replace(case.data, slices={**case.data.slices, "user": users})

        found = judge_comparison(replace(case, data=data).compare(clean), gates).findings

        finding = find(found, "slice_values")
        assert finding.outcome is INCONCLUSIVE
        assert "user has 900 values > 200" in finding.reason
        assert not [f for f in found if "user=" in f.scope]
        assert len([f for f in found if f.gate == "slice_accuracy_loss"]) == 13

    def test_constant_reference(self, case, gates):
        """FP32 that answers the same to everything is no evidence, though nothing differs."""
        same = np.repeat(case.reference[:1], 900, axis=0)

        found = judge_comparison(replace(case, reference=same).compare(same), gates).findings

        assert find(found, "constant_reference").outcome is INCONCLUSIVE
        assert worst(found) is INCONCLUSIVE

    def test_numbers_without_a_limit_are_shown(self, case, clean, gates):
        """What the policy does not limit is measured all the same, and decides nothing."""
        found = judge_comparison(case.compare(clean), gates).findings

        sqnr = find(found, "sqnr")
        assert sqnr.advisory
        assert 30.0 < sqnr.value < 50.0
        assert sqnr.would_pass == sqnr.low
