"""Decisions as people meet them: four usual endings and one of eight candidates.

`tests/golden/digits_cpu_scorecard.json` is a real qualification on two CPU cores, a tie. The others
are put together from it and from what `benchmarks/results` has of a ResNet-50 on an H200; intervals
and the choice are computed by the code that computes them in a qualification. Tests and the
pictures of the documentation share them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from enginegate.candidate import Candidate
from enginegate.chained_log.hash_chain import GENESIS
from enginegate.evidence import (
    BatchSpeed,
    Benchmark,
    EngineSpeed,
    Finding,
    Outcome,
    Point,
    PointDecision,
    ReplacedRelease,
    Rival,
    Scorecard,
    Verdict,
)
from enginegate.measurement import Generator, Load, Measurement, Percentile, Resources, StageSplit
from enginegate.policy import read_policy
from enginegate.policy.benchmarking import Search
from enginegate.records import sha256_bytes
from enginegate.report.decision_page import PageLink, decision_page, page_history
from enginegate.repository.history.audit import Event
from enginegate.search.findings import champion_finding
from enginegate.serving import ServingConfig
from enginegate.watch.log import WatchCheck
from validation.choice import choose
from validation.statistics import Pairs, loss_interval

_ROOT = Path(__file__).parents[2]
_ON_CPU = _ROOT / "tests" / "golden" / "digits_cpu_scorecard.json"
_ON_GPU = _ROOT / "benchmarks" / "results"
_SLO_MS = 50.0
_LEAST_PER_S = 400.0
_ROWS = 8.0
_CEILING_PER_S = 20_000.0
_SERVER = "Triton 2.51.0 on NVIDIA H200"
_CONFIDENCE = 0.95
# Of a distance to FP32 that INT8 has.
_DIVERGENCE = {"tf32": 0.004, "fp16": 0.021}

ORT_FP32 = Candidate.parse("onnxruntime-fp32")
ORT_INT8 = Candidate.parse("onnxruntime-int8")
ORT_TF32 = Candidate.parse("onnxruntime-tf32")
ORT_FP16 = Candidate.parse("onnxruntime-fp16")
TRT_FP16 = Candidate.parse("tensorrt-fp16")
TRT_INT8 = Candidate.parse("tensorrt-int8")
PLAN_CONFIG = ServingConfig(max_batch_size=128, max_queue_delay_us=500, instances=2)


_LINKS = (
    PageLink("Comparison in MLflow", "http://mlflow.example:5000/#/experiments/7"),
    PageLink("Flow run in Prefect", "http://prefect.example:4200/runs/flow-run/5f0c1b7e"),
)


@dataclass(frozen=True, slots=True)
class DecisionCase:
    """One scorecard, and what happened since it was made.

    Attributes:
        events: of the repository's audit log, oldest first.
        checks: of the release that was published of the scorecard.
    """

    name: str
    scorecard: Scorecard
    events: tuple[Event, ...] = ()
    checks: tuple[WatchCheck, ...] = ()

    @property
    def page(self) -> str:
        """The decision page, with the links that a qualification gives it."""
        history = page_history(self.scorecard, self.events, self.checks)
        return decision_page(self.scorecard, history, _LINKS)


@cache
def on_cpu() -> Scorecard:
    """The real one: eight candidates, two of which run on a CPU, and they are tied."""
    return Scorecard.read(_ON_CPU)


def eight_candidates() -> DecisionCase:
    return DecisionCase("eight-candidates", on_cpu())


def tie() -> DecisionCase:
    """Two candidates that the measurements do not tell apart."""
    card = on_cpu()
    before = _replaced(card, 1, ORT_FP32)
    changes = {"verdicts": card.verdicts[:2], "replaces": 1, "replaced": before}
    card = card.model_copy(update=changes)
    return DecisionCase("tie", card)


def failure() -> DecisionCase:
    """INT8 loses too many answers, most of them of one digit; FP32 is too slow for the SLO."""
    card = on_cpu()
    fp32, int8 = card.verdicts[:2]
    slow, quick = card.benchmarks
    verdicts = (
        fp32,
        _with_losses(int8, overall=(31, 3), slices={"digit=8": (14, 0), "stroke=thin": (17, 1)}),
    )
    benchmarks = (_too_slow(slow), quick)
    changes: dict[str, Any] = {
        "verdicts": verdicts,
        "benchmarks": benchmarks,
        "created_at": card.created_at + timedelta(hours=3),
        "replaces": 1,
        "replaced": _replaced(card, 1),
        "winner": None,
        "tied": (),
        "reason": choose(verdicts, benchmarks, _search()).reason,
    }
    return DecisionCase("failure", card.model_copy(update=changes))


def clear_win() -> DecisionCase:
    """A native TensorRT plan that sustains seven times what is live, waiting for an answer."""
    return DecisionCase("clear-win", _on_gpu(), events=_before(_on_gpu(with_plan=False)))


def rolled_back() -> DecisionCase:
    """That release, live for a morning: its promise was broken, and the watch rolled it back."""
    card = clear_win().scorecard
    before = _before(_on_gpu(with_plan=False))
    checks = tuple(_check(card, number) for number in range(1, 28))
    broken = str(checks[-1])
    told: tuple[tuple[float, dict[str, Any]], ...] = (
        (26, {"event": "approved", "who": "ada", "why": "seven times the rate, nothing lost"}),
        (27, {"event": "published", "who": "ada", "why": "seven times the rate", "release": 5}),
        (
            297.5,
            {"event": "promise broken", "who": "watch", "why": broken, "release": 5, "check": 27},
        ),
        (298, {"event": "rolled back", "who": "watch", "why": broken, "release": 4}),
    )
    events = tuple(
        _event(
            number,
            model=card.model,
            at=_after(card, minutes),
            origin="worker@serving-3, Prefect",
            **{"scorecard": card.digest, **what},
        )
        for number, (minutes, what) in enumerate(told, start=len(before))
    )
    return DecisionCase("rolled-back", card, (*before, *events), checks)


def decision_cases() -> tuple[DecisionCase, ...]:
    """Every case, by what people look for first."""
    return clear_win(), tie(), failure(), rolled_back(), eight_candidates()


def _with_losses(
    verdict: Verdict, overall: tuple[int, int], slices: Mapping[str, tuple[int, int]]
) -> Verdict:
    """The verdict if so many answers had been lost and gained, and outputs were that far apart."""
    counts = {f"evaluation/{part}": pair for part, pair in slices.items()}
    findings = tuple(
        _lossy(finding, counts.get(finding.scope, overall if finding.scope == "evaluation" else ()))
        for finding in verdict.findings
    )
    return verdict.model_copy(update={"findings": findings})


def _lossy(finding: Finding, pair: tuple[int, ...]) -> Finding:
    if finding.gate == "kl_p99" and pair:
        ends = {"value": 0.0213, "low": 0.0157, "high": 0.0309, "would_pass": 0.0309}
        return finding.model_copy(
            update={
                **ends,
                "outcome": Outcome.FAILED,
                "reason": "99th percentile of KL 0.0213 (95 % interval 0.0157 to 0.0309) > 0.005; "
                "919 samples, 44 above the limit",
                "remedy": "Calibrate on data like the evaluation data, or raise [repair] "
                "max_builds so that more layers may stay at FP32.",
            }
        )
    if not pair or not finding.gate.endswith("accuracy_loss"):
        return finding
    lost, gained = pair
    found = loss_interval(Pairs(lost, gained, finding.samples), _CONFIDENCE)
    limit = finding.limit or 0.0
    outcome = Outcome.PASSED
    if found.high > limit:
        outcome = Outcome.FAILED if found.low > limit else Outcome.INCONCLUSIVE
    relation = "<=" if outcome is Outcome.PASSED else ">"
    return finding.model_copy(
        update={
            "value": found.value,
            "low": found.low,
            "high": found.high,
            "outcome": outcome,
            "would_pass": found.high,
            "reason": f"accuracy loss {found.value:.4g} (95 % interval {found.low:.4g} to "
            f"{found.high:.4g}) {relation} {limit:g}; {finding.samples} samples, {lost} lost, "
            f"{gained} gained",
            "remedy": ""
            if outcome is Outcome.PASSED
            else "Keep the layers that lose most at FP32 ([repair]), or take int8 out of the "
            "policy.",
        }
    )


def _too_slow(benchmark: Benchmark) -> Benchmark:
    """The benchmark if the server had been busy: no configuration meets 100 ms at 200/s."""
    slow = [
        measurement.model_copy(
            update={
                "load": measurement.load.model_copy(update={"rate_per_s": 200.0}),
                "throughput_per_s": 196.4 + number,
                "percentiles": tuple(
                    _percentile(p.quantile, 84.0 * p.value_ms / 1.4 + 9.0 * number, 514)
                    for p in measurement.percentiles
                ),
            }
        )
        for number, measurement in enumerate(benchmark.measurements[:4])
    ]
    p99 = slow[0].p99
    assert p99 is not None
    reason = (
        f"no configuration met the SLO (all were measured); nearest: p99 {p99.value_ms:.4g} ms > "
        f"100 ms at 200/s ({slow[0].config}): 61 of 514 requests over the limit, which shows that "
        "the SLO is not met (confidence 0.95)"
    )
    remedy = "computing is 68% of the mean server time: use a faster precision or engine"
    latency, throughput, *others = benchmark.findings
    numbers = {"value": p99.value_ms, "low": p99.low_ms, "high": p99.high_ms, "samples": 514}
    failed = {"outcome": Outcome.FAILED, "remedy": remedy}
    findings = (
        latency.model_copy(update={**numbers, **failed, "reason": reason}),
        throughput.model_copy(
            update={
                **failed,
                "value": 0.0,
                "samples": 0,
                "reason": "no rate is shown to meet the latency SLO",
            }
        ),
        *(f for f in others if f.gate == "overload"),
    )
    return benchmark.model_copy(
        update={
            "measurements": tuple(slow),
            "chosen": None,
            "throughput_at_slo_per_s": 0.0,
            "confirmed_rate_per_s": None,
            "decisions": tuple(
                PointDecision(
                    config=m.config,
                    rate_per_s=200.0,
                    outcome=Outcome.FAILED,
                    requests=514,
                    over=61 + 11 * number,
                )
                for number, m in enumerate(slow)
            ),
            "p99_at_slo": None,
            "findings": findings,
            "pareto": (),
            "reasons": {},
        }
    )


@cache
def _on_gpu(*, with_plan: bool = True) -> Scorecard:
    """A ResNet-50 on one H200; without the plan: the qualification that was approved before."""
    on_cpu_ = on_cpu()
    served = (_by_runner(ORT_TF32, "tf32"), _by_runner(ORT_FP16, "fp16"))
    benchmarks = (*served, _by_plan(served[1])) if with_plan else served
    judged = tuple(_judged(benchmark.candidate) for benchmark in benchmarks)
    verdicts = (*judged, _unbuilt()) if with_plan else judged
    chosen = choose(verdicts, benchmarks, _search())
    machine = json.loads((_ON_GPU / "gpu_tensorrt_h200.json").read_text())["machine"]
    return on_cpu_.model_copy(
        update={
            "model": "digits-resnet50",
            "model_uri": f"models:/digits-resnet50/{3 if with_plan else 2}",
            "created_at": on_cpu_.created_at - timedelta(days=0 if with_plan else 9),
            "onnx_sha256": _digest("resnet50", with_plan),
            "policy_sha256": _digest("policy"),
            "environment": {
                "cuda": "13.0",
                "enginegate": on_cpu_.environment["enginegate"],
                "gpu": machine["gpu"],
                "onnxruntime": machine["onnxruntime"],
                "processor": "16 x Intel(R) Xeon(R) Platinum 8468",
                "python": machine["python"],
                "tensorrt": "8.6.0",
                "torch": machine["torch"],
                "triton": "2.51.0",
            },
            "verdicts": verdicts,
            "benchmarks": benchmarks,
            "replaces": 4 if with_plan else 3,
            "replaced": _replaced(_on_gpu(with_plan=False), 4) if with_plan else None,
            "winner": chosen.winner,
            "reason": chosen.reason,
            "tied": chosen.tied,
            "unmeasured": {TRT_INT8.name: "its engine could not be built"} if with_plan else {},
            "mlflow_run": "5f0c1b7e9d8a4b43a1d2c39a70be6631",
            "engine_speeds": tuple(_alone(b.candidate) for b in benchmarks),
            "eager_speeds": (),
        }
    )


def _judged(candidate: Candidate) -> Verdict:
    """The real findings about INT8, with the losses and distances of a 16-bit engine."""
    int8 = on_cpu().verdicts[1]
    overall, part = ((1, 0), {"digit=8": (1, 0), "stroke=thin": (1, 0)})
    if candidate == ORT_TF32:
        overall, part = (0, 0), {}
    judged = _near(_with_losses(int8, overall, part), candidate)
    return judged.model_copy(
        update={"candidate": candidate, "engine_sha256": _digest(candidate.name)}
    )


def _near(verdict: Verdict, candidate: Candidate) -> Verdict:
    """With the distances to FP32 of that precision, and its proof of precision and device."""
    ratio = _DIVERGENCE[candidate.precision]
    real = {(f.gate, f.scope): f for f in on_cpu().verdicts[1].findings}
    device = "sm90 NVIDIA H200" if candidate.kind == "tensorrt" else "CUDAExecutionProvider"
    reasons = {
        "runnable": f"ran on {device}",
        "precision_proof": f"Conv, Gemm and MatMul layers: 54 {candidate.precision}; 0 fed by Q/DQ "
        "pairs.",
    }
    found = []
    for finding in verdict.findings:
        before = real[finding.gate, finding.scope]
        if finding.gate in reasons:
            samples = 54 if finding.gate == "precision_proof" else 0
            found.append(
                before.model_copy(update={"reason": reasons[finding.gate], "samples": samples})
            )
        elif finding.gate in {"kl_p99", "max_abs_error"}:
            found.append(_scaled(before, ratio))
        elif finding.gate not in {"sqnr", "cosine_p1"}:
            found.append(finding)
    return verdict.model_copy(update={"findings": tuple(found)})


def _scaled(finding: Finding, ratio: float) -> Finding:
    value, low, high = (
        None if number is None else number * ratio
        for number in (finding.value, finding.low, finding.high)
    )
    interval = f" (95 % interval {low:.4g} to {high:.4g})" if low is not None else ""
    noun = "99th percentile of KL" if finding.gate == "kl_p99" else "largest absolute error"
    above = ", 0 above the limit" if finding.gate == "kl_p99" else ""
    return finding.model_copy(
        update={
            "value": value,
            "low": low,
            "high": high,
            "would_pass": high or value,
            "reason": f"{noun} {value:.4g}{interval} <= {finding.limit:g}; {finding.samples} "
            f"samples{above}",
        }
    )


def _unbuilt() -> Verdict:
    finding = Finding(
        gate="build",
        scope="engine",
        outcome=Outcome.FAILED,
        reason="could not be built: no report within 300 s, status timeout; last step: timing "
        "layers, 30 of 131",
        remedy="Raise [tensorrt] timeout_s, or take this candidate out of the policy.",
    )
    return Verdict(candidate=TRT_INT8, engine_sha256=None, findings=(finding,))


def _by_runner(candidate: Candidate, precision: str) -> Benchmark:
    """ONNX Runtime in the Python backend, with the measurements that were made on the H200."""
    cases = json.loads((_ON_GPU / "gpu_serving_h200.json").read_text())["cases"]
    case = next(c for c in cases if c["case"] == f"resnet50 {precision}, 8 rows a request")
    measurements = tuple(_recorded(m) for m in case["measured"][0]["measurements"])
    rate = case["found_per_s"] / _ROWS
    config = ServingConfig(max_batch_size=128, max_queue_delay_us=0, instances=4, gpus=(0,))
    p99 = _percentile(0.99, case["p99_ms"], 6654)
    return _benchmark(candidate, measurements, config, rate, p99).model_copy(
        update={"rejected_rate_per_s": 1.05 * rate, "cold_start_s": 2.84}
    )


def _recorded(entry: Mapping[str, Any]) -> Measurement:
    words = entry["config"].split()
    config = ServingConfig(
        max_batch_size=int(words[2].rstrip(",")),
        max_queue_delay_us=int(words[4]),
        instances=int(words[6]),
        gpus=(0,),
    )
    stages = StageSplit(**entry["stages"])
    rate, p99_ms = entry["rate_per_s"], entry["p99_ms"]
    samples = max(400, round(4 * rate))
    p50_ms = min(0.8 * p99_ms, stages.server_ms + (stages.client_ms or 0.0))
    known = {name: value for name, value in entry["resources"].items() if value is not None}
    return _measurement(config, rate, (p50_ms, p99_ms), samples, stages).model_copy(
        update={
            "throughput_per_s": entry["throughput_per_s"],
            "late_p99_ms": entry["late_p99_ms"],
            "resources": Resources(**known),
        }
    )


# Offered requests a second, p50 and p99 in ms, mean batch in rows, over the limit.
_PLAN_POINTS = (
    (357.8, 3.9, 6.1, 9.2, 0),
    (1000.0, 4.6, 7.4, 14.8, 0),
    (2000.0, 6.0, 10.3, 27.1, 0),
    (3000.0, 8.1, 14.9, 46.0, 0),
    (3800.0, 10.7, 19.6, 68.3, 0),
    (4498.24, 14.8, 26.66, 96.4, 0),
    (4723.15, 21.9, 44.9, 111.2, 149),
    (4959.3, 33.6, 71.4, 119.8, 562),
    (6072.624, 812.0, 1630.0, 127.6, 11149),
)
_PLAN_REQUESTS = {4498.24: 16285, 4723.15: 25417, 4959.3: 4430, 6072.624: 11155}


def _by_plan(live: Benchmark) -> Benchmark:
    """TensorRT's native backend, as it was searched and confirmed on the H200."""
    measured = [_plan_point(PLAN_CONFIG, *point[:4]) for point in _PLAN_POINTS]
    alone = PLAN_CONFIG.model_copy(update={"instances": 1})
    prompt = PLAN_CONFIG.model_copy(update={"max_queue_delay_us": 0})
    measured += [
        _plan_point(alone, 3000.0, 9.6, 21.3, 61.0),
        _plan_point(alone, 4498.24, 41.0, 96.2, 124.0),
        _plan_point(prompt, 3000.0, 7.8, 15.8, 41.2),
        _plan_point(prompt, 4498.24, 15.9, 31.4, 93.7),
    ]
    late = _plan_point(PLAN_CONFIG, 5200.0, 44.0, 93.0, 121.0).model_copy(
        update={
            "invalid": ("311 of 10,400 requests were sent later than 12.5 ms: the sender was busy",)
        }
    )
    decisions = tuple(
        PointDecision(
            config=PLAN_CONFIG,
            rate_per_s=rate,
            outcome=_met(over),
            requests=_PLAN_REQUESTS.get(rate, 2000),
            over=over,
        )
        for rate, _, _, _, over in _PLAN_POINTS
    )
    p99 = Percentile(quantile=0.99, value_ms=26.655, low_ms=26.334, high_ms=27.015, samples=16285)
    rival = Rival(
        release=4,
        rate_per_s=619.078,
        candidate_p99_ms=(6.4, 6.2, 6.5),
        champion_p99_ms=(34.0, 31.6, 36.8),
        noise_ms=4.9,
        champion_throughput_per_s=live.throughput_at_slo_per_s,
        champion_rejected_per_s=650.0,
    )
    found = _benchmark(TRT_FP16, (*measured, late), PLAN_CONFIG, 4498.24, p99)
    overload = Finding(
        gate="overload",
        scope="benchmark",
        outcome=Outcome.PASSED,
        reason="4,799/s served of 6,073/s offered, 107% of the answer's throughput >= 90%; 0.0% "
        "failed",
        value=1.07,
        limit=0.9,
        relation=">=",
        advisory=True,
    )
    return found.model_copy(
        update={
            "decisions": decisions,
            "findings": (*found.findings, overload, champion_finding(rival)),
            "rejected_rate_per_s": 4959.3,
            "cold_start_s": 0.2806,
            "rival": rival,
            "engine_bytes": 52_323_942,
        }
    )


def _met(over: int) -> Outcome:
    if over == 0:
        return Outcome.PASSED
    return Outcome.INCONCLUSIVE if over == 149 else Outcome.FAILED


def _plan_point(
    config: ServingConfig, rate: float, p50_ms: float, p99_ms: float, batch: float
) -> Measurement:
    queue_ms = max(0.3, 0.55 * (p50_ms - 3.4))
    stages = StageSplit(
        queue_ms=queue_ms,
        compute_input_ms=0.31,
        compute_infer_ms=max(0.6, 0.78 * (p50_ms - queue_ms)),
        compute_output_ms=0.09,
        mean_batch_size=batch,
        client_ms=0.7,
    )
    samples = _PLAN_REQUESTS.get(rate, 2000)
    served = min(rate, 4799.0) if config == PLAN_CONFIG else rate
    found = _measurement(config, rate, (p50_ms, p99_ms), samples, stages)
    resources = Resources(
        gpu_utilisation=min(0.97, 0.12 + rate / 5300),
        gpu_memory_bytes=int(3.9e9),
        gpu_model_bytes=int(1.17e9),
        gpu_power_w=180 + 0.09 * served,
    )
    return found.model_copy(update={"throughput_per_s": served, "resources": resources})


def _benchmark(
    candidate: Candidate,
    measurements: tuple[Measurement, ...],
    config: ServingConfig,
    rate: float,
    p99: Percentile,
) -> Benchmark:
    """Confirmed at that rate; decisions by whether each measurement's p99 is within the SLO."""
    per_s = f"{rate:,.0f}/s"
    shown = f"p99 {p99.value_ms:.4g} ms <= {_SLO_MS:g} ms at {per_s} ({config}): 0 of {p99.samples}"
    throughput = f"{per_s} >= {_LEAST_PER_S:g}/s within the latency SLO ({config})"
    return Benchmark(
        candidate=candidate,
        engine_sha256=_digest(candidate.name),
        server=_SERVER,
        measurements=measurements,
        chosen=config,
        throughput_at_slo_per_s=rate,
        confirmed_rate_per_s=rate,
        ceiling_per_s=_CEILING_PER_S,
        generator_per_s=_CEILING_PER_S,
        decisions=tuple(
            PointDecision(
                config=m.config,
                rate_per_s=m.rate_per_s,
                outcome=Outcome.PASSED if m.p99 and m.p99.value_ms <= _SLO_MS else Outcome.FAILED,
                requests=m.sent,
                over=0 if m.p99 and m.p99.value_ms <= _SLO_MS else m.sent // 30,
            )
            for m in measurements
        ),
        engine_bytes={"tf32": 102_186_510, "fp16": 51_220_384}[candidate.precision],
        p99_at_slo=p99,
        findings=(
            Finding(
                gate="p99_ms",
                scope="benchmark",
                outcome=Outcome.PASSED,
                reason=f"{shown} requests over the limit, which shows that the SLO is met "
                "(confidence 0.99)",
                value=p99.value_ms,
                limit=_SLO_MS,
                relation="<=",
                unit="ms",
                low=p99.low_ms,
                high=p99.high_ms,
                samples=p99.samples,
            ),
            Finding(
                gate="throughput",
                scope="benchmark",
                outcome=Outcome.PASSED,
                reason=throughput,
                value=rate,
                limit=_LEAST_PER_S,
                relation=">=",
                unit="1/s",
                samples=p99.samples,
            ),
        ),
        backend="tensorrt" if candidate.kind == "tensorrt" else "python",
        rows_per_request=_ROWS,
        reasons={
            "gpus": "none is the only value in the search space",
            "instances": f"{config.instances} was confirmed at {per_s}; "
            f"{max(1, config.instances // 2)} sustained {0.7 * rate:,.0f}/s at most",
            "max_batch_size": f"128 was confirmed at {per_s}; 32 sustained {0.44 * rate:,.0f}/s "
            "at most",
            "max_queue_delay_us": f"{config.max_queue_delay_us} was confirmed at {per_s} with the "
            "lower p99",
            "preferred_batch_sizes": "none is the only value in the search space",
        },
        pareto=(Point(config=config, rate_per_s=rate, p99=p99, confirmed=True),),
    )


def _measurement(
    config: ServingConfig,
    rate: float,
    p50_p99_ms: tuple[float, float],
    samples: int,
    stages: StageSplit,
) -> Measurement:
    p50_ms, p99_ms = p50_p99_ms
    return Measurement(
        config=config,
        load=Load(rate_per_s=rate, duration_s=4.0, seed=1),
        invalid=(),
        sent=samples,
        completed=samples,
        failed=0,
        throughput_per_s=rate,
        percentiles=(
            _percentile(0.5, p50_ms, samples, 0.02),
            _percentile(0.9, p50_ms + 0.5 * (p99_ms - p50_ms), samples, 0.03),
            _percentile(0.99, p99_ms, samples),
        ),
        late_p99_ms=0.46,
        stages=stages,
        latencies_sha256=_digest(config, rate, p99_ms),
        generator=Generator(null_p50_ms=0.4, null_p99_ms=1.9, trusted_per_s=_CEILING_PER_S),
    )


def _percentile(quantile: float, value_ms: float, samples: int, half: float = 0.06) -> Percentile:
    return Percentile(
        quantile=quantile,
        value_ms=value_ms,
        low_ms=(1 - half) * value_ms,
        high_ms=(1 + 1.4 * half) * value_ms,
        samples=samples,
    )


# Samples a second without a server, batch size by batch size.
_ALONE = {
    ORT_TF32: {1: 402, 8: 2630, 32: 6904, 128: 10045},
    ORT_FP16: {1: 421, 8: 3011, 32: 8812, 128: 13992},
    TRT_FP16: {1: 1869, 8: 12867, 32: 29799, 128: 38547},
}


def _alone(candidate: Candidate) -> EngineSpeed:
    plan = candidate.kind == "tensorrt"
    return EngineSpeed(
        candidate=candidate,
        engine_sha256=_digest(candidate.name),
        device="sm90 NVIDIA H200" if plan else "CUDAExecutionProvider",
        inputs_on="device",
        graphs=plan,
        batches=tuple(
            BatchSpeed(batch_size=size, windows_per_s=(0.99 * rate, rate, 1.01 * rate), runs=40)
            for size, rate in _ALONE[candidate].items()
        ),
        opened_mib=1169.6 if plan else 3522.0,
    )


def _replaced(card: Scorecard, release: int, candidate: Candidate | None = None) -> ReplacedRelease:
    """The release of that scorecard's winner, or of another, as a later scorecard has it."""
    candidate = candidate or card.winner
    assert candidate is not None
    benchmark, verdict = card.benchmark(candidate), card.verdict(candidate)
    assert benchmark is not None
    assert benchmark.p99_at_slo is not None
    assert verdict is not None
    return ReplacedRelease(
        release=release,
        model_uri=card.model_uri,
        candidate=candidate,
        engine_sha256=benchmark.engine_sha256,
        scorecard_sha256=card.digest,
        promised_p99_ms=benchmark.p99_at_slo.value_ms,
        promised_per_s=benchmark.throughput_at_slo_per_s,
        engine_bytes=benchmark.engine_bytes,
        gpu_bytes=benchmark.gpu_bytes,
        qualified_at=card.created_at,
        onnx_sha256=card.onnx_sha256,
        evaluation_sha256=card.data.evaluation,
        benchmark=benchmark.model_copy(update={"measurements": ()}),
        loss=verdict.finding("accuracy_loss", "evaluation"),
        fp32_score=verdict.finding("accuracy_fp32", "evaluation"),
    )


def _before(card: Scorecard) -> tuple[Event, ...]:
    """How release 4 went live, an hour after its scorecard was made."""
    told: tuple[tuple[float, dict[str, Any]], ...] = (
        (55, {"event": "approved", "why": "twice the rate of TF32 at the same accuracy"}),
        (60, {"event": "published", "why": "twice the rate of TF32", "release": 4}),
    )
    return tuple(
        _event(
            number,
            model=card.model,
            at=_after(card, minutes),
            who="grace",
            origin="grace@build-7, command",
            scorecard=card.digest,
            **what,
        )
        for number, (minutes, what) in enumerate(told)
    )


def _event(number: int, **fields: Any) -> Event:
    return Event(**{"sequence": number, "previous": GENESIS, **fields})


def _check(card: Scorecard, number: int) -> WatchCheck:
    """One of 27, ten minutes apart; in the last, requests wait in the queue."""
    broken = number == 27
    found_ms, relation = (31.7, ">") if broken else (6.0 + 0.1 * (number % 5), "<=")
    late = (212, "surely > 1 %") if broken else (0, "within 1 %")
    findings = (
        Finding(
            gate="server_time",
            scope="live",
            outcome=Outcome.FAILED if broken else Outcome.PASSED,
            reason=f"mean {found_ms:.1f} ms {relation} 14.2 ms at 3,980/s",
            value=found_ms,
            limit=14.2,
            relation="<=",
            unit="ms",
        ),
        Finding(
            gate="latency",
            scope="live",
            outcome=Outcome.FAILED if broken else Outcome.PASSED,
            reason=f"{late[0]} of 4,860 requests of ours took more than 50 ms ({late[1]})",
            samples=4860,
        ),
    )
    return WatchCheck(
        model=card.model,
        version=5,
        release_sha256=_digest("release", 5),
        number=number,
        at=_after(card, 27 + 10 * number),
        intensive=number <= 6,
        reading=None,
        findings=findings,
        action="rollback" if broken else "none",
    )


def _after(card: Scorecard, minutes: float) -> datetime:
    return card.created_at + timedelta(minutes=minutes)


@cache
def _search() -> Search:
    return read_policy(_ROOT / "policies" / "digits.toml").search


def _digest(*parts: object) -> str:
    return sha256_bytes("|".join(map(str, parts)).encode())
