"""One literal qualification with every kind of ending: passed, failed, inconclusive, not built."""

from enginegate.candidate import Candidate, Precision
from enginegate.evidence import Benchmark, Finding, Outcome, Scorecard, Verdict
from enginegate.measurement import Load, Measurement, Percentile, StageSplit
from enginegate.serving import ServingConfig
from tests.fakes.evidence import FP32, INT8, scorecard, sha

WAITING = ServingConfig(max_batch_size=8, max_queue_delay_us=1000, instances=2)
DIRECT = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


def plan(precision: str) -> Candidate:
    """The TensorRT candidate of a precision."""
    return Candidate(kind="tensorrt", precision=Precision(precision))


def qualification(**changes) -> Scorecard:
    """Eight candidates, INT8 on ONNX Runtime ahead; each argument changes one field."""
    fields = {
        "environment": {"enginegate": "0.1.0", "processor": "8 cores | x86_64"},
        "verdicts": (
            _judged(FP32, loss=0.0, slice_loss=0.0),
            _judged(INT8, loss=2 / 919, slice_loss=2 / 89),
            *(_unrunnable(plan(precision)) for precision in ("fp32", "tf32", "fp16")),
            _judged(plan("bf16"), loss=-1 / 919, slice_loss=0.0),
            _judged(plan("int8"), loss=40 / 919, slice_loss=30 / 89),
            _unbuilt(plan("fp8")),
        ),
        "benchmarks": (
            _measured(FP32, DIRECT, p99_ms=8.4, rates=(100.0, 200.0)),
            _measured(INT8, WAITING, p99_ms=6.25, rates=(100.0, 200.0, 400.0)),
            _overloaded(plan("bf16")),
        ),
        "replaces": 3,
        "reason": "highest throughput that meets p99 <= 25 ms: 400 requests a second",
    }
    return scorecard(**(fields | changes))


def _judged(candidate: Candidate, *, loss: float, slice_loss: float) -> Verdict:
    return Verdict(
        candidate=candidate,
        engine_sha256=sha("e"),
        findings=(
            _loss("accuracy_loss", "evaluation", loss, limit=0.01, samples=919),
            _loss("slice_accuracy_loss", "evaluation/digit=8", slice_loss, limit=0.1, samples=89),
            _loss("slice_accuracy_loss", "evaluation/stroke=thin", 0.0, limit=0.1, samples=286),
            Finding(
                gate="top1_agreement",
                scope="shadow",
                outcome=Outcome.PASSED,
                reason="top-1 agreement 1 (95 % interval 0.992 to 1) >= 0.97; 500 samples",
                value=1.0,
                limit=0.97,
                relation=">=",
                unit="fraction",
                low=0.9926,
                high=1.0,
                samples=500,
            ),
            Finding(
                gate="max_abs_error",
                scope="evaluation",
                outcome=Outcome.PASSED,
                reason="largest absolute error 0.0007 <= 1.5; 919 samples",
                value=0.0007,
                limit=1.5,
                relation="<=",
                samples=919,
            ),
            *_own_scores(),
        ),
    )


def _own_scores() -> tuple[Finding, ...]:
    said = "FP32 itself scores 97.9 % (96.8 to 98.7) on 919 samples"
    chance = "chance is 10.4 % (always naming the most frequent class)"
    slices = {"digit=8": (0.921, 0.847, 0.961, 89), "stroke=thin": (0.983, 0.961, 0.993, 286)}
    return (
        _own("accuracy_fp32", "evaluation", (0.979, 0.968, 0.987, 919), f"{said}; {chance}"),
        *(
            _own("slice_accuracy_fp32", f"evaluation/{part}", numbers, f"FP32 itself, {part}")
            for part, numbers in slices.items()
        ),
    )


def _own(gate: str, scope: str, numbers: tuple[float, float, float, int], said: str) -> Finding:
    value, low, high, samples = numbers
    return Finding(
        gate=gate,
        scope=scope,
        outcome=Outcome.PASSED,
        reason=said,
        value=value,
        limit=0.104,
        relation=">=",
        unit="fraction",
        low=low,
        high=high,
        samples=samples,
        advisory=True,
    )


def _loss(gate: str, scope: str, loss: float, *, limit: float, samples: int) -> Finding:
    failed = loss > limit
    return Finding(
        gate=gate,
        scope=scope,
        outcome=Outcome.FAILED if failed else Outcome.PASSED,
        reason=f"accuracy loss {loss:.4g} {'>' if failed else '<='} {limit:g}; {samples} samples",
        value=loss,
        limit=limit,
        relation="<=",
        unit="fraction",
        low=loss - 0.004,
        high=loss + 0.005,
        samples=samples,
        remedy="Calibrate on data that looks like this." if failed else "",
    )


def _unrunnable(candidate: Candidate) -> Verdict:
    finding = Finding(
        gate="runnable",
        scope="engine",
        outcome=Outcome.INCONCLUSIVE,
        reason="no device can run it here: there is no NVIDIA GPU",
        remedy="Qualify on a machine with a device for sm89.",
    )
    return Verdict(candidate=candidate, engine_sha256=sha("f"), findings=(finding,))


def _unbuilt(candidate: Candidate) -> Verdict:
    finding = Finding(
        gate="build",
        scope="engine",
        outcome=Outcome.FAILED,
        reason="could not be built: parser:\n  node_Conv_7 [Conv]: no kernel <fp8> | sm80\n",
        remedy="Take this candidate out of the policy.",
    )
    return Verdict(candidate=candidate, engine_sha256=None, findings=(finding,))


def _measured(
    candidate: Candidate, chosen: ServingConfig, *, p99_ms: float, rates: tuple[float, ...]
) -> Benchmark:
    measured = [_measurement(chosen, rate, p99_ms * rate / rates[-1]) for rate in rates]
    measured.append(_measurement(DIRECT, 800.0, 90.0, invalid=("the generator was late",)))
    return Benchmark(
        candidate=candidate,
        engine_sha256=sha("e"),
        server="Triton 2.51.0, CPU",
        measurements=tuple(measured),
        chosen=chosen,
        throughput_at_slo_per_s=rates[-1],
        p99_at_slo=_percentile(0.99, p99_ms),
        findings=(_slo(Outcome.PASSED, f"p99 {p99_ms:g} ms <= 25 ms; 1200 requests"),),
    )


def _overloaded(candidate: Candidate) -> Benchmark:
    return Benchmark(
        candidate=candidate,
        engine_sha256=sha("e"),
        server="Triton 2.51.0, CPU",
        measurements=(_measurement(DIRECT, 100.0, 31.0),),
        chosen=None,
        throughput_at_slo_per_s=0.0,
        p99_at_slo=None,
        findings=(_slo(Outcome.INCONCLUSIVE, "p99 31 ms spans 25 ms; 300 requests"),),
    )


def _slo(outcome: Outcome, reason: str) -> Finding:
    return Finding(gate="p99_ms", scope="benchmark", outcome=outcome, reason=reason)


def _measurement(
    config: ServingConfig, rate: float, p99_ms: float, *, invalid: tuple[str, ...] = ()
) -> Measurement:
    return Measurement(
        config=config,
        load=Load(rate_per_s=rate, duration_s=3.0, seed=0),
        invalid=invalid,
        sent=1200,
        completed=1200,
        failed=0,
        throughput_per_s=rate,
        percentiles=(_percentile(0.5, p99_ms / 3), _percentile(0.99, p99_ms)),
        late_p99_ms=0.1,
        stages=StageSplit(
            queue_ms=0.5,
            compute_input_ms=0.1,
            compute_infer_ms=1.25,
            compute_output_ms=0.1,
            mean_batch_size=2.5,
        ),
        latencies_sha256=sha("a"),
    )


def _percentile(quantile: float, value_ms: float) -> Percentile:
    return Percentile(
        quantile=quantile,
        value_ms=value_ms,
        low_ms=0.9 * value_ms,
        high_ms=1.2 * value_ms,
        samples=1200,
    )
