"""Scorecards and benchmarks in the terminal."""

import io
from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from enginegate.evidence import Benchmark, Outcome, Scorecard
from enginegate.measurement import P99, Measurement
from enginegate.measuring.bottleneck import explain_p99
from enginegate.policy.benchmarking import Slo
from enginegate.report.content import (
    COLUMNS,
    NO_SIZES,
    EngineSizes,
    binding,
    obstacles,
    percentile_text,
    row_of,
    sentences,
    short_digest,
)
from enginegate.report.serving import (
    SERVING_COLUMNS,
    ServingReport,
    generator_sentence,
    serving_rows,
    serving_sentences,
)

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.FAILED: "red",
    Outcome.ERRORED: "magenta",
}
_NUMBERS = COLUMNS[4:]
_SERVING_NUMBERS = SERVING_COLUMNS[1:6]
_WHOLE = {COLUMNS[0], COLUMNS[1], COLUMNS[-1]}


def print_scorecard(scorecard: Scorecard, console: Console, sizes: EngineSizes = NO_SIZES) -> None:
    """Print the table, why candidates did not pass, and the sentences; ``sizes`` in bytes."""
    console.print(_table(scorecard, sizes))
    for obstacle in obstacles(scorecard):
        outcome = (obstacle.outcome.word, _STYLES[obstacle.outcome])
        console.print(Text.assemble("\n", obstacle.names, ": ", outcome))
        for line in obstacle.lines:
            console.print(Text(f"  {line}"))
    console.print()
    for sentence in sentences(scorecard):
        console.print(Text(sentence))


def print_table(scorecard: Scorecard, console: Console, sizes: EngineSizes = NO_SIZES) -> None:
    """Print the table alone; ``sizes`` in bytes."""
    console.print(_table(scorecard, sizes))


def print_approval(scorecard: Scorecard, console: Console) -> None:
    """Print what an approval would be for, and how to give one."""
    for sentence in (*sentences(scorecard), binding(scorecard)):
        console.print(Text(sentence))
    for answer in ("approve", "reject"):
        command = f"enginegate {answer} {short_digest(scorecard)} --approver NAME --reason WHY"
        console.print(Text(f"  {command}"))


def scorecard_text(scorecard: Scorecard, sizes: EngineSizes = NO_SIZES, *, width: int = 120) -> str:
    """The text that `print_scorecard` prints, without colour."""
    return _text(lambda console: print_scorecard(scorecard, console, sizes), width)


def print_serving(report: ServingReport, console: Console) -> None:
    """Print every candidate's table and sentences, then the winner."""
    for benchmark in report.candidates:
        _print_candidate(benchmark, report.slo, console)
    best = report.best
    console.print(Text(f"Winner: {report.winner or 'none'}: {report.reason}"))
    if best is not None and best.chosen is not None:
        console.print(Text(f"  {best.chosen}"))


def serving_text(report: ServingReport, *, width: int = 120) -> str:
    """The text that `print_serving` prints, without colour."""
    return _text(lambda console: print_serving(report, console), width)


def print_measured(measured: Sequence[Measurement], slo: Slo, console: Console) -> None:
    """Print measurements of a server that serves one configuration: no search, no verdict."""
    table = _measurements(
        ("load", "valid", "done, req/s", "failed", "p50, ms", "p99, ms", "p99.9, ms")
    )
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
        console.print(Text(explain_p99(m, slo.p99_ms)))
        console.print(Text(generator_sentence(m)))


def _text(show: Callable[[Console], None], width: int) -> str:
    written = io.StringIO()
    show(Console(file=written, width=width, color_system=None, legacy_windows=False))
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def _print_candidate(benchmark: Benchmark, slo: Slo, console: Console) -> None:
    outcome = benchmark.outcome
    console.print(
        Text.assemble((benchmark.candidate.name, "bold"), ": ", (outcome.word, _STYLES[outcome]))
    )
    table = _measurements(SERVING_COLUMNS)
    for row in serving_rows(benchmark, slo.p99_ms):
        style = "bold" if row.configuration.endswith("(chosen)") else ""
        table.add_row(*(Text(_two_lines(cell), style=style) for cell in row))
    if benchmark.measurements:
        console.print(table)
    for sentence in serving_sentences(benchmark, slo):
        console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    console.print()


def _measurements(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        numbers = column in _SERVING_NUMBERS or (columns is not SERVING_COLUMNS and number > 0)
        justify: JustifyMethod = "right" if numbers else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _table(scorecard: Scorecard, sizes: EngineSizes) -> Table:
    """An interval goes below its number, so that a narrow terminal cuts nothing."""
    title = Text(f"{scorecard.model}: {scorecard.model_uri}")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        justify: JustifyMethod = "right" if column in _NUMBERS else "left"
        table.add_column(
            _two_lines(column), justify=justify, overflow="fold", no_wrap=column in _WHOLE
        )
    for verdict in scorecard.verdicts:
        row = row_of(scorecard, verdict.candidate, sizes)
        cells = [Text(_two_lines(cell)) for cell in row]
        cells[1].stylize(_STYLES[scorecard.outcome(verdict.candidate)])
        if verdict.candidate == scorecard.winner:
            cells[0].stylize("bold")
        table.add_row(*cells)
    return table


def _two_lines(cell: str) -> str:
    return cell.replace(" (", "\n(")
