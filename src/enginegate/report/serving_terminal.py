"""Benchmarks in the terminal: each candidate's configurations, and what they mean."""

import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from enginegate.evidence import Benchmark, Outcome
from enginegate.measurement import P99, Measurement
from enginegate.measuring.advice import explain_p99
from enginegate.policy.benchmarking import Slo
from enginegate.report.serving import (
    SERVING_COLUMNS,
    ServingReport,
    generator_sentence,
    percentile_text,
    serving_rows,
    serving_sentences,
)

_NUMBERS = SERVING_COLUMNS[1:6]
_STYLES = {
    Outcome.PASSED: "green",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.FAILED: "red",
    Outcome.ERRORED: "magenta",
}


def print_serving(report: ServingReport, console: Console) -> None:
    """Print every candidate's table and sentences, then the winner."""
    for benchmark in report.candidates:
        _print_candidate(benchmark, report.slo, console)
    best = report.best
    console.print(Text(f"Winner: {report.winner or 'none'}: {report.reason}"))
    if best is not None and best.chosen is not None:
        console.print(Text(f"  {best.chosen}"))


def serving_text(report: ServingReport, *, width: int = 120) -> str:
    """What `print_serving` prints, without colour."""
    written = io.StringIO()
    console = Console(file=written, width=width, color_system=None, legacy_windows=False)
    print_serving(report, console)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def print_measured(measured: Sequence[Measurement], slo: Slo, console: Console) -> None:
    """Print measurements of a server that serves one configuration: no search, no verdict."""
    table = _table(("load", "valid", "done, req/s", "failed", "p50, ms", "p99, ms", "p99.9, ms"))
    for m in measured:
        p50, p99, tail = (m.percentile(q) for q in (0.5, P99, 0.999))
        table.add_row(
            Text(str(m.load)),
            "no" if m.invalid else "yes",
            f"{m.throughput_per_s:,.1f}",
            f"{m.failed:,}",
            *(percentile_text(p) for p in (p50, p99, tail)),
        )
    console.print(table)
    for m in measured:
        for why in m.invalid:
            console.print(Text(f"Not valid: {why}."))
        console.print(Text(explain_p99(m, slo)))
        console.print(Text(generator_sentence(m)))


def _print_candidate(benchmark: Benchmark, slo: Slo, console: Console) -> None:
    outcome = benchmark.outcome
    console.print(
        Text.assemble((benchmark.candidate.name, "bold"), ": ", (outcome.word, _STYLES[outcome]))
    )
    table = _table(SERVING_COLUMNS)
    for row in serving_rows(benchmark, slo.p99_ms):
        style = "bold" if row.configuration.endswith("(chosen)") else ""
        table.add_row(*(Text(cell.replace(" (", "\n("), style=style) for cell in row.cells))
    if benchmark.measurements:
        console.print(table)
    for sentence in serving_sentences(benchmark, slo):
        console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    console.print()


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        numbers = column in _NUMBERS or (columns is not SERVING_COLUMNS and number > 0)
        justify: JustifyMethod = "right" if numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table
