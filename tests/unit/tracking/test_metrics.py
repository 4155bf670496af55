"""What a candidate's evidence becomes in MLflow."""

import re

import pytest

from enginegate.evidence import Finding, Outcome, Pattern
from enginegate.measurement import Percentile
from enginegate.tracking.metrics import (
    candidate_note,
    metrics_of,
    params_of,
    shared_tags,
    winner_metrics,
)
from tests.fakes.evidence import FP32, INT8, engine_speed, scorecard, sha, verdict
from tests.fakes.qualification import WAITING, plan, qualification

CARD = qualification()


def test_metrics_of_a_measured_candidate():
    """Each number has a section, a unit that survives two decimals, and its interval."""
    metrics = metrics_of(CARD, INT8, None)

    assert metrics == {
        "acc/evaluation_accuracy_fp32_high_pct": 98.7,
        "acc/evaluation_accuracy_fp32_low_pct": 96.8,
        "acc/evaluation_accuracy_fp32_pct": 97.9,
        "acc/evaluation_accuracy_loss_high_pct": 0.717628,
        "acc/evaluation_accuracy_loss_low_pct": -0.182372,
        "acc/evaluation_accuracy_loss_pct": 0.217628,
        "acc/evaluation_max_abs_error_millionths": 700.0,
        "acc/shadow_top1_agreement_high_pct": 100.0,
        "acc/shadow_top1_agreement_low_pct": 99.26,
        "acc/shadow_top1_agreement_pct": 100.0,
        "gate/blocking_findings": 0.0,
        "gate/findings": 8.0,
        "gate/outcome_0_is_passed": 0.0,
        "perf/mean_batch_size": 2.5,
        "perf/mean_compute_infer_ms": 1.25,
        "perf/mean_compute_input_ms": 0.1,
        "perf/mean_compute_output_ms": 0.1,
        "perf/mean_queue_ms": 0.5,
        "perf/p50_ms": 2.083333,
        "perf/p99_high_ms": 7.5,
        "perf/p99_low_ms": 5.625,
        "perf/p99_ms": 6.25,
        "perf/throughput_at_slo_per_s": 400.0,
        "slice_evaluation/slice_accuracy_fp32_digit_8_pct": 92.1,
        "slice_evaluation/slice_accuracy_fp32_stroke_thin_pct": 98.3,
        "slice_evaluation/slice_accuracy_loss_digit_8_pct": 2.247191,
        "slice_evaluation/slice_accuracy_loss_stroke_thin_pct": 0.0,
    }


def test_serving_metrics_carry_units():
    """Cost, cold start, speed-up and the tail under heavier mixes, each with its unit."""
    tail = Percentile(quantile=0.999, value_ms=14.5, low_ms=None, high_ms=None, samples=3000)
    pattern = Pattern(name="large together", rate_per_s=400, percentiles=(tail,), failed_share=0)
    known = CARD.benchmark(INT8).model_copy(
        update={
            "rejected_rate_per_s": 430.0,
            "cold_start_s": 1.25,
            "cost_per_million": 0.14,
            "patterns": (pattern,),
            "findings": (
                Finding(
                    gate="speedup",
                    scope="benchmark",
                    outcome=Outcome.PASSED,
                    reason="",
                    value=1.5,
                ),
            ),
        }
    )
    before = metrics_of(CARD, INT8, None)

    after = metrics_of(CARD.model_copy(update={"benchmarks": (known,)}), INT8, None)

    assert {name: n for name, n in after.items() if before.get(name) != n} == {
        "perf/rejected_per_s": 430.0,
        "perf/cold_start_s": 1.25,
        "perf/cost_per_million": 0.14,
        "perf/speedup": 1.5,
        "perf/p999_large_together_ms": 14.5,
    }


def test_candidate_that_never_ran_has_only_gate_metrics():
    """What was not measured is absent in MLflow, not zero."""
    metrics = metrics_of(CARD, plan("fp16"), None)

    assert set(metrics) == {
        "gate/outcome_0_is_passed",
        "gate/findings",
        "gate/blocking_findings",
    }


@pytest.mark.parametrize("scope", ["evaluation/city=Zürich (CH) 50%", "shadow/a/b=c@d", "a b"])
def test_names_are_legal(scope):
    """Whatever a slice is called, MLflow takes the metric's name."""
    finding = Finding(
        gate="g%", scope=scope, outcome=Outcome.PASSED, reason="", value=1.0, unit="€"
    )
    card = scorecard(verdicts=(verdict(finding),))

    names = metrics_of(card, INT8, None)

    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", name) for name in names)


def test_params_are_what_was_chosen():
    """The axes of a parallel-coordinates plot."""
    params = params_of(INT8, CARD.benchmark(INT8))

    assert params == {
        "precision": "int8",
        "kind": "onnxruntime",
        "max_batch_size": "8",
        "max_queue_delay_us": "1000",
        "instances": "2",
    }


def test_parent_carries_the_winners_metrics():
    """Qualifications of a model compare over time by their winners."""
    metrics = winner_metrics(CARD, None)

    assert metrics["perf/p99_ms"] == 6.25
    assert (metrics["gate/candidates"], metrics["gate/candidates_passed"]) == (8.0, 2.0)
    without = winner_metrics(qualification(winner=None), None)
    assert "perf/p99_ms" not in without
    # What FP32 itself scores often says why there is none.
    assert without["acc/evaluation_accuracy_fp32_pct"] == 97.9
    assert without["slice_evaluation/slice_accuracy_fp32_digit_8_pct"] == 92.1


def test_tags_hold_whole_digests():
    """A run is found by any digest; data that was not given has no tag."""
    tags = shared_tags(CARD)

    assert tags["scorecard_sha256"] == CARD.digest
    assert tags["data.evaluation_sha256"] == sha("2")
    assert "data.shadow_sha256" not in tags


def test_note_says_what_is_in_the_way():
    """A child run's description opens with the outcome and lists what blocks it."""
    note = candidate_note(CARD, plan("int8"))

    assert note.startswith("**failed**\n\n- failed: accuracy_loss on evaluation: accuracy loss")
    assert note.endswith("- not benchmarked")
    assert candidate_note(CARD, FP32) == "**passed**\n"
    skipped = CARD.model_copy(update={"unmeasured": {plan("int8").name: "verdict failed"}})
    assert candidate_note(skipped, plan("int8")).endswith("- not benchmarked: verdict failed")


def test_stage_metrics_come_from_the_load_of_the_result():
    """Never from an invalid measurement; without a chosen configuration there is none."""
    measured = CARD.benchmark(INT8).at_slo

    assert (measured.config, measured.load.rate_per_s) == (WAITING, 400.0)
    assert CARD.benchmark(plan("bf16")).at_slo is None


def test_engine_alone_is_a_metric_for_each_batch_size_and_as_the_share_served():
    """A candidate that was not measured alone has none of them."""
    card = scorecard(engine_speeds=(engine_speed(largest_batch_mib=512.0),))

    found = metrics_of(card, INT8, None)

    assert found["perf/engine_alone_batch_8_samples_per_s"] == 1000.0
    assert found["perf/engine_alone_samples_per_s"] == 1000.0
    assert found["perf/served_share_of_engine_pct"] == 40.0
    assert found["size/engine_device_memory_mib"] == 512.0
    assert not any("engine_alone" in name for name in metrics_of(scorecard(), INT8, None))
