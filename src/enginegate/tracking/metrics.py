"""Parameters, metrics, tags and notes in MLflow, of candidates and of checks of what is live.

MLflow's charts print two decimals and make one section of all names with the same beginning, so a
name is ``section/what_unit`` and each unit is chosen to survive two decimals. A changed name breaks
saved charts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from enginegate.candidate import Candidate, Engine
from enginegate.decision import Promise
from enginegate.evidence import Benchmark, Finding, Scorecard, Verdict
from enginegate.measurement import Measurement
from enginegate.watch.log import WatchCheck

_DECIMALS = 6
_TAIL = 0.999
_KIB = 1024
_PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class _Scale:
    factor: float
    suffix: str


_SCALES = {
    "fraction": _Scale(100, "pct"),
    "nats": _Scale(1e6, "micronats"),
    "": _Scale(1e6, "millionths"),
}


def params_of(candidate: Candidate, benchmark: Benchmark | None) -> dict[str, str]:
    """The axes of a comparison: what was chosen, not what came out."""
    params = {"precision": candidate.precision.value, "kind": candidate.kind}
    if candidate.variant:
        params["variant"] = candidate.variant
    if benchmark and benchmark.chosen:
        params |= {
            name: str(value)
            for name, value in benchmark.chosen.model_dump(exclude_defaults=True).items()
        }
    return params


def metrics_of(
    scorecard: Scorecard, candidate: Candidate, engine: Engine | None
) -> dict[str, float]:
    """Flat numbers of one candidate, by their name in MLflow."""
    verdict, benchmark = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    metrics = {"gate/outcome_0_is_passed": float(scorecard.outcome(candidate))}
    if verdict:
        metrics |= _verdict_metrics(verdict)
    if benchmark:
        metrics |= _benchmark_metrics(benchmark)
    metrics |= dict(_alone_metrics(scorecard, candidate))
    if engine:
        metrics["size/engine_kib"] = engine.file.size_bytes / _KIB
        metrics["size/build_s"] = engine.build_s
        metrics["proof/quantised_layers"] = float(engine.proof.quantised_layers)
    return {name: round(value, _DECIMALS) for name, value in metrics.items()}


def _alone_metrics(scorecard: Scorecard, candidate: Candidate) -> Iterator[tuple[str, float]]:
    """The engine without a server; a number that was not measured is absent."""
    speed, share = scorecard.engine_speed(candidate), scorecard.engine_share(candidate)
    for batch in speed.batches if speed else ():
        yield f"perf/engine_alone_batch_{batch.batch_size}_samples_per_s", batch.samples_per_s
    if speed and speed.best:
        yield "perf/engine_alone_samples_per_s", speed.best.samples_per_s
    if speed and speed.largest_batch_mib is not None:
        yield "size/engine_device_memory_mib", speed.largest_batch_mib
    if share is not None:
        yield "perf/served_share_of_engine_pct", _PERCENT * share


def _verdict_metrics(verdict: Verdict) -> dict[str, float]:
    metrics = {
        "gate/findings": float(len(verdict.findings)),
        "gate/blocking_findings": float(len(verdict.blocking)),
    }
    for finding in verdict.findings:
        metrics |= dict(_finding_metrics(finding))
    return metrics


def _finding_metrics(finding: Finding) -> Iterator[tuple[str, float]]:
    if finding.value is None:
        return
    overall, _, part = finding.scope.partition("/")
    section = f"slice_{overall}" if part else "acc"
    what = f"{finding.gate}_{part}" if part else f"{overall}_{finding.gate}"
    scale = _SCALES.get(finding.unit, _Scale(1, _legal(finding.unit)))
    ends = (("", finding.value), ("_low", finding.low), ("_high", finding.high))
    for end, number in ends:
        if number is not None and not (part and end):
            yield f"{section}/{_legal(what)}{end}_{scale.suffix}", number * scale.factor


def _benchmark_metrics(benchmark: Benchmark) -> dict[str, float]:
    metrics = {"perf/throughput_at_slo_per_s": benchmark.throughput_at_slo_per_s}
    if benchmark.rows_per_request != 1.0:
        rows_per_s = benchmark.throughput_at_slo_per_s * benchmark.rows_per_request
        metrics["perf/rows_at_slo_per_s"] = rows_per_s
    if benchmark.p99_at_slo:
        metrics["perf/p99_ms"] = benchmark.p99_at_slo.value_ms
        for end in ("low_ms", "high_ms"):
            if (bound := getattr(benchmark.p99_at_slo, end)) is not None:
                metrics[f"perf/p99_{end}"] = bound
    measured = benchmark.at_slo
    if measured and (median := measured.percentile(0.5)):
        metrics["perf/p50_ms"] = median.value_ms
    if measured and measured.stages:
        stages = measured.stages.model_dump(exclude={"batches"}, exclude_none=True)
        metrics |= {f"perf/mean_{name.removeprefix('mean_')}": n for name, n in stages.items()}
    return metrics | dict(_serving_metrics(benchmark, measured))


def _serving_metrics(
    benchmark: Benchmark, measured: Measurement | None
) -> Iterator[tuple[str, float]]:
    """Further numbers of serving; a number that was not measured is absent."""
    tail = measured.percentile(_TAIL) if measured else None
    speedup = next((f.value for f in benchmark.findings if f.gate == "speedup"), None)
    known = {
        "p999_ms": tail.value_ms if tail else None,
        "rejected_per_s": benchmark.rejected_rate_per_s,
        "speedup": speedup,
        "cold_start_s": benchmark.cold_start_s,
        "cost_per_million": benchmark.cost_per_million,
        "joules_per_request": measured.resources.joules_per_request if measured else None,
        "generator_null_p99_ms": measured.generator.null_p99_ms if measured else None,
    }
    yield from ((f"perf/{name}", number) for name, number in known.items() if number is not None)
    for pattern in benchmark.patterns:
        found = next((p for p in pattern.percentiles if p.quantile == _TAIL), None)
        if found is not None:
            yield f"perf/p999_{_legal(pattern.name)}_ms", found.value_ms


def winner_metrics(scorecard: Scorecard, engine: Engine | None) -> dict[str, float]:
    """The parent run's metrics: the winner's, so that qualifications compare over time."""
    outcomes = [scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts]
    counts = {
        "gate/candidates": float(len(outcomes)),
        "gate/candidates_passed": float(sum(outcome == 0 for outcome in outcomes)),
    }
    if scorecard.winner:
        return counts | metrics_of(scorecard, scorecard.winner, engine)
    # Without a winner FP32's own score often says why.
    own = (metric for score in scorecard.fp32_scores for metric in _finding_metrics(score))
    return counts | {name: round(value, _DECIMALS) for name, value in own}


def live_metrics(check: WatchCheck, promise: Promise) -> dict[str, float]:
    """A check's numbers by their name in MLflow; what was promised is logged at every step too."""
    reading = check.reading
    found: dict[str, float | None] = {
        "gate/outcome_0_is_passed": float(check.outcome),
        "live/slo_p99_ms": promise.slo_p99_ms,
        "live/promised_per_s": promise.throughput_per_s,
        "live/promised_server_ms": promise.server_ms,
        "live/promised_p50_ms": promise.p50_ms,
    }
    if reading is not None:
        ended = max(reading.answered + reading.failed, 1)
        memory = reading.gpu_memory_share
        found |= {
            "live/arrived_per_s": reading.arrived_per_s,
            "live/answered_per_s": reading.answered / reading.lasted_s,
            "live/failed_pct": _PERCENT * reading.failed / ended,
            "live/server_ms": reading.server_ms,
            "live/queue_ms": reading.queue_ms,
            "live/pending_requests": reading.pending,
            "live/gpu_memory_pct": None if memory is None else _PERCENT * memory,
            "live/probe_median_ms": reading.probe.median_ms,
            "live/probe_slowest_ms": reading.probe.slowest_ms,
        }
    for finding in check.findings:
        if finding.gate in {"agreement", "slice_agreement"} and finding.value is not None:
            found[f"live/{finding.gate}_pct"] = _PERCENT * finding.value
        elif finding.gate == "input_drift":
            found["live/input_drift_psi"] = finding.value
    return {
        name: round(float(value), _DECIMALS) for name, value in found.items() if value is not None
    }


def shared_tags(scorecard: Scorecard) -> dict[str, str]:
    """Tags to find parent and children by; people approve a ``scorecard_sha256``."""
    digests = {f"data.{name}_sha256": d for name, d in scorecard.data.model_dump().items() if d}
    return digests | {
        "model": scorecard.model,
        "model_uri": scorecard.model_uri,
        "scorecard_sha256": scorecard.digest,
        "policy_sha256": scorecard.policy_sha256,
        "onnx_sha256": scorecard.onnx_sha256,
    }


def candidate_note(scorecard: Scorecard, candidate: Candidate) -> str:
    """Markdown for a child run's description: the outcome, and what keeps it from passing."""
    verdict, benchmark = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    findings = (*(verdict.findings if verdict else ()), *(benchmark.findings if benchmark else ()))
    blocking = [f for f in findings if not f.advisory and f.outcome > 0]
    lines = [f"**{scorecard.outcome(candidate).word}**", ""]
    lines += [f"- {f.outcome.word}: {f.gate} on {f.scope}: {f.reason} {f.remedy}" for f in blocking]
    if benchmark is None:
        why = scorecard.unmeasured.get(candidate.name)
        lines.append(f"- not benchmarked: {why}" if why else "- not benchmarked")
    return "\n".join(lines)


def _legal(name: str) -> str:
    """MLflow refuses ``@ ( ) % =`` and more in metric names."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
