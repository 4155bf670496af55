"""The live repository on the terminal: status, verification, audit log, serving."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from enginegate.cli.approve import waiting
from enginegate.decision import Release
from enginegate.errors import EnginegateError, ExitCode, ServerError, TamperedError
from enginegate.messages import counted
from enginegate.policy import Policy
from enginegate.repository import (
    AuditLog,
    Layout,
    LiveRepository,
    StoredTarget,
    Target,
    models,
    open_primary,
    open_storage,
    open_target,
    verify,
)
from enginegate.repository.history import broken_promises as promises
from enginegate.repository.history.audit import last_live_event
from enginegate.repository.store.live_record import check_audit
from enginegate.triton.endpoint import live_addresses, live_client, live_server
from enginegate.triton.server import LOOPBACK, Ports, Server, ServerOptions
from enginegate.watch.log import WatchCheck, WatchLog
from enginegate.workspace import Workspace

_ALIVE_EVERY_S = 1.0
_MISSES = 5


def repository_of(policy: Policy) -> Target:
    """Everything a release of the policy goes to, with every server that answers."""
    return open_target(policy.live_tables, Workspace.of(policy), channel="command")


def print_status(policy: Policy, path: Path, workspace: Workspace, out: Console) -> None:
    """The live release, its promise and approver; every release; scorecards that wait."""
    layout = Layout(policy.target.repository, policy.name)
    current = layout.current()
    out.print(f"[bold]{policy.name}[/] in {policy.target.repository} ({_server_words(policy)})")
    if current is None:
        out.print(f"  {_nothing_words(layout)}", markup=False)
    else:
        live = layout.release(current.version)
        out.print(f"  live: release {live.version}, {live.engine.candidate}, {live.model_uri}")
        out.print(f"  engine sha256 {live.engine.engine_sha256}")
        out.print(f"  release digest {live.digest}")
        out.print(f"  {_promise_words(layout, live)}", markup=False)
        out.print(_history(layout.releases(), current.version, layout))
    for sentence in _further(policy, current.version if current else None):
        out.print(f"  {sentence}", markup=False)
    try:
        for sentence in _state_words(policy, workspace):
            out.print(f"  {sentence}", markup=False)
    except TamperedError as error:
        out.print(f"  what people acknowledged cannot be read: {error}", markup=False)
    for sentence in waiting(policy, workspace, path):
        out.print(f"  {sentence}", markup=False)


def _promise_words(layout: Layout, live: Release) -> str:
    """The promise that the watch checks the live release against, and who approved it."""
    try:
        held = layout.held_to(live)
    except EnginegateError as error:
        return f"what it was promised since cannot be read: {error}"
    return (
        f"promised: {held.promise}; scorecard {held.scorecard_sha256[:12]}, approved by "
        f"{held.decision.approver}"
    )


def _nothing_words(layout: Layout) -> str:
    """That nothing is live; where a release was withdrawn, by whom and why."""
    try:
        last = last_live_event(AuditLog(layout.root).read(), layout.model)
    except TamperedError:
        last = None  # `verify` and `audit` say what is wrong with the log
    if last is None or last.event != "withdrawn":
        return "nothing is live"
    return (
        f"nothing is live; release {last.release} was withdrawn by {last.who} at "
        f"{last.at:%Y-%m-%d %H:%M:%S %Z}: {last.why}"
    )


def print_verification(policy: Policy, out: Console, *, repair: bool) -> ExitCode:
    """Check everything, print it, and say how it ended.

    Returns:
        GATES_FAILED: something is not as it should be. COULD_NOT_FIND_OUT: something could not be
        read, or the server that the policy names (or that `serve` left a note of) does not answer.
    """
    repository = repository_of(policy)
    if repair:
        for sentence in repository.repair():
            out.print(sentence)
    checks = verify(repository)
    if not checks:
        out.print(f"{policy.target.repository} is not there: nothing was published.", markup=False)
    for check in checks:
        fine = "[yellow]note[/]" if check.note else "[green]ok[/]"
        known = "[bold yellow]unknown[/]" if check.unknown else fine
        mark = "[bold red]problem[/]" if check.problem else known
        out.print(f"{mark}  {check.subject}")
        if check.problem or check.unknown or check.note:
            why = check.problem or check.unknown or check.note
            out.print(f"  {why}", markup=False, soft_wrap=True)
    silent = ""
    if repository.client is None:
        silent = _silent_server(policy)
        out.print(
            silent or "No server is named or known, so only the folder was checked.", markup=False
        )
    if any(check.problem for check in checks):
        return ExitCode.GATES_FAILED
    unknown = silent or any(check.unknown for check in checks)
    return ExitCode.COULD_NOT_FIND_OUT if unknown else ExitCode.OK


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
                out.print(sentence)
            for name in models(root):
                if Layout(root, name).current() is None:
                    out.print(f"Nothing of {name} is live.")
                    continue
                release = repository.bring_up(name)
                out.print(f"Release {release.version} of {name} is loaded and proved.")
        out.print(f"Serving {root}: http://{server.http}, gRPC {server.grpc}. Ctrl-C stops it.")
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
        out.print("Object storage could not be followed; what is here is served:", markup=False)
        out.print(f"  {error}", markup=False)


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


def _server_words(policy: Policy) -> str:
    addresses = live_addresses(policy.target)
    if addresses is None:
        return "no server is known; `enginegate serve` starts one"
    answers = live_client(policy.target) is not None
    return f"server {addresses.grpc} {'answers' if answers else 'does not answer'}"


def _further(policy: Policy, live: int | None) -> Iterator[str]:
    """One line for object storage, and for each further server."""
    target = repository_of(policy)
    if target.storage is not None:
        yield _stored_words(target.storage)
    for server in target.servers:
        where = "" if server.shares else f", {server.repository.root}"
        if server.repository.client is None:
            state = "does not answer"
        elif live is None:
            state = "answers"
        else:
            same = server.serves(policy.name, live)
            state = f"serves release {live}" if same else f"answers, but does not serve {live}"
        yield f"server {server.name}{where}: {state}"


def _stored_words(storage: StoredTarget) -> str:
    try:
        pointer = storage.current()
    except EnginegateError as error:
        return f"object storage {storage.store.url}: {error}"
    if pointer is None or pointer.version is None:
        return f"object storage {storage.store.url}: nothing is live"
    return (
        f"object storage {storage.store.url}: release {pointer.version}, since "
        f"{pointer.changed_at:%Y-%m-%d %H:%M:%S}"
    )


def _history(releases: tuple[Release, ...], current: int, layout: Layout) -> Table:
    table = Table("release", "candidate", "model", "published", "approved by", "reason", "engine")
    for release in reversed(releases):
        has_bytes = layout.version_folder(release.version).is_dir()
        table.add_row(
            f"{release.version}{' (live)' if release.version == current else ''}",
            str(release.engine.candidate),
            release.model_uri,
            release.published_at.strftime("%Y-%m-%d %H:%M:%S"),
            escape(release.decision.approver),
            escape(release.decision.reason),
            release.engine.engine_sha256[:12] if has_bytes else "bytes removed",
        )
    return table


def print_audit(policy: Policy, out: Console, *, as_json: bool) -> bool:
    """Print every event about the policy's model, oldest first, if the chain holds; whether so.

    Raises:
        RepositoryError: the policy's repository is no folder.
    """
    layout = Layout(policy.target.repository, policy.name)
    log = AuditLog(layout.root)
    try:
        check_audit(layout, log)
    except TamperedError as error:
        out.print(f"problem  {error}", markup=False)
        return False
    _print_events(log, policy, out, as_json=as_json)
    return True


def _print_events(log: AuditLog, policy: Policy, out: Console, *, as_json: bool) -> None:
    events = [event for event in log.read() if event.model == policy.name]
    if as_json:
        for event in events:
            out.print(event.canonical_json().decode(), markup=False, soft_wrap=True)
        return
    if not events:
        out.print(f"Nothing has happened to {policy.name} in {policy.target.repository} yet.")
        return
    table = Table("line", "when", "event", "release", "who", "why", "from", "scorecard")
    for event in events:
        table.add_row(
            str(event.sequence + 1),
            event.at.strftime("%Y-%m-%d %H:%M:%S"),
            event.event,
            str(event.release or ""),
            escape(event.who),
            escape(event.why),
            escape(event.origin),
            (event.scorecard or "")[:12],
        )
    out.print(table)
    head = log.head()
    if head is not None:
        out.print(f"The chain holds: {counted(head.count, 'line')}, head {head.sha256}")


def _state_words(policy: Policy, workspace: Workspace) -> Iterator[str]:
    """How the live release's checks ended, and every broken promise nobody has acknowledged.

    Raises:
        TamperedError: the audit log was changed.
    """
    layout = Layout(policy.target.repository, policy.name)
    events = AuditLog(layout.root).read()
    current, checks = layout.current(), live_checks(layout, workspace)
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


def live_checks(layout: Layout, workspace: Workspace) -> tuple[WatchCheck, ...]:
    current = layout.current()
    if current is None:
        return ()
    return WatchLog.at(workspace, layout.release(current.version)).read()
