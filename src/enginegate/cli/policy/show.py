"""`enginegate policy show`: every key of a policy, its value, its origin and its meaning."""

from itertools import groupby
from pathlib import Path

from rich.text import Text

from enginegate.candidate import Precision
from enginegate.cli.output.json_output import Printer
from enginegate.cli.output.records import PolicyKey, PolicyLimit, PolicyListing
from enginegate.errors import InputError
from enginegate.policy import read_policy, read_tables
from enginegate.policy.listing import (
    NOT_SET,
    ListedKey,
    ListedLimit,
    list_keys,
    list_limits,
    table_meanings,
)
from enginegate.report.tables import FittedTable, TableColumn, print_hanging

_GATES = "gates"
_STATED = "*"
_EMPTY = frozenset({NOT_SET, "{}", "[]"})


def show_policy(path: Path | None, only: list[str], output: Printer) -> None:
    """Print every key of a policy; without one, what each key is where a policy leaves it out.

    Args:
        only: tables to print; empty: all of them.

    Raises:
        InputError: there is no table of that name.
        PolicyError: the policy cannot be read, or breaks a rule.
    """
    policy, stated = (read_policy(path), read_tables(path)) if path else (None, {})
    keys, limits = list_keys(policy, stated), list_limits(policy, stated)
    tables = [*dict.fromkeys(_family(key.table) for key in keys), _GATES]
    if unknown := [name for name in only if name not in tables]:
        raise InputError(
            f"There is no table {', '.join(unknown)}; there are {', '.join(filter(None, tables))}."
        )
    keys = tuple(key for key in keys if not only or _family(key.table) in only)
    if policy is not None:  # limits that its task has no number for
        limits = tuple(limit for limit in limits if not _EMPTY.issuperset(limit.values.values()))
    limits = limits if not only or _GATES in only else ()
    for table, listed in groupby(keys, lambda key: key.table):
        _print_table(table, list(listed), output)
    if limits:
        is_standard = policy is None or policy.gates["default"].tolerances == "standard"
        _print_limits(limits, output, is_standard=is_standard)
    output.document(
        PolicyListing(
            policy=str(path or ""),
            keys=tuple(PolicyKey(**key._asdict()) for key in keys),
            limits=tuple(
                PolicyLimit(
                    key=limit.key,
                    values={p.value: value for p, value in limit.values.items()},
                    stated=tuple(p.value for p in Precision if p in limit.stated),
                    meaning=limit.meaning,
                    reason=limit.reason,
                )
                for limit in limits
            ),
        )
    )


def _family(table: str) -> str:
    """``metrics`` of ``metrics.r2``."""
    return table.partition(".")[0]


def _print_table(name: str, keys: list[ListedKey], output: Printer) -> None:
    about = table_meanings().get(_family(name), "")
    table = FittedTable(
        (
            TableColumn("key", whole=True, heads=True),
            TableColumn("value", heads=True),
            TableColumn("from", whole=True),
            TableColumn("meaning"),
        ),
        title=f"[{name}] {about}" if name else about,
    )
    for key in keys:
        style = "" if key.origin == "stated" else "dim"
        table.add_row(key.key, key.value, Text(key.origin, style=style), key.meaning)
    table.print(output.console)


def _print_limits(limits: tuple[ListedLimit, ...], output: Printer, *, is_standard: bool) -> None:
    precisions = list(limits[0].values)
    table = FittedTable(
        (
            TableColumn("limit", whole=True, heads=True),
            *(TableColumn(each.value, whole=True) for each in precisions),
            TableColumn("meaning"),
            *((TableColumn("why this standard"),) if is_standard else ()),
        ),
        title=f"[{_GATES}] {table_meanings()[_GATES]}",
    )
    for limit in limits:
        if set(limit.values.values()) == {NOT_SET} and not limit.reason:
            continue
        cells = (_limit_cell(limit, each, is_standard=is_standard) for each in precisions)
        reasons = (limit.reason,) if is_standard else ()
        table.add_row(limit.key, *cells, limit.meaning, *reasons)
    table.print(output.console)
    if is_standard:
        print_hanging(
            output.console,
            f'{_STATED}: stated by the file. The rest is tolerances = "standard": limits for a '
            "model that nobody has measured yet (docs/gates.md). State your own under "
            "[gates.default], or for one precision under [gates.int8] and so on.",
        )


def _limit_cell(limit: ListedLimit, precision: Precision, *, is_standard: bool) -> str:
    value = limit.values[precision]
    return f"{value}{_STATED}" if is_standard and precision in limit.stated else value
