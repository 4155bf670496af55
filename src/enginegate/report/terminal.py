"""A report in the terminal."""

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from enginegate.evidence import Outcome, Scorecard
from enginegate.report.content import (
    COLUMNS,
    NO_SIZES,
    Sizes,
    binding,
    obstacles,
    row_of,
    sentences,
    short_digest,
)

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.INCONCLUSIVE: "yellow",
    Outcome.FAILED: "red",
    Outcome.ERRORED: "magenta",
}
_NUMBERS = COLUMNS[4:]
_WHOLE = {COLUMNS[0], COLUMNS[1], COLUMNS[-1]}


def print_scorecard(scorecard: Scorecard, console: Console, sizes: Sizes = NO_SIZES) -> None:
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


def print_table(scorecard: Scorecard, console: Console, sizes: Sizes = NO_SIZES) -> None:
    """Print the table alone; ``sizes`` in bytes."""
    console.print(_table(scorecard, sizes))


def print_approval(scorecard: Scorecard, console: Console) -> None:
    """Print what an approval would be for, and how to give one."""
    for sentence in (*sentences(scorecard), binding(scorecard)):
        console.print(Text(sentence))
    for answer in ("approve", "reject"):
        command = f"enginegate {answer} {short_digest(scorecard)} --approver NAME --reason WHY"
        console.print(Text(f"  {command}"))


def scorecard_text(scorecard: Scorecard, sizes: Sizes = NO_SIZES, *, width: int = 120) -> str:
    """What `print_scorecard` prints, without colour."""
    written = io.StringIO()
    console = Console(file=written, width=width, color_system=None, legacy_windows=False)
    print_scorecard(scorecard, console, sizes)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


def _table(scorecard: Scorecard, sizes: Sizes) -> Table:
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
        cells = [Text(_two_lines(cell)) for cell in row.cells]
        cells[1].stylize(_STYLES[scorecard.outcome(verdict.candidate)])
        if verdict.candidate == scorecard.winner:
            cells[0].stylize("bold")
        table.add_row(*cells)
    return table


def _two_lines(cell: str) -> str:
    return cell.replace(" (", "\n(")
