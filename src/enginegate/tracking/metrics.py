"""Parameters, metrics and tags in MLflow, of candidates and of checks of what is live.

MLflow's charts print two decimals and make one section of all names with the same beginning, sorted
by name. So a name is ``section/what_unit``, each unit is chosen to survive two decimals, and the
sections sort as people ask: is it still right (``acc``; ``answers`` where the task's score is not
accuracy), did it pass (``gate``), how fast is it
(``perf``, then ``perf_by_load``), how large (``size``). A changed name breaks saved charts.

A candidate's run has at most ``MOST_METRICS``: the rest is in files (`evidence_tables`), and so is
every number of an emulation, which decides nothing and would be drawn beside measured ones.
"""

from collections import defaultdict
from statistics import median

from enginegate.candidate import Candidate, Engine
from enginegate.decision import Promise
from enginegate.evidence import Benchmark, Finding, Scorecard
from enginegate.measurement import Load
from enginegate.watch.log import WatchCheck

MOST_METRICS = 15
CHANGE = "acc/change_pp"
# Of a task that is scored otherwise: in percentage points, and in the score's own unit.
OTHER_CHANGES = ("answers/change_pp", "answers/change")
CURVE = "perf_by_load/p99_ms"
P99 = "perf/p99_ms"
RATE = "perf/throughput_at_slo_per_s"
RANK = "gate/rank"
_DECIMALS = 6
_KIB = 1024
_PERCENT = 100.0
# What the labelled data decided; the other numbers are of requests, or of no data.
_OF_EVALUATION = ("acc/", "answers/", "gate/")


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
    """One candidate's numbers by their name in MLflow; what was not measured is absent."""
    benchmark, speed = scorecard.benchmark(candidate), scorecard.engine_speed(candidate)
    found: dict[str, float | None] = {
        "gate/outcome_0_is_passed": float(scorecard.outcome(candidate)),
        RANK: 1.0 + scorecard.ranked.index(candidate),
        **_accuracy_metrics(scorecard, candidate),
        **(_benchmark_metrics(scorecard, benchmark) if benchmark else {}),
        "size/engine_kib": engine.file.size_bytes / _KIB if engine else None,
        "size/engine_device_memory_mib": speed.largest_batch_mib if speed else None,
    }
    return _rounded(found)


def _accuracy_metrics(scorecard: Scorecard, candidate: Candidate) -> dict[str, float | None]:
    """The change against FP32 on labelled data (positive is better), and the worst slice's."""
    verdict = scorecard.verdict(candidate)
    loss = verdict.task_loss if verdict else None
    if verdict is None or loss is None:
        return {}
    by_slice = [f for f in verdict.task_losses if "/" in f.scope and f.measure == loss.measure]
    unit = "_pp" if loss.in_points else ""
    section = _section(loss)

    def change(number: float | None) -> float | None:
        return None if number is None else loss.as_change(number)

    return {
        f"{section}/change{unit}": change(loss.value),
        f"{section}/change_{'high' if loss.of_error else 'low'}{unit}": change(loss.high),
        f"{section}/worst_slice_change{unit}": change(
            max((f.value for f in by_slice if f.value is not None), default=None)
        ),
        **_own_score(scorecard),
    }


def _section(score: Finding) -> str:
    return "acc" if score.measure == "accuracy" else "answers"


def _own_score(scorecard: Scorecard) -> dict[str, float | None]:
    """FP32's own score on all labelled data."""
    score = next((f for f in scorecard.fp32_scores if "/" not in f.scope), None)
    if score is None or score.value is None:
        return {}
    if score.unit == "fraction":
        return {f"{_section(score)}/fp32_pct": _PERCENT * score.value}
    return {f"{_section(score)}/fp32": score.value}


def _benchmark_metrics(scorecard: Scorecard, benchmark: Benchmark) -> dict[str, float | None]:
    measured = benchmark.at_slo
    half = measured.percentile(0.5) if measured else None
    share = scorecard.engine_share(benchmark.candidate)
    return {
        RATE: benchmark.throughput_at_slo_per_s,
        P99: benchmark.p99_at_slo.value_ms if benchmark.p99_at_slo else None,
        "perf/p50_ms": half.value_ms if half else None,
        "perf/served_share_of_engine_pct": None if share is None else _PERCENT * share,
        "perf/cost_per_million": benchmark.cost_per_million,
        "perf/cold_start_s": benchmark.cold_start_s,
    }


def latency_curve(benchmark: Benchmark | None) -> dict[int, float]:
    """p99 in milliseconds by offered requests a second, of the configuration that was chosen.

    The rate is the metric's step, which MLflow draws as a line. Where several valid measurements
    were made at a rate, their median; where nothing was chosen, the first configuration tried.
    """
    if benchmark is None or not benchmark.measurements:
        return {}
    config = benchmark.chosen or benchmark.measurements[0].config
    seen: defaultdict[int, list[float]] = defaultdict(list)
    for each in benchmark.measurements:
        if each.config == config and not each.invalid and isinstance(each.load, Load) and each.p99:
            seen[round(each.load.rate_per_s)].append(each.p99.value_ms)
    return {rate: round(median(seen[rate]), _DECIMALS) for rate in sorted(seen)}


def is_of_evaluation(metric: str) -> bool:
    """Whether a metric was made on the labelled data, which a logged model's metric then names."""
    return metric.startswith(_OF_EVALUATION)


def winner_metrics(scorecard: Scorecard, engine: Engine | None) -> dict[str, float]:
    """The parent run's metrics: the winner's, so that qualifications compare over time."""
    outcomes = [scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts]
    counts = {
        "gate/candidates": float(len(outcomes)),
        "gate/candidates_passed": float(sum(outcome == 0 for outcome in outcomes)),
    }
    if scorecard.winner is None:
        # Without a winner FP32's own score often says why.
        return counts | _rounded(_own_score(scorecard))
    own = metrics_of(scorecard, scorecard.winner, engine)
    del own[RANK], own["gate/outcome_0_is_passed"]  # a winner has passed, and is the first
    return counts | own


def limits_of(scorecard: Scorecard) -> dict[str, str]:
    """The limits that candidates were judged by, as parameters, by gate.

    Where precisions have different limits, all of them, each once.
    """
    limits: defaultdict[str, dict[str, None]] = defaultdict(dict)
    judged = [f for verdict in scorecard.verdicts for f in verdict.findings]
    for finding in (*judged, *(f for b in scorecard.benchmarks for f in b.findings)):
        if finding.advisory or finding.limit is None or finding.relation is None:
            continue
        limits[finding.gate][_limit_text(finding)] = None
    return {f"limit.{gate}": ", ".join(texts) for gate, texts in sorted(limits.items())}


def _limit_text(finding: Finding) -> str:
    unit = {"fraction": "", "": ""}.get(finding.unit, f" {finding.unit}")
    return f"{finding.relation} {finding.limit:g}{unit}"


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
    return _rounded(found)


def _rounded(found: dict[str, float | None]) -> dict[str, float]:
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
