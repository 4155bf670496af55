"""The pictures of the page `serving_page` makes. Each mark carries its candidate's series."""

from collections.abc import Iterator, Mapping, Sequence

from enginegate.candidate import Candidate
from enginegate.charts.svg import COLOURS, Canvas, ChartAxis, box, dot, line, path, text
from enginegate.evidence import Benchmark
from enginegate.measurement import Measurement, StageSplit
from enginegate.report.serving import P99, ServingReport
from enginegate.wording import per_second, short_number

STAGES = {
    "queueing": "#E69F00",
    "preparing inputs": "#56B4E9",
    "computing": "#0072B2",
    "returning outputs": "#009E73",
    "client and network": "#999999",
}
_GOOD, _NEAR, _BAD, _VOID = "#009E73", "#E69F00", "#D55E00", "#888888"
_NEARLY = 0.8
_BAR = 26.0
_RIGHT_HALF = 0.5
_NOTHING = "<p>Nothing was measured that could be shown here.</p>"


def colour(number: int) -> str:
    """The colour of the candidate of that number."""
    return COLOURS[number % len(COLOURS)]


def mark(candidate: int, measurement: int) -> str:
    """How a measurement is named on the page."""
    return f"{candidate}-{measurement}"


def told(measured: Measurement) -> str:
    """One measurement in a line, for whoever points at it."""
    p99 = measured.percentile(P99)
    said = f"{measured.config}; {measured.load}; "
    said += f"p99 {p99.value_ms:.2f} ms of {p99.samples:,}" if p99 else "p99 on failed requests"
    return f"{said}; NOT VALID: {measured.invalid[0]}" if measured.invalid else said


def latency_chart(report: ServingReport) -> str:
    """p99 over throughput; the chosen configuration's points are joined, the SLO is dashed."""
    found = [m for b in report.candidates for m in b.measurements]
    p99s = [p.value_ms for m in found if (p := m.percentile(P99))]
    canvas = Canvas(
        ChartAxis.around([m.throughput_per_s for m in found], "completed requests/s", zero=True),
        ChartAxis.around([*p99s, report.slo.p99_ms], "p99, ms (log)", log=True),
    )
    marks = [_limit(canvas, report.slo.p99_ms)]
    for number, benchmark in enumerate(report.candidates):
        marks += _series(canvas, benchmark, number)
    return canvas.drawn(marks, "p99 latency over throughput, one colour a candidate")


def delay_chart(report: ServingReport) -> str:
    """p99 over queue delay and load: green within the SLO, orange near it, red above."""
    delays = sorted(
        {m.config.max_queue_delay_us for b in report.candidates for m in b.measurements}
    )
    rates = [m.rate_per_s for b in report.candidates for m in b.measurements]
    if not delays:
        return _NOTHING
    lanes = len(report.candidates)
    canvas = Canvas(
        ChartAxis.around(rates, "offered requests/s", zero=True),
        ChartAxis(-0.5, len(delays) - 0.5, "", names=tuple(f"{delay} us" for delay in delays)),
        height=80.0 + 44.0 * len(delays),
    )
    marks = []
    for number, benchmark in enumerate(report.candidates):
        for index, m in enumerate(benchmark.measurements):
            height = delays.index(m.config.max_queue_delay_us) + 0.6 * (number / lanes - 0.3)
            shade = _shade(m, report.slo.p99_ms)
            at = canvas.at(m.rate_per_s, height)
            title = f"{benchmark.candidate}: {told(m)}"
            marks.append(dot(at, f"s{number} dot", shade, title=title, mark=mark(number, index)))
    return canvas.drawn(marks, "p99 by queue delay and offered load")


def stage_chart(report: ServingReport) -> str:
    """Where the mean time of a request goes, one bar a candidate, at the rate of its result."""
    split = [
        (n, b, m.stages) for n, b in enumerate(report.candidates) if (m := _shown(b)) and m.stages
    ]
    longest_ms = max((sum(_parts(s).values()) for _, _, s in split), default=1.0) or 1.0
    width, height = 820.0, 24.0 + _BAR * 1.5 * max(len(split), 1)
    drawn: list[str] = []
    for row, (number, benchmark, stages) in enumerate(split):
        top, left = 8.0 + row * _BAR * 1.5, 170.0
        drawn.append(text(4, top + 17, benchmark.candidate.name, f"s{number} lane"))
        for name, time_ms in _parts(stages).items():
            wide = (width - 190.0) * time_ms / longest_ms
            title = f"{benchmark.candidate}: {name} {short_number(time_ms)} ms"
            size = (max(wide, 0.5), _BAR)
            drawn.append(box((left, top), size, f"s{number}", STAGES[name], title=title))
            left += wide
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="mean time by stage">'
        f"{''.join(drawn)}</svg>"
    )


def pareto_chart(report: ServingReport, accuracy: Mapping[Candidate, str]) -> str:
    """Cost (or throughput) against p99; beside each candidate's result stands its accuracy."""
    priced = any(p.cost_per_million is not None for b in report.candidates for p in b.pareto)
    points = [
        (number, b, p, (p.cost_per_million if priced else p.rate_per_s) or 0.0)
        for number, b in enumerate(report.candidates)
        for p in b.pareto
        if p.p99 is not None
    ]
    if not points:
        return _NOTHING
    label = f"cost of a million requests, {_currency(report)}" if priced else "requests/s"
    p99s = [p.p99.value_ms for _, _, p, _ in points if p.p99]
    canvas = Canvas(
        ChartAxis.around([x for *_, x in points], label),
        ChartAxis.around([*p99s, report.slo.p99_ms], "p99, ms (log)", log=True),
    )
    marks = [_limit(canvas, report.slo.p99_ms)]
    for number, b, p, x in points:
        p99 = p.p99.value_ms if p.p99 else 0.0
        known = accuracy.get(b.candidate, "accuracy not judged here")
        title = f"{b.candidate}: {p.config}; {per_second(p.rate_per_s)}; p99 {p99:.2f} ms; {known}"
        at = canvas.at(x, p99)
        marks.append(dot(at, f"s{number} dot", colour(number), title=title))
        if p.confirmed:
            side, anchor = (-8, "end") if canvas.x.share(x) > _RIGHT_HALF else (8, "start")
            marks.append(text(at[0] + side, at[1] + 4, known, f"s{number} tick", anchor=anchor))
    return canvas.drawn(marks, "Pareto points: cost or throughput, p99, accuracy")


def _series(canvas: Canvas, benchmark: Benchmark, number: int) -> Iterator[str]:
    """A candidate's points; what must not be used is grey and joined to nothing."""
    shade = colour(number)
    joined: dict[float, tuple[int, tuple[float, float]]] = {}
    for index, m in enumerate(benchmark.measurements):
        p99 = m.percentile(P99)
        if p99 is None:
            continue
        at = canvas.at(m.throughput_per_s, p99.value_ms)
        used = not m.invalid
        if used and p99.low_ms is not None and p99.high_ms is not None:
            low = canvas.at(m.throughput_per_s, p99.low_ms)
            high = canvas.at(m.throughput_per_s, p99.high_ms)
            yield line(low, high, f"s{number} whisker", colour=shade)
        title = f"{benchmark.candidate}: {told(m)}"
        kind = f"s{number} dot" if m.config == benchmark.chosen else f"s{number} dot other"
        yield dot(at, kind, shade if used else _VOID, title=title, mark=mark(number, index))
        if used and m.config == benchmark.chosen:
            # Of several at one rate, the longest.
            known = joined.get(m.rate_per_s, (0, at))
            joined[m.rate_per_s] = max(known, (m.completed, at))
    if joined:
        yield path([at for _, (_, at) in sorted(joined.items())], f"s{number} line", shade)


def _limit(canvas: Canvas, slo_p99_ms: float) -> str:
    start, end = (canvas.at(x, slo_p99_ms) for x in (canvas.x.low, canvas.x.high))
    return line(start, end, "limit") + text(
        end[0] - 4, end[1] - 5, f"SLO {slo_p99_ms:g} ms", "tick", anchor="end"
    )


def _shade(m: Measurement, slo_p99_ms: float) -> str:
    p99 = m.percentile(P99)
    if m.invalid:
        return _VOID
    if p99 is None or p99.value_ms > slo_p99_ms:
        return _BAD
    return _NEAR if p99.value_ms > _NEARLY * slo_p99_ms else _GOOD


def _shown(benchmark: Benchmark) -> Measurement | None:
    valid: Sequence[Measurement] = [m for m in benchmark.measurements if not m.invalid]
    return benchmark.at_slo or (valid[-1] if valid else None)


def _parts(stages: StageSplit) -> dict[str, float]:
    times = (
        stages.queue_ms,
        stages.compute_input_ms,
        stages.compute_infer_ms,
        stages.compute_output_ms,
        stages.client_ms or 0.0,
    )
    return dict(zip(STAGES, times, strict=True))


def _currency(report: ServingReport) -> str:
    return next((b.currency for b in report.candidates if b.currency), "")
