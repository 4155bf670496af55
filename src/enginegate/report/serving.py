"""The content of reports on benchmarks, before it is laid out. Nothing is decided here.

Validity comes first: of each configuration so many measurements may be used, and only from those
its best is taken. n/a means that a number was not measured.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from enginegate.candidate import Candidate
from enginegate.evidence import (
    Benchmark,
    EngineSpeed,
    Finding,
    Pattern,
    Roofline,
    Scorecard,
)
from enginegate.measurement import P99, Measurement, Percentile
from enginegate.measuring.bottleneck import explain_p99, latency_breakdown
from enginegate.messages import per_second, short_number
from enginegate.policy.benchmarking import Slo
from enginegate.records import Record
from enginegate.report.content import (
    MISSING,
    change_text,
    change_unit,
    one_line,
    percentile_text,
    speed_sentence,
)
from enginegate.serving import ServingConfig

SERVING_COLUMNS = (
    "configuration",
    "valid",
    "sustained, req/s",
    "p99 there, ms",
    "requests",
    "mean batch",
    "largest part",
)
_TAIL = 0.999


class ServingReport(Record):
    """Everything a benchmark run found, as JSON for other programs."""

    schema_version: Literal[1] = 1
    model: str
    model_uri: str
    slo: Slo
    candidates: tuple[Benchmark, ...]
    winner: Candidate | None
    reason: str
    tied: tuple[Candidate, ...] = ()
    engine_speeds: tuple[EngineSpeed, ...] = ()
    engine_shares: dict[str, float] = Field(
        default_factory=dict, description="candidate -> served within the SLO over its engine alone"
    )
    speed_findings: tuple[Finding, ...] = ()

    def alone_sentences(self, candidate: Candidate) -> tuple[str, ...]:
        """A candidate's engine without a server, and what that says about how it is served."""
        speed = next((s for s in self.engine_speeds if s.candidate == candidate), None)
        said = speed_sentence(speed, self.engine_shares.get(candidate.name)) if speed else ""
        found = (f for f in self.speed_findings if f.scope == candidate.name)
        sentences = (said, *(f"{one_line(f.reason).rstrip('.')}." for f in found))
        return tuple(sentence for sentence in sentences if sentence)

    @property
    def best(self) -> Benchmark | None:
        """The winner's benchmark."""
        return next((b for b in self.candidates if b.candidate == self.winner), None)


class ServingRow(NamedTuple):
    """One configuration's line, as text, in the order of `SERVING_COLUMNS`."""

    configuration: str
    valid: str
    held: str
    p99: str
    requests: str
    batch: str
    largest: str


def serving_report(card: Scorecard, slo: Slo) -> ServingReport:
    """The serving report of a scorecard."""
    return ServingReport(
        model=card.model,
        model_uri=card.model_uri,
        slo=slo,
        candidates=card.benchmarks,
        winner=card.winner,
        reason=card.reason,
        tied=card.tied,
        engine_speeds=card.engine_speeds,
        engine_shares={
            speed.candidate.name: share
            for speed in card.engine_speeds
            if (share := card.engine_share(speed.candidate)) is not None
        },
        speed_findings=card.speed_findings,
    )


def accuracies(card: Scorecard) -> dict[Candidate, str]:
    """Each candidate's change of its task's score against FP32, in words, where it was judged."""
    found = {verdict.candidate: verdict.task_loss for verdict in card.verdicts}
    return {
        candidate: " ".join(filter(None, (loss.measure, change_text(loss), change_unit(loss))))
        for candidate, loss in found.items()
        if loss is not None
    }


def serving_rows(benchmark: Benchmark, slo_p99_ms: float) -> tuple[ServingRow, ...]:
    """One row for each configuration, the best first; the chosen one is marked."""
    groups = by_configuration(benchmark)
    bests = {config: best_of(measured, slo_p99_ms) for config, measured in groups.items()}
    order = sorted(groups, key=lambda config: _rank(benchmark, config, bests[config], slo_p99_ms))
    return tuple(_row(benchmark, c, groups[c], bests[c], slo_p99_ms) for c in order)


def by_configuration(benchmark: Benchmark) -> dict[ServingConfig, list[Measurement]]:
    """Measurements of each configuration, in the order they were made."""
    groups: dict[ServingConfig, list[Measurement]] = {}
    for measured in benchmark.measurements:
        groups.setdefault(measured.config, []).append(measured)
    return groups


def best_of(measured: Sequence[Measurement], slo_p99_ms: float) -> Measurement | None:
    """The highest rate at which p99 was within the limit; else the lowest p99; of valid ones."""
    valid = [(m, p) for m in measured if not m.invalid and (p := m.p99)]
    held = [m for m, p in valid if p.value_ms <= slo_p99_ms]
    if held:
        return max(held, key=lambda m: (m.rate_per_s, m.completed))
    return min(valid, key=lambda pair: pair[1].value_ms, default=(None, None))[0]


def serving_sentences(benchmark: Benchmark, slo: Slo) -> tuple[str, ...]:
    """One candidate in words: validity, result, what eats the time, who measured, what it costs."""
    invalid = [m for m in benchmark.measurements if m.invalid]
    count = len(benchmark.measurements)
    sentences = [
        f"{count - len(invalid)} of {count} measurements are valid, on {benchmark.server}."
    ]
    if invalid:
        sentences.append(f"The last invalid one: {one_line(invalid[-1].invalid[0])}.")
    sentences += _result(benchmark)
    nearest = benchmark.at_slo or best_of(benchmark.measurements, slo.p99_ms)
    if nearest is not None:
        sentences += [explain_p99(nearest, slo.p99_ms), generator_sentence(nearest)]
    sentences += [_keeping_up(benchmark), *_standing(benchmark)]
    sentences += pattern_sentences(benchmark.patterns)
    return tuple(sentence for sentence in sentences if sentence)


def generator_sentence(measured: Measurement) -> str:
    """Who sent the load, and what sending alone costs."""
    sender = measured.generator
    processes = "process" if sender.processes == 1 else "processes"
    who = f"{sender.driver} ({sender.processes} {processes}, the busiest {sender.cpu_share:.0%} of"
    clauses = [
        f"Sent by {who} a processor), late by {short_number(measured.late_p99_ms, 2)} ms at p99"
    ]
    if sender.null_p50_ms is not None and sender.null_p99_ms is not None:
        clauses.append(
            f"a model that does nothing answers it in {short_number(sender.null_p50_ms, 2)} "
            "ms (p50) and "
            f"{short_number(sender.null_p99_ms, 2)} ms (p99)"
        )
    if sender.trusted_per_s is not None:
        clauses.append(f"it was shown to keep up with {per_second(sender.trusted_per_s)}")
    return "; ".join(clauses) + "."


def pattern_sentences(patterns: Sequence[Pattern]) -> Iterator[str]:
    """How the tail moves under each heavier mix, against the recorded one."""
    recorded = next((p for p in patterns if p.name == "recorded"), None)
    for pattern in patterns:
        if pattern is not recorded:
            yield (
                f"Under a heavier mix ({pattern.name}, {per_second(pattern.rate_per_s)}): "
                + ", ".join(_moved(pattern, recorded, quantile) for quantile in (0.5, P99, _TAIL))
                + f"; {pattern.failed_share:.2%} failed. Shown only, decides nothing."
            )


def roofline_sentence(roofline: Roofline) -> str:
    """Whether arithmetic or memory traffic limits the engine."""
    if roofline.bound == "unknown":
        return "Whether it is bound by arithmetic or by memory is not known here."
    what = "arithmetic" if roofline.bound == "compute" else "memory traffic"
    intensity = roofline.flops / roofline.bytes_moved if roofline.bytes_moved else 0.0
    sentence = (
        f"At a batch of {roofline.batch_size} it is {roofline.bound}-bound: {intensity:.3g} "
        f"operations for each byte, so {what} is its limit on this device"
    )
    if roofline.reached is not None:
        sentence += f", of which it reaches {roofline.reached:.0%}"
    return f"{sentence}."


def _result(benchmark: Benchmark) -> Iterator[str]:
    if benchmark.chosen is None:
        blocking = [f for f in benchmark.findings if not f.advisory and f.outcome]
        yield from (
            f"{f.gate}: {f.outcome.word}: {one_line(f.reason)}"
            + (f" -> {one_line(f.remedy)}" if f.remedy else "")
            for f in blocking
        )
        return
    p99 = benchmark.p99_at_slo
    over = f" over {p99.samples:,} requests" if p99 else ""
    sentence = (
        f"Chosen: {benchmark.chosen}. Confirmed at {benchmark.throughput_text} "
        f"requests/s{benchmark.rows_text} with a p99 of {percentile_text(p99)} ms{over}"
    )
    if benchmark.rejected_rate_per_s is not None:
        sentence += f"; {per_second(benchmark.rejected_rate_per_s)} was not seen to meet the SLO"
    yield f"{sentence}."
    if benchmark.generator_limit_per_s is not None:
        yield (
            f"It serves ≥ {per_second(benchmark.throughput_at_slo_per_s)}; the generator, not the "
            f"server, is the limit: {per_second(benchmark.generator_limit_per_s)} could not be "
            "sent in time. Let more processors send, or let [load] driver be perf_analyzer."
        )
    if benchmark.cut_short:
        yield f"It may sustain more: {one_line(benchmark.cut_short)}."
    for finding in benchmark.findings:
        if finding.gate == "speedup" or finding.outcome:
            yield f"{finding.gate}: {finding.outcome.word}: {one_line(finding.reason)}."


def _keeping_up(benchmark: Benchmark) -> str:
    """That the sender was not shown to keep up with the confirmed rate; decides nothing."""
    shown, rate = benchmark.generator_per_s, benchmark.throughput_at_slo_per_s
    if shown is None or rate <= shown:
        return ""
    return (
        f"Against a do-nothing model the sender was shown to keep up with {per_second(shown)} "
        "only; "
        "above that, how late each measurement's own requests were speaks for it."
    )


def _standing(benchmark: Benchmark) -> Iterator[str]:
    """Cost, cold start, roofline, and the comparison with what is live."""
    if benchmark.cost_per_million is not None:
        yield (
            f"A million requests cost {benchmark.cost_per_million:.3g} {benchmark.currency} there."
        )
    if benchmark.cold_start_s is not None:
        yield f"From the load call to the first answer: {benchmark.cold_start_s:.2f} s."
    if benchmark.gpu_bytes:
        yield (
            f"It takes {benchmark.gpu_bytes / (1 << 20):,.0f} MiB of each GPU that it is placed "
            "on. Where a server has less than that to spare beside what is live, a promotion is "
            "refused; or, if the target's when_memory_is_short says so, what is live is unloaded "
            "first, and nobody is answered for as long as the new release takes to load."
        )
    if benchmark.roofline is not None:
        yield roofline_sentence(benchmark.roofline)
    rival = benchmark.rival
    if rival is not None:
        yield (
            f"In turns with live release {rival.release} at {per_second(rival.rate_per_s)}: p99 "
            f"{_mean(rival.candidate_p99_ms)} ms against {_mean(rival.champion_p99_ms)} ms, which "
            f"differs from itself by {short_number(rival.noise_ms, 2)} ms."
        )


def _mean(values_ms: Sequence[float]) -> str:
    return f"{sum(values_ms) / len(values_ms):.3g}" if values_ms else MISSING


def _moved(pattern: Pattern, recorded: Pattern | None, quantile: float) -> str:
    name = f"p{100 * quantile:g}"
    now, before = _find(pattern, quantile), _find(recorded, quantile)
    if now is None:
        return f"{name} falls on failed requests"
    sentence = f"{name} {short_number(now.value_ms)} ms"
    if before is not None and before.value_ms:
        sentence += f" ({now.value_ms / before.value_ms - 1.0:+.0%})"
    return f"{sentence} of {now.samples:,}"


def _find(pattern: Pattern | None, quantile: float) -> Percentile | None:
    found = pattern.percentiles if pattern else ()
    return next((p for p in found if p.quantile == quantile), None)


def _rank(
    benchmark: Benchmark, config: ServingConfig, best: Measurement | None, slo_p99_ms: float
) -> tuple[bool, bool, float, float]:
    p99 = best.p99 if best else None
    if best is None or p99 is None:
        return config != benchmark.chosen, True, 0.0, 0.0
    held = p99.value_ms <= slo_p99_ms
    return config != benchmark.chosen, not held, -best.rate_per_s if held else 0.0, p99.value_ms


def _row(
    benchmark: Benchmark,
    config: ServingConfig,
    measured: Sequence[Measurement],
    best: Measurement | None,
    slo_p99_ms: float,
) -> ServingRow:
    valid = sum(not m.invalid for m in measured)
    p99 = best.p99 if best else None
    held = best is not None and p99 is not None and p99.value_ms <= slo_p99_ms
    return ServingRow(
        configuration=f"{config} (chosen)" if config == benchmark.chosen else str(config),
        valid=f"{valid} of {len(measured)}",
        held=f"{best.rate_per_s:,.0f}" if best and held else "none",
        p99=percentile_text(p99)
        + ("" if held or best is None else f" at {per_second(best.rate_per_s)}"),
        requests=f"{best.completed + best.failed:,}" if best else "0",
        batch=f"{best.stages.mean_batch_size:.1f}" if best and best.stages else MISSING,
        largest=_largest(best),
    )


def _largest(best: Measurement | None) -> str:
    found = latency_breakdown(best.stages) if best and best.stages else ()
    return f"{found[0].name} {found[0].share:.0%}" if found else MISSING
