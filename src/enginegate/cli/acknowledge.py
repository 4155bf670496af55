"""Broken promises on the terminal: which wait for a person, and that somebody acknowledges them."""

from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console

from enginegate.errors import EnginegateError
from enginegate.policy import Policy
from enginegate.repository import AuditLog, Layout
from enginegate.repository.history import broken_promises as promises
from enginegate.tracking import try_deliver
from enginegate.watch.log import WatchCheck, WatchLog
from enginegate.workspace import Workspace


def acknowledge(policy: Policy, who: str, why: str, release: int | None, out: Console) -> None:
    """Write who knows of a broken promise into the audit log, and update MLflow.

    Raises:
        InputError: nothing waits for an acknowledgement, or name or reason are missing.
        RepositoryError: the audit log cannot be written, or was changed.
    """
    root, workspace = policy.target.repository, Workspace.of(policy)
    layout = Layout(root, policy.name)
    given = promises.Acknowledgement(who, why, release, way="command")
    done = promises.acknowledge(root, policy.name, given, _live_checks(layout, workspace))
    for broken in done:
        out.print(f"Acknowledged by {who}: {broken}.", markup=False)
    events = AuditLog(root).read()
    for number in sorted({broken.release for broken in done}):
        with suppress(EnginegateError):  # the manifest of a withdrawn release is gone
            manifest = layout.release(number)
            checks = WatchLog.at(workspace, manifest).read()
            state = promises.shown_state(events, policy.name, number, checks)
            out.print(f"Release {number} is shown as: {state.word}.")
    refusal = try_deliver(workspace, root)
    if refusal:
        out.print(f"MLflow is updated later: {refusal.splitlines()[0]}", markup=False)


def state_words(policy: Policy, workspace: Workspace) -> Iterator[str]:
    """How the live release's checks ended, and every broken promise nobody has acknowledged.

    Raises:
        TamperedError: the audit log was changed.
    """
    layout = Layout(policy.target.repository, policy.name)
    events = AuditLog(layout.root).read()
    current, checks = layout.current(), _live_checks(layout, workspace)
    if current is not None and checks:
        state = promises.shown_state(events, policy.name, current.version, checks)
        newest = checks[-1]
        yield (
            f"watch: {state.word} (newest check: {newest.number} of "
            f"{newest.at:%Y-%m-%d %H:%M:%S %Z}, {newest.outcome.word})"
        )
    for broken in promises.broken_promises(events, policy.name, checks):
        if broken.acknowledged is None:
            yield f"promise broken, not acknowledged: {broken}"
            yield f"  enginegate acknowledge POLICY --release {broken.release} --reason WHY"


def _live_checks(layout: Layout, workspace: Workspace) -> tuple[WatchCheck, ...]:
    current = layout.current()
    if current is None:
        return ()
    return WatchLog.at(workspace, layout.release(current.version)).read()
