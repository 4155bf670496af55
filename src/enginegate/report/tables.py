"""Tables that fit the terminal: side by side where it is wide, else one block for each row.

Nothing is cut off: digests, dates, paths and commands are there to be copied. A word that is longer
than a line is left to the terminal, which wraps it without a line break of ours inside.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# From here on tables of eight columns stand side by side: the scorecard's, the widest, needs 110.
WIDE = 110
_EMPTY = frozenset({"", "n/a"})
_GAP = "  "
_UNBOUNDED = 10_000
# A column of words that is narrower is mostly line breaks; digests of twelve characters fit.
_READABLE = 12
_WORD = re.compile(r"\S+")
# All but line breaks and tabs: ESC begins a terminal's commands, as U+009B does; U+202E and its
# like change the order in which words are read.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column.

    Attributes:
        name: its heading.
        whole: whether its cells are never wrapped: identities and dates.
        right: whether its cells are numbers, which end below one another.
        heads: whether it is part of a block's first line, where rows are stacked.
        interval: whether what is in parentheses goes below the number before it, side by side.
    """

    name: str
    whole: bool = False
    right: bool = False
    heads: bool = False
    interval: bool = False


@dataclass(slots=True)
class FittedTable:
    """Rows of text; ``print`` decides how they are laid out.

    Attributes:
        rows: the cells, and the style of the whole row; a cell is a text, or one with a style.
    """

    columns: Sequence[TableColumn]
    title: str = ""
    rows: list[tuple[tuple[Text, ...], str]] = field(default_factory=list)

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row; texts are taken as they are, so that brackets in them mean nothing."""
        texts = tuple(as_text(cell) for cell in cells)
        self.rows.append((texts, style))

    def print(self, console: Console) -> None:
        """Print side by side if that fits, or if the terminal is wide; else stacked."""
        table = self._side_by_side()
        unbounded = console.options.update(width=_UNBOUNDED)
        wanted = Measurement.get(console, unbounded, table).maximum
        wide = console.width >= WIDE and self._least_width() <= console.width
        if wide or wanted <= console.width:
            console.print(table)
        else:
            self._print_stacked(console)

    def _least_width(self) -> int:
        """With every whole cell in one line, and room for a short word in the others."""
        widths = [_READABLE] * len(self.columns)
        for number, column in enumerate(self.columns):
            if column.whole:
                cells = [Text(column.name), *(cells[number] for cells, _ in self.rows)]
                widths[number] = max(cell.cell_len for cell in cells)
        return sum(widths) + len(widths)

    def _side_by_side(self) -> Table:
        table = Table(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for column in self.columns:
            justify: JustifyMethod = "right" if column.right else "left"
            heading = Text(column.name)
            table.add_column(heading, justify=justify, overflow="fold", no_wrap=column.whole)
        for cells, style in self.rows:
            pairs = zip(self.columns, cells, strict=True)
            shown = (_in_two_lines(cell) if column.interval else cell for column, cell in pairs)
            table.add_row(*shown, style=style)
        return table

    def _print_stacked(self, console: Console) -> None:
        if self.title:
            console.print(Text(self.title, style="italic"), soft_wrap=True)
        labels = max((len(c.name) for c in self.columns if not c.heads), default=0)
        for cells, style in self.rows:
            pairs = list(zip(self.columns, cells, strict=True))
            heads = [cell for column, cell in pairs if column.heads and cell.plain]
            rest = [(c, cell) for c, cell in pairs if not c.heads and cell.plain not in _EMPTY]
            head = Text(_GAP, style=style or "bold").join(heads)
            head.stylize_before(style or "bold")
            if len(rest) == 1:
                ((column, cell),) = rest
                one_line = Text.assemble(head, _GAP, (f"{column.name} ", "dim"), cell)
                if one_line.cell_len <= console.width:
                    console.print(one_line)
                    continue
            console.print(head, soft_wrap=True)
            for column, cell in rest:
                label = Text(f"{_GAP}{column.name:<{labels}}{_GAP}", style="dim")
                print_hanging(console, cell, label)
        console.print()


def print_hanging(console: Console, text: Text | str, first: Text | str = "") -> None:
    """Print a text behind ``first``; its further lines begin below its own beginning.

    Words that do not fit into a line stay whole.
    """
    head = as_text(first)
    room = max(console.width - head.cell_len, 1)
    lines = [part for line in as_text(text).split("\n") for part in _wrapped(line, room)]
    for number, line in enumerate(lines):
        before = head if number == 0 else Text(" " * head.cell_len)
        console.print(Text.assemble(before, line), soft_wrap=True)


def _wrapped(line: Text, room: int) -> Iterator[Text]:
    """One line, broken between words; Rich's own wrapping breaks long words."""
    start, breaks = 0, []
    for word in _WORD.finditer(line.plain):
        if word.start() > start and cell_len(line.plain[start : word.end()]) > room:
            start = word.start()
            breaks.append(start)
    for part in line.divide(breaks):
        part.rstrip()
        yield part


def as_text(text: Text | str) -> Text:
    """A text in which nothing moves the cursor, colours or hides: people's words come from logs."""
    found = text if isinstance(text, Text) else Text(text)
    if _CONTROLS.search(found.plain):
        found = found.copy()
        found.plain = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", found.plain)
    return found


def _in_two_lines(cell: Text) -> Text:
    """An interval goes below its number, so that columns stay narrow."""
    before, opening, _ = cell.plain.partition(" (")
    if not opening:
        return cell
    first, second = cell[: len(before)], cell[len(before) + 1 :]
    return Text("\n").join([first, second])
