"""Tables at the widths of real terminals: nothing that somebody copies is cut."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from enginegate.report.tables import FittedTable, TableColumn, print_hanging

DIGEST, DATE = "82c6f658392f", "2026-11-22 14:58:55 UTC"
PATH = "/srv/models/" + "x" * 90 + "/config.pbtxt"


def printed(width, show):
    console = Console(width=width, file=io.StringIO())
    show(console)
    return console.file.getvalue()


def releases():
    names = ("release", "published", "approved by", "reason", "engine")
    columns = [
        TableColumn(name, whole=name in {"published", "engine"}, heads=name == "release")
        for name in names
    ]
    table = FittedTable(columns, title="digits")
    table.add_row("2 (live)", DATE, "ada [bold]", "a reason of many words " * 4 + PATH, DIGEST)
    table.add_row("1", DATE, "", "n/a", DIGEST)
    return table


@pytest.mark.parametrize("width", [40, 60, 80, 109, 110, 120, 160, 240])
def test_identities_dates_and_paths_are_whole_at_every_width(width):
    """Also where a table is stacked, and brackets are no markup."""
    text = printed(width, releases().print)

    assert text.count(DIGEST) == text.count(DATE) == 2
    assert "ada [bold]" in text
    assert "…" not in text
    if width < 110:
        assert PATH in text


@pytest.mark.parametrize(("width", "stacked"), [(60, True), (80, True), (109, True), (160, False)])
def test_rows_are_stacked_in_a_narrow_terminal(width, stacked):
    """Then each column's name stands beside its value; empty cells and n/a are left out."""
    text = printed(width, releases().print)

    assert ("  published    2026" in text) is stacked
    assert ("───" in text) is not stacked
    assert text.count("approved by") == 1


def test_small_table_stays_a_table():
    """What fits is not stacked."""
    table = FittedTable([TableColumn("promise", heads=True), TableColumn("kept")])
    table.add_row("loads", Text("passed"))

    assert "───" in printed(60, table.print)


def test_table_whose_whole_cells_do_not_fit_is_stacked():
    """Rich would cut them off."""
    table = FittedTable([TableColumn(f"digest {n}", whole=True, heads=n == 0) for n in range(3)])
    table.add_row(*("0123456789abcdef" * 4 for _ in range(3)))

    assert printed(120, table.print).count("0123456789abcdef" * 4) == 3


def test_interval_is_below_its_number():
    """Side by side; a stacked row has room for both in a line."""
    table = FittedTable([TableColumn("p99", interval=True)])
    table.add_row("2.25 (1.99 to 2.99)")

    lines = [line.strip() for line in printed(80, table.print).splitlines() if line.strip()]

    assert lines[-2:] == ["2.25", "(1.99 to 2.99)"]


def test_further_lines_begin_below_the_first_word():
    """A long word is not broken: the terminal wraps it, and it can be copied."""
    lines = printed(30, lambda out: print_hanging(out, f"first second third {PATH}", "  - "))

    assert lines.splitlines() == ["  - first second third", f"    {PATH}"]


def test_style_survives_wrapping():
    """A coloured word in the second line is still coloured."""
    console = Console(width=12, file=io.StringIO(), force_terminal=True, color_system="standard")
    print_hanging(console, Text.assemble("some words ", ("failed", "red")))

    assert "\x1b[31mfailed" in console.file.getvalue()


@pytest.mark.parametrize("width", [60, 160])
def test_what_people_wrote_commands_no_terminal(width):
    """A reason in a shared log may hold escape sequences, or letters that reverse a line."""
    said = "fine\x1b[2J\x1b]0;owned\x07 \x9b31m \u202eevil"
    table = FittedTable([TableColumn("release", heads=True), TableColumn("reason")])
    table.add_row("1", said)

    text = printed(width, table.print) + printed(width, lambda out: print_hanging(out, said))

    assert "fine" in text
    assert not {"\x1b", "\x9b", "\u202e", "\x07"} & set(text)
