"""Benchmarks as one interactive page: a file that needs no network and no other file.

Its pictures are complete without a script; the script shows and hides candidates, and links each
point to its line in the table. Whatever comes from a model, a server or a policy is escaped.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from enginegate.candidate import Candidate
from enginegate.charts import (
    COLOURS,
    delay_chart,
    latency_chart,
    mark_of,
    pareto_chart,
    stage_chart,
)
from enginegate.measurement import Measurement
from enginegate.measuring.p99 import QUANTILES
from enginegate.report.content import percentile_text
from enginegate.report.serving import ServingReport, serving_sentences
from enginegate.report.templates import page_template

Accuracies: TypeAlias = Mapping[Candidate, str]

_NO_ACCURACY: Accuracies = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture of the page, which MLflow has too.

    Attributes:
        name: of its file, without the ending.
        heading: above it.
        words: how to read it.
        draw: the picture as SVG.
        by_candidate: whether each candidate's own run has one of that candidate alone.
    """

    name: str
    heading: str
    words: str
    draw: Callable[[ServingReport, Accuracies], bytes]
    by_candidate: bool = False


# One more figure, on the page and in MLflow, is one more entry.
FIGURES = (
    Figure(
        "latency_throughput",
        "p99 over throughput",
        "Lines join the best configuration's valid measurements; faint points are other "
        "configurations, grey crosses are invalid. Whiskers: 95 % interval of p99.",
        lambda r, _: latency_chart(f"{r.model}: p99 over throughput", r.candidates, r.slo.p99_ms),
        by_candidate=True,
    ),
    Figure(
        "delay_load",
        "p99 over queue delay and load",
        "Green: within the SLO. Orange: within, and nearer than a fifth. Red: above it. Larger: "
        "more instances.",
        lambda r, _: delay_chart(f"{r.model}: queue delay and load", r.candidates, r.slo.p99_ms),
        by_candidate=True,
    ),
    Figure(
        "stages",
        "Where the time goes",
        "Mean milliseconds of a request at each candidate's result, by the server's counters.",
        lambda r, _: stage_chart(f"{r.model}: where the time of a request goes", r.candidates),
    ),
    Figure(
        "pareto",
        "Cost, p99 and accuracy",
        "No other point of the same candidate is better in both. Stars are confirmed.",
        lambda r, accuracy: pareto_chart(
            f"{r.model}: cost, p99 and accuracy", r.candidates, r.slo.p99_ms, accuracy
        ),
    ),
)


def serving_figures(report: ServingReport, accuracy: Accuracies = _NO_ACCURACY) -> dict[str, bytes]:
    """Every figure of a report as SVG, by its name."""
    return {figure.name: figure.draw(report, accuracy) for figure in FIGURES}


def candidate_figures(report: ServingReport, candidate: Candidate) -> dict[str, bytes]:
    """The figures of one candidate alone; none where nothing was measured."""
    own = tuple(b for b in report.candidates if b.candidate == candidate and b.measurements)
    alone = report.model_copy(update={"model": str(candidate), "candidates": own})
    drawn = (figure for figure in FIGURES if own and figure.by_candidate)
    return {figure.name: figure.draw(alone, _NO_ACCURACY) for figure in drawn}


def serving_page(report: ServingReport, figures: Mapping[str, bytes]) -> str:
    """The page around pictures that `serving_figures` drew."""
    return page_template("", "serving.html").render(
        report=report,
        figures=[(figure, _inline(figures[figure.name])) for figure in FIGURES],
        colours=COLOURS,
        sentences=lambda benchmark: (
            *serving_sentences(benchmark, report.slo),
            *report.alone_sentences(benchmark.candidate),
        ),
        mark_of=mark_of,
        columns=_COLUMNS,
        cells=_cells,
    )


def _inline(svg: bytes) -> str:
    """A picture as part of a page, which needs no namespaces and no width of its own."""
    text = svg.decode()
    start = text.index("<svg ")
    root = re.sub(r' (?:xmlns(?::\w+)?|width|height)="[^"]*"', "", text[start:].partition(">")[0])
    return f"{root}>{text[start:].partition('>')[2]}"


_COLUMNS = (
    *("candidate", "configuration", "load", "valid", "done, req/s", "failed", "requests"),
    *(f"p{100 * quantile:g}, ms" for quantile in QUANTILES),
    *("batch", "queue, ms", "compute, ms", "sent late, ms"),
)


def _cells(m: Measurement) -> Iterator[str]:
    """One measurement's line of the table, without the candidate, in the order of `_COLUMNS`."""
    stages = m.stages
    yield from (str(m.config), str(m.load), f"no: {m.invalid[0]}" if m.invalid else "yes")
    yield from (f"{m.throughput_per_s:,.1f}", f"{m.failed:,} of {m.completed + m.failed:,}")
    # From how many requests the percentiles are: failures included, the warm-up left out.
    yield next((f"{p.samples:,}" for p in m.percentiles), "n/a")
    yield from (percentile_text(m.percentile(quantile)) for quantile in QUANTILES)
    yield f"{stages.mean_batch_size:.2f}" if stages else "n/a"
    yield f"{stages.queue_ms:.3f}" if stages else "n/a"
    yield f"{stages.compute_infer_ms:.3f}" if stages else "n/a"
    yield f"{m.late_p99_ms:.2f}"
