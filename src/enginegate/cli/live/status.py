"""`status`: each model's state, its promise beside what is measured, what waits for a person."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from enginegate.cli.approve import waiting
from enginegate.cli.live.status_record import StatusReading, StatusRecord, policy_stamp
from enginegate.cli.output.records import (
    BrokenPromiseStatus,
    MeasuredLive,
    ModelStatus,
    ReleaseState,
    ReleaseStatus,
    ServerStatus,
    StatusDocument,
)
from enginegate.decision import Promise, Release
from enginegate.errors import EnginegateError, InputError, TamperedError
from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import short_number
from enginegate.policy import Policy, read_policy
from enginegate.policy.paths import project_of
from enginegate.report.tables import FittedTable, TableColumn, print_hanging
from enginegate.repository import AuditLog, Layout, StoredTarget, open_target
from enginegate.repository.history import broken_promises as promises
from enginegate.repository.history.audit import (
    LIVE_EVENTS,
    Event,
    What,
    last_live_event,
    live_changes,
)
from enginegate.repository.store.layout import Current
from enginegate.triton.endpoint import live_addresses, live_client
from enginegate.watch.log import WatchCheck, WatchLog
from enginegate.workspace import Workspace

_WHEN = "%Y-%m-%d %H:%M:%S %Z"
_STATE_STYLES = {"live": "bold green", "rolled back": "yellow", "withdrawn": "yellow"}
_OUTCOME_STYLES = {Outcome.PASSED: "green", Outcome.INCONCLUSIVE: "yellow"}
_BAD = "bold red"
# Of more models than this, `status` prints one line each: nobody reads a table of each.
MOST_IN_FULL = 20
# What says which release is live, and which broken promises wait for a person.
_SHOWN: tuple[What, ...] = (*sorted(LIVE_EVENTS), "promise broken", "acknowledged")
_DIGEST_SHOWN = 12
_ENDED: dict[str, ReleaseState] = {"rolled back": "rolled back", "withdrawn": "withdrawn"}


def live_checks(layout: Layout, workspace: Workspace) -> tuple[WatchCheck, ...]:
    """Checks of the live release, oldest first; none where nothing is live."""
    current = layout.current()
    if current is None:
        return ()
    return WatchLog.at(workspace, layout.release(current.version)).read()


class StatusFound(NamedTuple):
    """What `status` found.

    Attributes:
        document: what is live, and what waits for a person.
        errors: why policies, and files of the workspace, cannot be read.
    """

    document: StatusDocument
    errors: tuple[EnginegateError, ...]


def status_of(
    policies: Iterable[Path],
    *,
    shown: Callable[[ModelStatus], None] = lambda _: None,
    refused: Callable[[EnginegateError], None] = lambda _: None,
    brief: bool = False,
) -> StatusFound:
    """The state of each policy's model; a policy that cannot be read hides no other.

    Args:
        policies: their files.
        shown: called with each model as soon as it is known.
        refused: called with each error.
        brief: only what `print_status` shows of many models; those that have not changed since
            they were shown are not read again, and no server of theirs is asked.
    """
    places: dict[Path, Path] = {}
    records: dict[Path, StatusRecord] = {}
    models: list[ModelStatus] = []
    errors: list[EnginegateError] = []

    def refuse(error: EnginegateError) -> None:
        errors.append(error)
        refused(error)

    for path in policies:
        try:
            folder = path.parent
            place = places[folder] if folder in places else project_of(folder.resolve())
            places[folder] = place
            if place in records and (known := records[place].unchanged(path, place)) is not None:
                models.append(known)
            else:
                models.append(_status_read(path, place, records, remembered=brief))
            shown(models[-1])
        except EnginegateError as error:
            refuse(error)
    for record in records.values():
        record.save()
    unreadable = (message for each in records.values() for message in each.unreadable)
    for message in dict.fromkeys(unreadable):
        refuse(InputError(message))
    words = tuple(str(error) for error in errors)
    return StatusFound(StatusDocument(models=tuple(models), errors=words), tuple(errors))


def _status_read(
    path: Path, place: Path, records: dict[Path, StatusRecord], *, remembered: bool
) -> ModelStatus:
    """The status of one policy's model; the record of its workspace is opened with the first."""
    if remembered and place not in records:
        workspace = Workspace.of_project(place)
        records[place] = StatusRecord.of(workspace, remembered=True)
        known = records[place].unchanged(path, place)
        if known is not None:
            return known
    stamp = policy_stamp(path)
    rules = read_policy(path)
    if place not in records:
        records[place] = StatusRecord.of(Workspace.of_project(place), remembered=False)
    record = records[place]
    sources = record.sources(path, Layout(rules.target.repository, rules.name))
    reading = StatusReading()
    status = model_status(rules, path, record, reading)
    if stamp == policy_stamp(path):
        record.keep(path, place, status, sources, reading)
    return status


def model_status(
    policy: Policy, path: Path, record: StatusRecord, reading: StatusReading
) -> ModelStatus:
    """Everything that `status` shows of one policy's model.

    Args:
        policy: its rules.
        path: the policy's file.
        record: of the workspace, with checks, scorecards and decisions.
        reading: takes what was seen on the way.

    Raises:
        RepositoryError: the policy's repository is no folder.
        TamperedError: the live pointer or the journal was changed.
    """
    layout = Layout(policy.target.repository, policy.name)
    problems: list[str] = []
    workspace, cards = record.workspace, record.cards(policy.name)
    events = _events(layout, record.log(layout.root), problems)
    current, checks = layout.current(), live_checks(layout, workspace)
    reading.checks = len(checks)

    def ages(_: Scorecard) -> None:
        reading.ages = True

    manifests = layout.releases()
    releases = tuple(_release_statuses(layout, manifests, current, events))
    live = next((each for each in releases if each.state == "live"), None)
    last = last_live_event(events, policy.name)
    held = _held(layout, current, problems)
    told = promises.broken_promises(events, policy.name, checks)
    shown = promises.shown_of(told, current.version, checks) if current else None
    broken = [each for each in told if not each.acknowledged]
    return ModelStatus(
        policy=str(path),
        model=policy.name,
        repository=str(policy.target.repository),
        state="live" if live else "withdrawn" if _withdrawn(last) else "nothing live",
        words=_state_words(live, last),
        live=live,
        watch=shown.word if shown else None,
        promise=held.promise if held else None,
        promised_by=held.scorecard_sha256 if held else None,
        measured=_measured(checks[-1]) if checks else None,
        broken=tuple(
            BrokenPromiseStatus(release=b.release, check=b.check, at=b.at, why=b.why)
            for b in broken
        ),
        releases=releases,
        servers=tuple(_servers(policy, current.version if current else None)),
        waiting=tuple(waiting(policy, workspace, path, releases=manifests, cards=cards, ages=ages)),
        problems=tuple(problems),
    )


def print_status(status: ModelStatus, out: Console, *, brief: bool = False) -> None:
    """State first, then identity, promise and measurement, releases, and what waits.

    Args:
        status: of one model.
        out: where to.
        brief: only its state, and what somebody has to do something about.
    """
    bad = bool(status.broken)
    style = _BAD if bad else _STATE_STYLES.get(status.state, "yellow")
    print_hanging(out, Text.assemble((status.model, "bold"), "  ", (status.words, style)))
    if not brief:
        _print_facts(status, out)
    if status.promise is not None and not brief:
        _print_promise(status.promise, status.measured, status.watch, out)
        if status.measured is None:
            _print_command(f"enginegate watch {status.policy} --once", out)
    for broken in status.broken:
        said = (
            f"promise broken, not acknowledged: release {broken.release} broke its promise at "
            f"check {broken.check} ({broken.at:{_WHEN}}): {broken.why}"
        )
        print_hanging(out, Text(said, style=_BAD), "  ")
        command = f"enginegate acknowledge {status.policy} --release {broken.release} --reason WHY"
        _print_command(command, out)
    several = len(status.releases) > 1 or (status.releases and status.live is None)
    if several and not brief:
        _print_releases(status.releases, out)
    for problem in status.problems:
        print_hanging(out, Text(problem, style=_BAD), "  ")
    for each in status.waiting:
        print_hanging(out, each.sentence, "  ")
        if each.next:
            _print_command(each.next, out)


def _print_facts(status: ModelStatus, out: Console) -> None:
    """What identifies the live release; digests and paths are whole, to be copied."""
    facts = [("repository", status.repository)]
    for server in status.servers:
        name = f"{server.kind} {server.name}".rstrip()
        facts.append((name, f"{server.address} {server.state}".strip()))
    live = status.live
    if live is not None:
        facts += [
            ("engine sha256", live.engine_sha256),
            ("release digest", live.release_sha256),
            ("published", f"{live.published_at:{_WHEN}}"),
            ("approved by", f"{live.approved_by}: {live.reason}"),
        ]
    if status.promised_by is not None:
        facts.append(("held to", f"scorecard {status.promised_by[:_DIGEST_SHOWN]}"))
    labels = max(len(name) for name, _ in facts)
    for name, text in facts:
        print_hanging(out, text, Text(f"  {name:<{labels}}  ", style="dim"))


class _Compared(NamedTuple):
    """One line of promise against measurement."""

    what: str
    promised: str
    measured: str


def _print_promise(
    promise: Promise, measured: MeasuredLive | None, word: str | None, out: Console
) -> None:
    newest = "no check yet"
    if measured is not None:
        newest = f"check {measured.check} of {measured.at:{_WHEN}}, {measured.outcome.word}"
    style = _BAD if word == Outcome.FAILED.word else ""
    print_hanging(
        out, Text.assemble(f"watch: {word or 'not checked'}", f" ({newest})", style=style), "  "
    )
    columns = [TableColumn("", heads=True), TableColumn("promised"), TableColumn("measured live")]
    table = FittedTable(columns)
    for row in _compared(promise, measured):
        table.add_row(*row)
    table.print(out)


def _compared(promise: Promise, measured: MeasuredLive | None) -> Iterator[_Compared]:
    """The promise beside the newest reading; a check has too few requests for a p99 of its own."""
    reading = measured.reading if measured else None
    probe = reading.probe if reading else None
    limit = short_number(promise.slo_p99_ms)
    over = f"{probe.over} of {probe.sent} over {limit} ms" if probe else ""
    yield _Compared("p99", f"{short_number(promise.p99_ms)} ms, SLO {limit} ms", over)
    median = _ms(probe.median_ms) if probe else ""
    yield _Compared("p50", _ms(promise.p50_ms), median)
    yield _Compared("on server", _ms(promise.server_ms), _ms(reading.server_ms) if reading else "")
    yield _Compared(
        "requests",
        f"{short_number(promise.throughput_per_s)}/s",
        f"{short_number(reading.arrived_per_s)}/s arrived, {reading.failed} failed"
        if reading
        else "",
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{short_number(value)} ms"


def _print_releases(releases: Sequence[ReleaseStatus], out: Console) -> None:
    names = ("release", "state", "candidate", "model", "published", "approved by", "engine")
    whole = {"release", "state", "candidate", "published", "engine"}
    heads = {"release", "state", "candidate"}
    table = FittedTable([TableColumn(n, whole=n in whole, heads=n in heads) for n in names])
    for each in releases:
        table.add_row(
            f"release {each.release}",
            Text(each.state, style=_STATE_STYLES.get(each.state, "")),
            each.candidate,
            each.model_uri,
            f"{each.published_at:%Y-%m-%d %H:%M:%S}",
            f"{each.approved_by}: {each.reason}",
            each.engine_sha256[:_DIGEST_SHOWN] if each.has_bytes else "bytes removed",
        )
    table.print(out)


def _print_command(command: str, out: Console) -> None:
    out.print(Text(f"    {command}"), soft_wrap=True)


def _events(layout: Layout, log: AuditLog, problems: list[str]) -> tuple[Event, ...]:
    try:
        return log.of(layout.model, *_SHOWN)
    except TamperedError as error:
        problems.append(f"what people acknowledged cannot be read: {error}")
        return ()


def _held(layout: Layout, current: Current | None, problems: list[str]) -> Release | None:
    """The live release with the promise that the watch holds it to."""
    if current is None:
        return None
    try:
        return layout.held_to(layout.release(current.version))
    except EnginegateError as error:
        problems.append(f"what it was promised since cannot be read: {error}")
        return None


def _release_statuses(
    layout: Layout, manifests: Sequence[Release], current: Current | None, events: Iterable[Event]
) -> Iterator[ReleaseStatus]:
    """Every release, the newest first."""
    states = release_states(layout.model, current, events)
    for release in reversed(manifests):
        state, since = states.get(release.version, ("replaced", None))
        yield ReleaseStatus(
            release=release.version,
            state=state,
            since=since,
            candidate=str(release.engine.candidate),
            model_uri=release.model_uri,
            published_at=release.published_at,
            approved_by=release.decision.approver,
            reason=release.decision.reason,
            engine_sha256=release.engine.engine_sha256,
            release_sha256=release.digest,
            has_bytes=layout.version_folder(release.version).is_dir(),
        )


def release_states(
    model: str, current: Current | None, events: Iterable[Event]
) -> dict[int, tuple[ReleaseState, datetime | None]]:
    """The state of each release that was ever live, and since when.

    Args:
        model: its name.
        current: the live pointer, which has the last word on what is live.
        events: of the audit log, oldest first; none where it cannot be read.
    """
    found: dict[int, tuple[ReleaseState, datetime | None]] = {}
    for change in live_changes(events):
        if change.event.model != model:
            continue
        at = change.event.at
        if change.before is not None and change.before != change.after:
            found[change.before] = (_ENDED.get(change.kind, "replaced"), at)
        if change.after is not None:
            found[change.after] = ("live", at)
    for version, (state, since) in found.items():
        if state == "live" and (current is None or version != current.version):
            found[version] = ("replaced", since)
    if current is not None:
        found[current.version] = ("live", current.changed_at)
        if current.standby is not None:
            found[current.standby] = ("standing by", current.changed_at)
    return found


def _withdrawn(last: Event | None) -> bool:
    return last is not None and last.event == "withdrawn"


def _state_words(live: ReleaseStatus | None, last: Event | None) -> str:
    if live is not None:
        back = last is not None and last.event == "rolled back" and last.release == live.release
        since = f", {'again ' if back else ''}since {live.since:{_WHEN}}" if live.since else ""
        return f"live: release {live.release}, {live.candidate}, {live.model_uri}{since}"
    if last is None or last.event != "withdrawn":
        return "nothing is live"
    return (
        f"nothing is live; release {last.release} was withdrawn by {last.who} at "
        f"{last.at:{_WHEN}}: {last.why}"
    )


def _measured(check: WatchCheck) -> MeasuredLive:
    return MeasuredLive(
        check=check.number,
        at=check.at,
        outcome=check.outcome,
        reading=check.reading,
        findings=check.findings,
    )


def _servers(policy: Policy, live: int | None) -> Iterator[ServerStatus]:
    """The first server, object storage, and each further server of a fleet."""
    addresses = live_addresses(policy.target)
    if addresses is None:
        yield ServerStatus(
            name="", address="", state="no server is known; `enginegate serve` starts one"
        )
    else:
        state = "answers" if live_client(policy.target) is not None else "does not answer"
        yield ServerStatus(name="", address=addresses.grpc, state=state)
    target = open_target(policy.live_tables, Workspace.of(policy), channel="command")
    if target.storage is not None:
        url = target.storage.store.url
        yield ServerStatus(
            kind="object storage", name="", address=url, state=_stored(target.storage)
        )
    for server in target.servers:
        where = "" if server.shares else str(server.repository.root)
        if server.repository.client is None:
            state = "does not answer"
        elif live is None:
            state = "answers"
        else:
            same = server.serves(policy.name, live)
            state = f"serves release {live}" if same else f"answers, but does not serve {live}"
        yield ServerStatus(name=server.name, address=where, state=state)


def _stored(storage: StoredTarget) -> str:
    try:
        pointer = storage.current()
    except EnginegateError as error:
        return str(error)
    if pointer is None or pointer.version is None:
        return "nothing is live"
    return f"release {pointer.version}, since {pointer.changed_at:{_WHEN}}"
