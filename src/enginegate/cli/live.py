"""The live repository on the terminal: status, verification, serving."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from enginegate.cli.acknowledge import state_words
from enginegate.cli.checkout import of_checkout
from enginegate.cli.waiting import waiting
from enginegate.decision import Decision, Release
from enginegate.errors import EnginegateError, ExitCode, ServerError, TamperedError
from enginegate.policy import Policy
from enginegate.repository import (
    AuditLog,
    Fleet,
    Layout,
    LiveRepository,
    LiveTarget,
    ObjectRepository,
    models,
    open_lead,
    open_repository,
    open_storage,
    verify,
)
from enginegate.repository.history.changes import last_live_event
from enginegate.triton.endpoint import live_addresses, live_client, live_server
from enginegate.triton.server import LOOPBACK, Ports, Server, ServerOptions
from enginegate.workspace import Workspace

_LOOK_S = 1.0
_MISSES = 5


def repository_of(policy: Policy) -> LiveTarget:
    """Everything a release of the policy goes to, with every server that answers."""
    return open_repository(policy.live_tables, Workspace.of(policy), way="command")


def print_status(policy: Policy, path: Path, workspace: Workspace, out: Console) -> None:
    """What is live, since when, on whose word; every release; what waits for a decision."""
    layout = Layout(policy.target.repository, policy.name)
    current = layout.current()
    out.print(f"[bold]{policy.name}[/] in {policy.target.repository} ({_server_words(policy)})")
    if current is None:
        out.print(f"  {_nothing_words(layout)}", markup=False)
    else:
        live = layout.release(current.version)
        out.print(f"  live: release {live.version}, {live.candidate}, {live.model_uri}")
        out.print(f"  engine sha256 {live.engine_sha256}")
        out.print(f"  release digest {live.digest}")
        out.print(f"  {_promise_words(layout, live)}", markup=False)
        out.print(_history(layout.releases(), current.version, layout))
    for sentence in _further(policy, current.version if current else None):
        out.print(f"  {sentence}", markup=False)
    try:
        for sentence in state_words(policy, workspace):
            out.print(f"  {sentence}", markup=False)
    except TamperedError as error:
        out.print(f"  what people acknowledged cannot be read: {error}", markup=False)
    for sentence in waiting(policy, workspace, path):
        out.print(f"  {sentence}", markup=False)


def _promise_words(layout: Layout, live: Release) -> str:
    """What the watch holds the live release to, and on whose word."""
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
            said = check.problem or check.unknown or check.note
            out.print(f"  {said}", markup=False, soft_wrap=True)
    silent = ""
    if repository.client is None:
        silent = _silent_server(policy)
        said = silent or "No server is named or known, so only the folder was checked."
        out.print(said, markup=False)
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


def serve(policy: Policy, workspace: Workspace, out: Console, ports: Ports) -> None:
    """Run Triton on the live repository until Ctrl-C; every live release is loaded and proved."""
    root, member = policy.target.repository, _member_at(policy, ports.grpc)
    with live_server(root, workspace, ServerOptions(ports=ports), member=member) as server:
        with server.client() as client:
            repository = replace(
                open_lead(policy.live_tables, workspace, way="serve"), client=client
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


def _member_at(policy: Policy, port: int) -> str:
    """The fleet's member that serves the target's repository at this port here; empty: none."""
    addresses = {f"{host}:{port}" for host in (LOOPBACK, "localhost")}
    found = (m.name for m in policy.target.fleet if not m.repository and m.endpoint in addresses)
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
        time.sleep(_LOOK_S)
        try:
            server.check_alive()
            missed = 0
        except ServerError:
            missed += 1
            if missed == _MISSES:
                raise


def answer_suspended(decision: Decision) -> tuple[str, ...]:
    """Resume promotions that wait on a Prefect server; none without one."""
    if not os.environ.get("PREFECT_API_URL") or not Path("flows/answer.py").is_file():
        return ()
    names: tuple[str, ...] = of_checkout("flows.answer").resume_suspended(decision)
    return names


def _server_words(policy: Policy) -> str:
    addresses = live_addresses(policy.target)
    if addresses is None:
        return "no server is known; `enginegate serve` starts one"
    answers = live_client(policy.target) is not None
    return f"server {addresses.grpc} {'answers' if answers else 'does not answer'}"


def _further(policy: Policy, live: int | None) -> Iterator[str]:
    """One line for object storage, and for each further server."""
    target = repository_of(policy)
    if isinstance(target, ObjectRepository):
        yield _stored_words(target)
        target = target.local
    for member in target.members if isinstance(target, Fleet) else ():
        where = "" if member.shares else f", {member.repository.root}"
        if member.repository.client is None:
            said = "does not answer"
        elif live is None:
            said = "answers"
        else:
            same = member.serves(policy.name, live)
            said = f"serves release {live}" if same else f"answers, but does not serve {live}"
        yield f"server {member.name}{where}: {said}"


def _stored_words(storage: ObjectRepository) -> str:
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
        kept = layout.version_folder(release.version).is_dir()
        table.add_row(
            f"{release.version}{' (live)' if release.version == current else ''}",
            str(release.candidate),
            release.model_uri,
            release.published_at.strftime("%Y-%m-%d %H:%M:%S"),
            escape(release.decision.approver),
            escape(release.decision.reason),
            release.engine_sha256[:12] if kept else "bytes removed",
        )
    return table
