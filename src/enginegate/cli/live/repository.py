"""The live repository on the terminal: verification, audit log, serving."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from enginegate.cli.output.json_output import Printer
from enginegate.cli.output.records import VerifiedRepository
from enginegate.errors import EnginegateError, ExitCode, ServerError, TamperedError
from enginegate.messages import counted
from enginegate.policy import Policy
from enginegate.report.tables import FittedTable, TableColumn, print_hanging
from enginegate.repository import (
    AuditLog,
    Layout,
    LiveRepository,
    Target,
    models,
    open_primary,
    open_storage,
    open_target,
    verify,
)
from enginegate.repository.history.audit import Event
from enginegate.repository.store.live_record import check_audit
from enginegate.repository.verified import VerifiedRecords
from enginegate.triton.endpoint import live_addresses, live_server
from enginegate.triton.server import LOOPBACK, Ports, Server, ServerOptions
from enginegate.workspace import Workspace

_ALIVE_EVERY_S = 1.0
_MISSES = 5


def repository_of(policy: Policy) -> Target:
    """Everything a release of the policy goes to, with every server that answers."""
    return open_target(policy.live_tables, Workspace.of(policy), channel="command")


def verified(
    policy: Policy, path: Path, *, repair: bool, whole: bool = False
) -> VerifiedRepository:
    """Check everything; with ``repair`` after finishing or undoing what was cut short.

    Args:
        policy: whose repository and servers.
        path: its file.
        repair: finish or undo first what was cut short.
        whole: read every byte, also of what has not changed since it was verified.
    """
    repository = repository_of(policy)
    repaired = tuple(repository.repair()) if repair else ()
    checks = verify(repository, records=VerifiedRecords(Workspace.of(policy), whole))
    server = silent = ""
    if repository.client is None:
        silent = _silent_server(policy)
        server = silent or "No server is named or known, so only the folder was checked."
    outcome: Literal["ok", "problem", "unknown"] = "ok"
    if silent or any(check.unknown for check in checks):
        outcome = "unknown"
    if any(check.problem for check in checks):
        outcome = "problem"
    return VerifiedRepository(
        policy=str(path),
        model=policy.name,
        repository=str(policy.target.repository),
        outcome=outcome,
        checks=checks,
        repaired=repaired,
        server=server,
    )


def print_verified(found: VerifiedRepository, out: Console) -> ExitCode:
    """Print every check, and say how it ended.

    Returns:
        GATES_FAILED: something is not as it should be. COULD_NOT_FIND_OUT: something could not be
        read, or the server that the policy names (or that `serve` left a note of) does not answer.
    """
    for sentence in found.repaired:
        print_hanging(out, sentence)
    if not found.checks:
        print_hanging(out, f"{found.repository} is not there: nothing was published.")
    if found.also:
        policies = counted(len(found.also), "more policy", "more policies")
        print_hanging(out, f"{policies} of this very repository: checked together.")
    for check in found.checks:
        fine = ("note", "yellow") if check.note else ("ok", "green")
        known = ("unknown", "bold yellow") if check.unknown else fine
        mark = ("problem", "bold red") if check.problem else known
        print_hanging(out, check.subject, Text.assemble(mark, "  "))
        if check.problem or check.unknown or check.note:
            out.print(Text(f"  {check.problem or check.unknown or check.note}"), soft_wrap=True)
    if found.server:
        print_hanging(out, found.server)
    codes = {"problem": ExitCode.GATES_FAILED, "unknown": ExitCode.COULD_NOT_FIND_OUT}
    return codes.get(found.outcome, ExitCode.OK)


def checked_together(policy: Policy) -> tuple[object, ...]:
    """Equal for policies whose repository, servers and keys are the same: one check is for all.

    What is in object storage is one model's alone.
    """
    target, device = policy.target, policy.live_tables.device
    model = policy.name if target.objects is not None else ""
    return policy.root, target.digest, policy.signing.digest, device, model


def _silent_server(policy: Policy) -> str:
    """That a server which should answer does not; empty where none is named or known."""
    addresses = live_addresses(policy.target)
    if addresses is None:
        return ""
    return (
        f"The live server {addresses.grpc} does not answer, so what it serves could not be found "
        "out; only the folder was checked. Start it, or correct target.endpoint in the policy."
    )


def serve_live(policy: Policy, workspace: Workspace, out: Console, ports: Ports) -> None:
    """Run Triton on the live repository until Ctrl-C; every live release is loaded and proved."""
    root, server_name = policy.target.repository, _server_at(policy, ports.grpc)
    with live_server(
        root, workspace, ServerOptions(ports=ports), server_name=server_name
    ) as server:
        with server.client() as client:
            repository = replace(
                open_primary(policy.live_tables, workspace, channel="serve"), client=client
            )
            _follow(policy, repository, out)
            for sentence in repository.recover():
                print_hanging(out, sentence)
            for name in models(root):
                if Layout(root, name).current() is None:
                    print_hanging(out, f"Nothing of {name} is live.")
                    continue
                release = repository.bring_up(name)
                print_hanging(out, f"Release {release.version} of {name} is loaded and proved.")
        addresses = f"http://{server.http}, gRPC {server.grpc}"
        print_hanging(out, f"Serving {root}: {addresses}. Ctrl-C stops it.")
        _watch(server)


def _server_at(policy: Policy, port: int) -> str:
    """The fleet's server that serves the target's repository at this port here; empty: none."""
    addresses = {f"{host}:{port}" for host in (LOOPBACK, "localhost")}
    found = (s.name for s in policy.target.fleet if not s.repository and s.endpoint in addresses)
    return next(found, "")


def _follow(policy: Policy, repository: LiveRepository, out: Console) -> None:
    """Come to what is live in object storage; if that cannot be, what is here is served."""
    storage = open_storage(policy.live_tables, repository)
    try:
        if storage is not None:
            storage.pull()
    except EnginegateError as error:
        print_hanging(out, "Object storage could not be followed; what is here is served:")
        print_hanging(out, str(error), "  ")


def _watch(server: Server) -> None:
    """Return only by Ctrl-C, or when the server has not answered several times in a row."""
    missed = 0
    while True:
        time.sleep(_ALIVE_EVERY_S)
        try:
            server.check_alive()
            missed = 0
        except ServerError:
            missed += 1
            if missed == _MISSES:
                raise


def print_audit(policy: Policy, output: Printer) -> bool:
    """Print every event about the policy's model, oldest first, if the chain holds; whether so.

    Raises:
        RepositoryError: the policy's repository is no folder.
    """
    layout = Layout(policy.target.repository, policy.name)
    log = AuditLog(layout.root)
    try:
        check_audit(layout, log)
    except TamperedError as error:
        print_hanging(output.console, f"problem  {error}")
        return False
    events = log.of(policy.name)
    if output.stream is not None:
        for event in events:
            output.stream.write(f"{event.canonical_json().decode()}\n")
    elif events:
        _print_events(events, output.console)
        head = log.head()
        if head is not None:
            counts = counted(head.count, "line")
            print_hanging(output.console, f"The chain holds: {counts}, head {head.sha256}")
    else:
        sentence = f"Nothing has happened to {policy.name} in {policy.target.repository} yet."
        print_hanging(output.console, sentence)
    return True


def _print_events(events: Sequence[Event], out: Console) -> None:
    names = ("line", "when", "event", "release", "who", "why", "from", "scorecard")
    whole = {"line", "when", "event", "scorecard"}
    heads = {"line", "when", "event"}
    table = FittedTable([TableColumn(n, whole=n in whole, heads=n in heads) for n in names])
    for event in events:
        table.add_row(
            str(event.sequence + 1),
            event.at.strftime("%Y-%m-%d %H:%M:%S"),
            event.event,
            str(event.release or ""),
            event.who,
            event.why,
            event.origin,
            (event.scorecard or "")[:12],
        )
    table.print(out)
