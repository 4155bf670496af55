"""Scorecards and benchmarks in the terminal."""

import io
from collections.abc import Callable, Sequence

from rich.console import Console
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
    columns_of,
    obstacles,
    percentile_text,
    row_of,
    sentences,
    short_digest,
)
from enginegate.report.devices import device_sentences, device_table
from enginegate.report.serving import (
    SERVING_COLUMNS,
    ServingReport,
    generator_sentence,
    serving_rows,
    serving_sentences,
)
from enginegate.report.tables import FittedTable, TableColumn, print_hanging

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.FAILED: "red",
    Outcome.ERRORED: "magenta",
}
_NUMBERS = COLUMNS[4:]
_SERVING_NUMBERS = SERVING_COLUMNS[1:6]
_WHOLE = (COLUMNS[0], COLUMNS[1], COLUMNS[-1])


def print_scorecard(scorecard: Scorecard, console: Console, sizes: EngineSizes = NO_SIZES) -> None:
    """Print the table, why candidates did not pass, and the sentences; ``sizes`` in bytes."""
    _table(scorecard, sizes).print(console)
    _print_obstacles(scorecard, console)
    for view in scorecard.by_device[1:]:
        console.print()
        _table(view, NO_SIZES).print(console)
        _print_obstacles(view, console)
    console.print()
    for sentence in sentences(scorecard):
        print_hanging(console, sentence)
    _print_devices(scorecard, console)


def _print_obstacles(scorecard: Scorecard, console: Console) -> None:
    for obstacle in obstacles(scorecard):
        outcome = (obstacle.outcome.word, _STYLES[obstacle.outcome])
        console.print()
        print_hanging(console, Text.assemble(obstacle.names, ": ", outcome))
        for line in obstacle.lines:
            print_hanging(console, line, "  ")


def _print_devices(scorecard: Scorecard, console: Console) -> None:
    """Kinds of device side by side, and who won on each; nothing where there is one machine."""
    found = device_table(scorecard)
    if not found.devices:
        return
    columns = [TableColumn(name, heads=not place) for place, name in enumerate(found.columns)]
    table = FittedTable(columns, title=f"{scorecard.model} on each kind of device")
    for name, cells in found.rows:
        styled = [
            Text(cell.text, style=_STYLES[cell.outcome] if cell.outcome is not None else "")
            for cell in cells
        ]
        table.add_row(Text(name), *styled)
    console.print()
    table.print(console)
    for sentence in device_sentences(scorecard):
        print_hanging(console, sentence)


def print_table(scorecard: Scorecard, console: Console, sizes: EngineSizes = NO_SIZES) -> None:
    """Print the table alone; ``sizes`` in bytes."""
    _table(scorecard, sizes).print(console)


def print_approval(scorecard: Scorecard, console: Console) -> None:
    """Print what an approval would be for, and how to give one."""
    words = (*sentences(scorecard), *device_sentences(scorecard), binding(scorecard))
    for sentence in words:
        print_hanging(console, sentence)
    for answer in ("approve", "reject"):
        command = f"enginegate {answer} {short_digest(scorecard)} --approver NAME --reason WHY"
        console.print(Text(f"  {command}"), soft_wrap=True)


def scorecard_text(scorecard: Scorecard, sizes: EngineSizes = NO_SIZES, *, width: int = 120) -> str:
    """The text that `print_scorecard` prints, without colour."""
    return _text(lambda console: print_scorecard(scorecard, console, sizes), width)


def print_serving(report: ServingReport, console: Console) -> None:
    """Print every candidate's table and sentences, then the winner."""
    for benchmark in report.candidates:
        _print_candidate(benchmark, report.slo, console)
    best = report.best
    print_hanging(console, f"Winner: {report.winner or 'none'}: {report.reason}")
    if best is not None and best.chosen is not None:
        print_hanging(console, str(best.chosen), "  ")


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
            str(m.load),
            "no" if m.invalid else "yes",
            f"{m.throughput_per_s:,.1f}",
            f"{m.failed:,}",
            *(percentile_text(p) for p in (p50, p99, tail)),
        )
    table.print(console)
    for m in measured:
        for why in m.invalid:
            print_hanging(console, f"Not valid: {why}.")
        print_hanging(console, explain_p99(m, slo.p99_ms))
        print_hanging(console, generator_sentence(m))


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
        table.add_row(*(Text(cell, style=style) for cell in row))
    if benchmark.measurements:
        table.print(console)
    for sentence in serving_sentences(benchmark, slo):
        print_hanging(console, sentence, "  ")
    console.print()


def _measurements(columns: Sequence[str]) -> FittedTable:
    wide = columns is SERVING_COLUMNS
    return FittedTable(
        [
            TableColumn(
                column,
                right=column in _SERVING_NUMBERS or (not wide and number > 0),
                heads=number == 0,
                interval=True,
            )
            for number, column in enumerate(columns)
        ]
    )


def _table(scorecard: Scorecard, sizes: EngineSizes) -> FittedTable:
    """An interval goes below its number; in a narrow terminal each candidate is a block."""
    columns = [
        TableColumn(
            column,
            whole=column in _WHOLE,
            right=column in _NUMBERS,
            heads=column in _WHOLE[:2],
            interval=True,
        )
        for column in columns_of(scorecard)
    ]
    where = f" on {scorecard.device}" if scorecard.device else ""
    table = FittedTable(columns, title=f"{scorecard.model}: {scorecard.model_uri}{where}")
    for verdict in scorecard.verdicts:
        row = row_of(scorecard, verdict.candidate, sizes)
        cells = [Text(cell) for cell in row]
        cells[1].stylize(_STYLES[scorecard.outcome(verdict.candidate)])
        if verdict.candidate == scorecard.winner:
            cells[0].stylize("bold")
        table.add_row(*cells)
    return table
