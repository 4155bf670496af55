"""`enginegate prune`: show what nothing refers to any more, and delete it once somebody agrees."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.records import KeptEntries, PrunedEntry, PruneDocument
from enginegate.cli.policies import PolicyFiles, policies_here, policies_of
from enginegate.errors import ExitCode, InputError
from enginegate.messages import byte_size, counted
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy, read_policy
from enginegate.report.tables import FittedTable, TableColumn, print_hanging
from enginegate.retention import (
    PruneOutcome,
    PrunePlan,
    PruneScope,
    StoredEntry,
    plan_scope,
    prune_scope,
)
from enginegate.workspace import Workspace

# Months of measurements may come back with one new engine, so that nobody is surprised by a month.
_UNUSED_DAYS = 30.0
_LARGEST = 10
_SHORTEST_DAYS = 0.05


def prune_command(  # noqa: PLR0913 - one argument for each option
    policies: PolicyFiles = None,
    unused_days: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="DAYS",
            min=_SHORTEST_DAYS,
            help="delete only what was not used for so long",
        ),
    ] = _UNUSED_DAYS,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="releases of each model whose bytes stay; default: the policy's "
            "retention.releases",
        ),
    ] = None,
    retired: Annotated[
        list[str] | None,
        typer.Option(help="a model that no policy is for any more; may repeat"),
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="delete it without asking")] = False,
    every: Annotated[bool, typer.Option("--all", help="list every entry, not the largest")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show what nothing refers to any more, with its size; delete it when you agree.

    Of the workspace, of live repositories and of object storage. Whatever releases that serve or
    can be rolled back to, aliases, waiting scorecards, suspended promotions, runs, audit logs or
    journals refer to is kept (docs/retention.md). All policies of policies/ count, and those you
    name. Without a terminal and without --yes, nothing is deleted.
    """
    paths = policies_of(sorted({*(policies or ()), *policies_here()}))
    opened = [read_policy(path) for path in paths]
    scope = _scope(opened, unused_days, keep, frozenset(retired or ()))
    with printing(as_json=as_json) as output:
        plan, outcome = plan_scope(scope), None
        _print_plan(plan, scope, output.console, every=every)
        if plan.delete and (yes or _agreed(plan, output)):
            outcome = prune_scope(scope, plan)
            _print_outcome(outcome, output.console)
        elif plan.delete:
            output.console.print("Nothing was deleted. To delete it: enginegate prune --yes")
        output.document(_document(plan, outcome, scope, paths))
    if outcome is not None and outcome.failed:
        raise typer.Exit(ExitCode.COULD_NOT_FIND_OUT)


def _scope(
    policies: Sequence[Policy], days: float, keep: int | None, retired: frozenset[str]
) -> PruneScope:
    workspace = Workspace.of(policies[0])
    apart = [each for each in policies if Workspace.of(each).root != workspace.root]
    if apart:
        raise InputError(
            f"The policies use several workspaces: {workspace.root} and "
            f"{Workspace.of(apart[0]).root}. Prune one project at a time, from its folder."
        )
    if named := sorted(retired & {each.name for each in policies}):
        raise InputError(
            f"{named[0]} is not retired: a policy of policies/ is for it. Remove that policy first."
        )
    flows = pipeline_module("flows.prune")
    scope: PruneScope = flows.scope_of(
        policies, workspace, unused_for=timedelta(days=days), keep=keep, retired=retired
    )
    return scope


def _agreed(plan: PrunePlan, output: Printer) -> bool:
    if output.as_json or not (sys.stdin.isatty() and output.console.is_terminal):
        return False
    return typer.confirm(f"Delete {counted(len(plan.delete), 'entry', 'entries')}?")


def _print_plan(plan: PrunePlan, scope: PruneScope, out: Console, *, every: bool) -> None:
    kept = FittedTable(
        [
            TableColumn("kept because", heads=True),
            TableColumn("what"),
            TableColumn("count", right=True),
            TableColumn("size", right=True),
        ]
    )
    for total in plan.kept:
        kept.add_row(total.reason, total.kind, f"{total.count:,}", byte_size(total.size_bytes))
    if plan.kept:
        kept.print(out)
    since = f"{plan.unused_since:%Y-%m-%d %H:%M} UTC"
    if not plan.delete:
        print_hanging(
            out, f"Nothing can be deleted: all is referred to, or was used since {since}."
        )
        return
    gone = FittedTable(
        [
            TableColumn("nothing refers to", heads=True),
            TableColumn("count", right=True),
            TableColumn("size", right=True),
        ]
    )
    for kind, count, size in _by_kind(plan.delete):
        gone.add_row(kind, f"{count:,}", byte_size(size))
    gone.print(out)
    largest = sorted(plan.delete, key=lambda entry: -entry.size_bytes)
    for entry in largest if every else largest[:_LARGEST]:
        what = f"{entry.kind} {entry.about}".rstrip()
        words = f"{what}, used {entry.used_at:%Y-%m-%d}: {entry.place}"
        print_hanging(out, words, f"{byte_size(entry.size_bytes):>10}  ")
    if len(largest) > _LARGEST and not every:
        out.print(f"… and {len(largest) - _LARGEST:,} smaller ones (--all lists them)")
    print_hanging(
        out,
        f"{counted(len(plan.delete), 'entry', 'entries')} of {byte_size(plan.size_bytes)}, not "
        f"used since {since}; {byte_size(_free_bytes(scope))} are free on the disk of "
        f"{scope.workspace.root}.",
    )


def _by_kind(entries: Iterable[StoredEntry]) -> list[tuple[str, int, int]]:
    """Kind, count and bytes, largest first."""
    found = []
    ordered = sorted(entries, key=lambda entry: entry.kind)
    for kind, group in groupby(ordered, key=lambda entry: entry.kind):
        sizes = [entry.size_bytes for entry in group]
        found.append((kind, len(sizes), sum(sizes)))
    return sorted(found, key=lambda row: -row[2])


def _print_outcome(outcome: PruneOutcome, out: Console) -> None:
    deleted = counted(len(outcome.deleted), "entry", "entries")
    print_hanging(out, f"Deleted {deleted}: {byte_size(outcome.freed_bytes)}.")
    in_use = len(outcome.left)
    if in_use:
        count = counted(in_use, "entry", "entries")
        print_hanging(out, f"{count} stay: a run began to use them, or runs began all the time.")
    for place, why in outcome.failed.items():
        print_hanging(out, f"{place} could not be deleted: {why}")


def _free_bytes(scope: PruneScope) -> int:
    root = scope.workspace.root
    return shutil.disk_usage(root if root.is_dir() else root.parent).free


def _document(
    plan: PrunePlan, outcome: PruneOutcome | None, scope: PruneScope, policies: Sequence[Path]
) -> PruneDocument:
    gone = {entry.place for entry in outcome.deleted} if outcome else set()
    failed = outcome.failed if outcome else {}

    def state_of(entry: StoredEntry) -> dict[str, str]:
        if outcome is None:
            return {"state": "shown"}
        if entry.place in failed:
            return {"state": "failed", "why": failed[entry.place]}
        return {"state": "deleted" if entry.place in gone else "in use"}

    return PruneDocument(
        workspace=str(scope.workspace.root),
        policies=tuple(str(path) for path in policies),
        unused_since=plan.unused_since,
        done=outcome is not None,
        entries=tuple(
            PrunedEntry(
                kind=entry.kind,
                place=entry.place,
                about=entry.about,
                size_bytes=entry.size_bytes,
                used_at=entry.used_at,
                **state_of(entry),
            )
            for entry in plan.delete
        ),
        kept=tuple(
            KeptEntries(
                kind=total.kind,
                reason=total.reason.value,
                count=total.count,
                size_bytes=total.size_bytes,
            )
            for total in plan.kept
        ),
        size_bytes=plan.size_bytes,
        freed_bytes=outcome.freed_bytes if outcome else 0,
        free_bytes=_free_bytes(scope),
    )
