"""Benchmarks in four pictures: p99, queue delay, stages, and cost.

Each mark carries its candidate's number as the class ``s0``, ``s1``, …
"""

from collections.abc import Mapping, Sequence

from enginegate.candidate import Candidate
from enginegate.charts.drawing import COLOURS, Drawing, drawing
from enginegate.evidence import Benchmark, Point
from enginegate.measurement import Measurement, StageSplit
from enginegate.messages import per_second, short_number
from enginegate.serving import ServingConfig

STAGE_COLOURS = {
    "queueing": "#E69F00",
    "preparing inputs": "#56B4E9",
    "computing": "#0072B2",
    "returning outputs": "#009E73",
    "client and network": "#999999",
}
_WITHIN, _NEAR, _ABOVE, _INVALID = "#009E73", "#E69F00", "#D55E00", "#888888"
# A p99 above this share of the SLO is drawn as near it: the next noisy minute may break it.
_NEAR_SHARE = 0.8


def mark_of(candidate: int, measurement: int) -> str:
    """How a measurement is named in ``data-m``."""
    return f"{candidate}-{measurement}"


def latency_chart(title: str, benchmarks: Sequence[Benchmark], slo_p99_ms: float) -> bytes:
    """p99 over throughput, with the SLO and the intervals of p99.

    Of several candidates each has a colour, and its best configuration's points are joined; of one
    candidate each configuration has a colour. Invalid measurements are grey and joined to nothing.
    """
    with drawing(title, "completed requests/s", "p99, ms (log)") as chart:
        for number, benchmark in enumerate(benchmarks):
            best = _best_config(benchmark)
            configs = list(dict.fromkeys(m.config for m in benchmark.measurements))
            for place, config in enumerate(configs):
                name = benchmark.candidate.name if config == best else ""
                colour = COLOURS[number % len(COLOURS)]
                if len(benchmarks) == 1:
                    name = f"{config} (chosen)" if config == benchmark.chosen else str(config)
                    colour = COLOURS[place % len(COLOURS)]
                _draw_configuration(chart, benchmark, number, config, (name, colour))
        chart.axes.set_xlim(left=0.0)
        chart.limit(slo_p99_ms)
        return chart.svg()


def delay_chart(title: str, benchmarks: Sequence[Benchmark], slo_p99_ms: float) -> bytes:
    """p99 over queue delay and load: green within the SLO, orange near it, red above."""
    delays = sorted({m.config.max_queue_delay_us for b in benchmarks for m in b.measurements})
    height = 1.4 + 0.6 * max(len(delays), 1)
    xlabel, ylabel = "offered requests/s", "max_queue_delay, us"
    with drawing(title, xlabel, ylabel, height_inches=height) as chart:
        for number, benchmark in enumerate(benchmarks):
            for index, m in enumerate(benchmark.measurements):
                lane = 0.6 * ((number + 0.5) / len(benchmarks) - 0.5)
                chart.axes.plot(
                    [m.rate_per_s],
                    [delays.index(m.config.max_queue_delay_us) + lane],
                    "x" if m.invalid else "o",
                    color=_shade(m, slo_p99_ms),
                    markersize=5 + 1.5 * m.config.instances,
                    gid=_tag(chart, benchmark, number, index),
                )
        chart.axes.set_yticks(range(len(delays)), [f"{delay}" for delay in delays])
        chart.axes.set(xlim=(0.0, None), ylim=(-0.5, len(delays) - 0.5 if delays else 0.5))
        return chart.svg()


def stage_chart(title: str, benchmarks: Sequence[Benchmark]) -> bytes:
    """Where the mean time of a request goes, one bar a candidate, at the rate of its result."""
    shown = [
        (number, b, m.stages)
        for number, b in enumerate(benchmarks)
        if (m := _result_of(b)) and m.stages
    ]
    height = 1.2 + 0.4 * max(len(shown), 1)
    with drawing(title, "mean milliseconds of a request", "", height_inches=height) as chart:
        for row, (number, benchmark, stages) in enumerate(shown):
            left = 0.0
            for name, time_ms in _stage_times(stages).items():
                words = f"{benchmark.candidate}: {name} {short_number(time_ms)} ms"
                chart.axes.barh(
                    row,
                    time_ms,
                    left=left,
                    color=STAGE_COLOURS[name],
                    label="" if row else name,
                    gid=chart.tag(f"s{number}", title=words),
                )
                left += time_ms
        chart.axes.set_yticks(range(len(shown)), [b.candidate.name for _, b, _ in shown])
        chart.axes.invert_yaxis()
        return chart.svg()


def pareto_chart(
    title: str,
    benchmarks: Sequence[Benchmark],
    slo_p99_ms: float,
    accuracy: Mapping[Candidate, str],
) -> bytes:
    """Cost (or throughput) against p99; beside each confirmed point stands its accuracy."""
    priced = any(p.cost_per_million is not None for b in benchmarks for p in b.pareto)
    currency = next((b.currency for b in benchmarks if b.currency), "")
    xlabel = f"cost of a million requests, {currency}" if priced else "requests/s"
    with drawing(title, xlabel, "p99, ms (log)") as chart:
        for number, benchmark in enumerate(benchmarks):
            known = accuracy.get(benchmark.candidate, "answers not judged here")
            _draw_pareto(chart, benchmark, number, known, priced=priced)
        chart.limit(slo_p99_ms)
        return chart.svg()


def _draw_configuration(
    chart: Drawing,
    benchmark: Benchmark,
    number: int,
    config: ServingConfig,
    line: tuple[str, str],
) -> None:
    """A line's label, empty for points that are not joined, and its colour."""
    label, colour = line
    joined: dict[float, tuple[int, float, float]] = {}
    for index, m in enumerate(benchmark.measurements):
        p99 = m.p99
        if m.config != config or p99 is None:
            continue
        at = (m.throughput_per_s, p99.value_ms)
        chart.axes.plot(
            [at[0]],
            [at[1]],
            "x" if m.invalid else "o",
            color=_INVALID if m.invalid else colour,
            alpha=1.0 if label else 0.45,
            gid=_tag(chart, benchmark, number, index),
        )
        if m.invalid:
            continue
        if p99.low_ms is not None and p99.high_ms is not None:
            whisker = chart.tag(f"s{number}")
            chart.axes.vlines(
                at[0], p99.low_ms, p99.high_ms, color=colour, linewidth=1.2, gid=whisker
            )
        # Of several at one rate, the longest.
        joined[m.rate_per_s] = max(joined.get(m.rate_per_s, (0, *at)), (m.completed, *at))
    if label:
        points = [point for _, (_, *point) in sorted(joined.items())]
        chart.axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            linewidth=2.5 if config == benchmark.chosen else 1.0,
            label=label,
            gid=chart.tag(f"s{number}"),
        )


def _draw_pareto(
    chart: Drawing, benchmark: Benchmark, number: int, accuracy: str, *, priced: bool
) -> None:
    def cost(point: Point) -> float:
        return (point.cost_per_million if priced else point.rate_per_s) or 0.0

    points = sorted(
        ((cost(p), p.p99.value_ms, p) for p in benchmark.pareto if p.p99), key=lambda at: at[:2]
    )
    colour = COLOURS[number % len(COLOURS)]
    chart.axes.plot(
        [x for x, _, _ in points],
        [y for _, y, _ in points],
        color=colour,
        alpha=0.6,
        label=benchmark.candidate.name,
        gid=chart.tag(f"s{number}"),
    )
    for x, p99_ms, point in points:
        words = f"{benchmark.candidate}: {point.config}; {per_second(point.rate_per_s)}; "
        title = f"{words}p99 {p99_ms:.2f} ms; {accuracy}"
        size, marker = (12, "*") if point.confirmed else (6, "o")
        gid = chart.tag(f"s{number}", title=title)
        chart.axes.plot([x], [p99_ms], marker, color=colour, markersize=size, gid=gid)
        if point.confirmed:
            chart.axes.annotate(
                accuracy,
                (x, p99_ms),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                fontsize="small",
                gid=chart.tag(f"s{number}"),
            )


def _tag(chart: Drawing, benchmark: Benchmark, number: int, index: int) -> str:
    """One measurement in a line, for whoever points at it."""
    m = benchmark.measurements[index]
    p99 = m.p99
    words = f"p99 {p99.value_ms:.2f} ms of {p99.samples:,}" if p99 else "p99 on failed requests"
    title = f"{benchmark.candidate}: {m.config}; {m.load}; {words}"
    if m.invalid:
        title += f"; NOT VALID: {m.invalid[0]}"
    return chart.tag(f"s{number} dot", title=title, mark=mark_of(number, index))


def _best_config(benchmark: Benchmark) -> ServingConfig | None:
    """The chosen configuration; when none meets the SLO, the one of the smallest p99."""
    points = [(p.value_ms, m.config) for m in benchmark.measurements if (p := m.p99)]
    nearest = min(points, key=lambda point: point[0], default=None)
    return benchmark.chosen or (nearest[1] if nearest else None)


def _result_of(benchmark: Benchmark) -> Measurement | None:
    """At the result; where nothing was chosen, the last valid measurement."""
    valid = [m for m in benchmark.measurements if not m.invalid]
    return benchmark.at_slo or (valid[-1] if valid else None)


def _shade(m: Measurement, slo_p99_ms: float) -> str:
    p99 = m.p99
    if m.invalid:
        return _INVALID
    if p99 is None or p99.value_ms > slo_p99_ms:
        return _ABOVE
    return _NEAR if p99.value_ms > _NEAR_SHARE * slo_p99_ms else _WITHIN


def _stage_times(stages: StageSplit) -> dict[str, float]:
    times = (
        stages.queue_ms,
        stages.compute_input_ms,
        stages.compute_infer_ms,
        stages.compute_output_ms,
        stages.client_ms or 0.0,
    )
    return dict(zip(STAGE_COLOURS, times, strict=True))
