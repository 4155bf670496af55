"""What a candidate's evidence becomes in MLflow."""

from types import SimpleNamespace

from enginegate.candidate import FileDigest
from enginegate.evidence import Finding, Outcome
from enginegate.tracking.metrics import (
    CURVE,
    MOST_METRICS,
    latency_curve,
    limits_of,
    metrics_of,
    params_of,
    shared_tags,
    winner_metrics,
)
from tests.fakes.evidence import INT8, engine_speed, scorecard, sha, verdict
from tests.fakes.qualification import WAITING, plan, qualification

CARD = qualification()


def test_metrics_of_a_measured_candidate():
    """Each number has a section and a unit that survives two decimals; a change is signed."""
    metrics = metrics_of(CARD, INT8, None)

    assert metrics == {
        "acc/change_pp": -0.217628,
        "acc/change_low_pp": -0.717628,
        "acc/worst_slice_change_pp": -2.247191,
        "acc/fp32_pct": 97.9,
        "gate/outcome_0_is_passed": 0.0,
        "gate/rank": 1.0,
        "perf/p50_ms": 2.083333,
        "perf/p99_ms": 6.25,
        "perf/throughput_at_slo_per_s": 400.0,
    }


def test_sections_sort_by_importance():
    """MLflow sorts sections by name: right, passed, fast, large; and there are few metrics."""
    whole = fully_measured()

    names = sorted(metrics_of(whole, INT8, engine()))

    assert list(dict.fromkeys(name.split("/")[0] for name in names)) == [
        "acc",
        "gate",
        "perf",
        "size",
    ]
    assert len(names) + len({CURVE}) == MOST_METRICS


def fully_measured():
    """The qualification with everything about INT8 that can be a metric."""
    known = {"cold_start_s": 1.25, "cost_per_million": 0.14}
    measured = CARD.benchmark(INT8).model_copy(update=known)
    speed = engine_speed(largest_batch_mib=512.0)
    return CARD.model_copy(update={"benchmarks": (measured,), "engine_speeds": (speed,)})


def engine():
    return SimpleNamespace(file=FileDigest(sha256=sha("e"), size_bytes=2048))


def test_emulated_numbers_are_no_metrics():
    """Emulated accuracy would be drawn beside what was measured, and decides nothing."""
    emulated = Finding(
        gate="accuracy_loss",
        scope="emulated",
        outcome=Outcome.PASSED,
        reason="",
        value=0.2,
        unit="fraction",
        advisory=True,
    )
    card = scorecard(verdicts=(verdict(emulated),), benchmarks=())

    assert set(metrics_of(card, INT8, None)) == {"gate/outcome_0_is_passed", "gate/rank"}


def test_change_of_another_metric_is_in_its_own_unit():
    """A regression's error is neither accuracy nor a percentage; one that grows changes by more."""
    seen = {"scope": "evaluation", "outcome": Outcome.PASSED, "reason": "", "value": 0.5}
    error = Finding(gate="rmse_loss", of_error=True, low=0.1, high=0.9, **seen)
    score = Finding(gate="r2_loss", low=0.1, high=0.9, **seen)

    of_error, of_score = (
        metrics_of(scorecard(verdicts=(verdict(loss),)), INT8, None) for loss in (error, score)
    )

    assert (of_error["answers/change"], of_error["answers/change_high"]) == (0.5, 0.9)
    assert (of_score["answers/change"], of_score["answers/change_low"]) == (-0.5, -0.9)
    assert not any(name.startswith("acc/") for name in (*of_error, *of_score))


def test_cost_and_cold_start_are_metrics():
    """Where the policy has a price, and where the start was measured."""
    found = metrics_of(fully_measured(), INT8, None)

    assert (found["perf/cold_start_s"], found["perf/cost_per_million"]) == (1.25, 0.14)


def test_candidate_that_never_ran_has_only_gate_metrics():
    """What was not measured is absent in MLflow, not zero."""
    assert set(metrics_of(CARD, plan("fp16"), None)) == {"gate/outcome_0_is_passed", "gate/rank"}


def test_latency_curve_is_p99_by_offered_load():
    """Of the chosen configuration; a measurement that is invalid is no point of it."""
    assert latency_curve(CARD.benchmark(INT8)) == {100: 1.5625, 200: 3.125, 400: 6.25}
    assert latency_curve(CARD.benchmark(plan("bf16"))) == {100: 31.0}
    assert latency_curve(None) == {}


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
    assert without["acc/fp32_pct"] == 97.9


def test_tags_hold_whole_digests():
    """A run is found by any digest; data that was not given has no tag."""
    tags = shared_tags(CARD)

    assert tags["scorecard_sha256"] == CARD.digest
    assert tags["data.evaluation_sha256"] == sha("2")
    assert "data.shadow_sha256" not in tags


def test_limits_are_parameters():
    """Each gate's limit, with all of them where precisions differ; no advisory ones."""
    limits = limits_of(CARD)

    assert limits["limit.accuracy_loss"] == "<= 0.01"
    assert limits["limit.top1_agreement"] == ">= 0.97"
    assert "limit.accuracy_fp32" not in limits


def test_stage_metrics_come_from_the_load_of_the_result():
    """Never from an invalid measurement; without a chosen configuration there is none."""
    measured = CARD.benchmark(INT8).at_slo

    assert (measured.config, measured.load.rate_per_s) == (WAITING, 400.0)
    assert CARD.benchmark(plan("bf16")).at_slo is None


def test_load_of_the_result_is_the_rate_that_was_confirmed():
    """An overloaded server answers as much as at its best, and late: 516/s offered, 362/s done."""
    found = CARD.benchmark(INT8)
    kept = found.at_slo
    overload = kept.model_copy(
        update={
            "load": kept.load.model_copy(update={"rate_per_s": 1.4 * kept.load.rate_per_s}),
            "throughput_per_s": kept.throughput_per_s,
        }
    )
    noisy = kept.model_copy(update={"throughput_per_s": 1.05 * kept.throughput_per_s})

    found = found.model_copy(update={"measurements": (overload, noisy)})

    assert found.at_slo == noisy


def test_engine_alone_is_the_share_that_is_served():
    """A candidate that was not measured alone has neither that nor its memory."""
    card = scorecard(engine_speeds=(engine_speed(largest_batch_mib=512.0),))

    found = metrics_of(card, INT8, None)

    assert found["perf/served_share_of_engine_pct"] == 40.0
    assert found["size/engine_device_memory_mib"] == 512.0
    assert "perf/served_share_of_engine_pct" not in metrics_of(scorecard(), INT8, None)
