"""Is everything a release went to as it was published? Digests, signatures, records, servers."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from enginegate.atomic_io import lock_holder
from enginegate.chained_log.line_index import Stamp
from enginegate.errors import (
    EnginegateError,
    NotWritableError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.messages import counted
from enginegate.records import Record
from enginegate.repository.deploy.deployment import Deployment
from enginegate.repository.deploy.desired_config import wrong_files
from enginegate.repository.history.audit import AUDIT, LIVE_EVENTS, AuditLog, last_live_event
from enginegate.repository.history.journal import (
    JOURNAL,
    Journal,
    intent_detail,
    last_change,
    last_promise,
    unfinished,
)
from enginegate.repository.history.signing import ReleaseSigning
from enginegate.repository.lock import LOCK, hold_lock
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import was_withdrawn
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.rollout.target import FleetServer, StoredTarget, Target
from enginegate.repository.store.layout import Layout, models, parts_by_owner
from enginegate.repository.store.live_record import LiveRecord, check_audit
from enginegate.repository.store.object_journal import cut_short, is_abandoned, is_open
from enginegate.repository.store.release_files import ReleaseFiles, signed_promise
from enginegate.repository.verified import (
    ModelFiles,
    VerifiedBefore,
    VerifiedRecords,
    fingerprints,
)

# Events that only a model with a release has.
_OF_A_RELEASE = LIVE_EVENTS | {"promised", "repaired", "promise broken", "acknowledged"}
_LOCK_TIMEOUT_S = 10.0
_ATTEMPTS = 3
# A version that takes longer to load than this is said to be loading still.
_SETTLED_S = 10.0
_POLL_S = 0.2


class VerifyCheck(Record):
    """One thing that was checked. ``problem`` is empty when it is as it should be."""

    subject: str
    problem: str = ""
    unknown: str = ""
    """Why it could not be found out whether it is as it should be."""
    note: str = ""
    """What could not be checked, and need not be."""
    since: datetime | None = None
    """When its bytes were read, where nothing has changed since and they were not read again."""


def verify(
    target: Target, *, read_back: bool = True, records: VerifiedRecords | None = None
) -> tuple[VerifyCheck, ...]:
    """Check folders, servers and objects; nothing is changed, no problem hides another.

    Args:
        target: what to check.
        read_back: read every object in storage whole; else only what says which release is live.
        records: of what was verified before: bytes that have not changed since are not read again.
            None: every byte is read.

    Raises:
        RepositoryBusyError: somebody is changing a repository: check again when they are done.
    """
    checks = [*verify_folder(target.primary, records)]
    for server in target.servers:
        checks += _server(server, target.primary, records)
    if target.storage is not None:
        checks += _objects(target.storage, read_back=read_back)
    return tuple(checks)


def verify_folder(
    repository: LiveRepository, records: VerifiedRecords | None = None
) -> tuple[VerifyCheck, ...]:
    """Check everything that can be checked from the folder, and from the server if there is one.

    Nothing is changed, and one problem never hides another. Nobody waits meanwhile: what somebody
    changed during the check is checked once more. Who may only read checks the same, and takes no
    lock.

    Raises:
        RepositoryBusyError: somebody is changing the repository: check again when they are done.
    """
    if not repository.root.exists():
        return ()
    found: tuple[VerifyCheck, ...] = ()
    before = records.of(repository) if records is not None else None
    whole = records is None or records.whole
    state, unlocked = _state(repository)
    for _ in range(_ATTEMPTS):
        lock = (VerifyCheck(subject="lock", note=unlocked),) if unlocked else ()
        if before is not None:
            before.begin()
        found = (*lock, *_checks(repository, before, whole=whole))
        after, unlocked = _state(repository)
        if after == state:
            if before is not None:
                before.save()
            return found
        state = after
    changed = f"{repository.root} was changed while it was checked; check again."
    return (*found, VerifyCheck(subject="repository", problem=changed))


def _state(repository: LiveRepository) -> tuple[list[Stamp | None], str]:
    """How far journal and audit log have come, at a moment when nobody changes anything.

    With why the lock could not be taken for that; empty where it was.
    """
    try:
        with hold_lock(repository.root, timeout_s=_LOCK_TIMEOUT_S):
            return _how_far(repository.root), ""
    except NotWritableError:
        return _how_far(repository.root), _waited_for(repository.root / LOCK)


def _how_far(root: Path) -> list[Stamp | None]:
    return [Stamp.of(root / name) for name in (JOURNAL, AUDIT)]


def _waited_for(lock: Path) -> str:
    """Wait until nobody holds a lock that may not be taken here; what was done in its place.

    Raises:
        RepositoryBusyError: somebody held it all the time.
    """
    end_s = time.monotonic() + _LOCK_TIMEOUT_S
    read_only = f"{lock.parent} may only be read from here, so it was read without its lock"
    try:
        while (holder := lock_holder(lock)) is not None:
            if time.monotonic() > end_s:
                raise RepositoryBusyError(
                    f"{lock.parent} is being changed by {holder}. Look again when it has finished."
                )
            time.sleep(_POLL_S)
    except OSError as error:
        return f"{read_only}, and whether somebody changes it is not known: {error.strerror}."
    return f"{read_only}; nobody changed it meanwhile."


def _checks(
    repository: LiveRepository, before: VerifiedBefore | None, *, whole: bool
) -> Iterator[VerifyCheck]:
    journal, audit = Journal(repository.root), AuditLog(repository.root)
    if whole:
        with suppress(EnginegateError):  # said below, by whatever reads it
            journal.check_all()
        with suppress(EnginegateError):
            audit.check_all()
    yield run_check("journal", partial(_check_journal, journal))
    if repository.root.joinpath(AUDIT).exists():
        yield run_check("audit log", audit.check)
    logs = _Logs(journal, audit, _extents_of(journal), _extents_of(audit))
    parts = parts_by_owner(repository.root)
    for name in sorted({*models(repository.root), *logs.models()}):
        layout, own_parts = Layout(repository.root, name), parts.get(name, ())
        files = None
        if before is not None:
            with suppress(OSError):  # what cannot be listed is no reason to trust it
                files = fingerprints(layout, own_parts, (before.depends, logs.extents_of(name)))
        since = before.unchanged_since(name, files) if before is not None and files else None
        if before is not None and since is not None and files is not None:
            yield _unchanged(name, files, since, before.notes(name))
        else:
            checks = []
            for check in _model_checks(repository, layout, logs, own_parts, before, files):
                checks.append(check)
                yield check
            fine = not any(check.problem or check.unknown for check in checks)
            if before is not None and files is not None and fine:
                before.keep(name, files, notes=sum(bool(check.note) for check in checks))
        if repository.client is not None:
            live = Deployment(repository.client, layout, repository.load_timeout_s)
            served = partial(_check_served, live, audit)
            yield run_check(f"{name} on the live server", served)


class _Logs(NamedTuple):
    """Journal and audit log; extents are None where one cannot be read, a check of its own."""

    journal: Journal
    audit: AuditLog
    entries: dict[str, tuple[int, int]] | None
    events: dict[str, tuple[int, int]] | None

    def models(self) -> set[str]:
        """Every model that was ever published, also when its folder is gone."""
        known = {*(self.entries or ())}
        if self.events is not None:
            known |= {model for model, what in self.audit.tally() if what in _OF_A_RELEASE}
        return known

    def extents_of(self, model: str) -> list[tuple[int, int] | None]:
        """How many lines a model has in each."""
        return [(each or {}).get(model) for each in (self.entries, self.events)]

    def record(self, layout: Layout) -> LiveRecord:
        """What they say of a model, as far as they can be read."""
        entries = self.journal.of(layout.model) if self.entries is not None else ()
        events = self.audit.of(layout.model) if self.events is not None else ()
        return LiveRecord(layout, entries, events)


def _extents_of(log: Journal | AuditLog) -> dict[str, tuple[int, int]] | None:
    try:
        return log.extents()
    except EnginegateError:
        return None


def _unchanged(model: str, files: ModelFiles, since: datetime, notes: int) -> VerifyCheck:
    more = f", with {counted(notes, 'note')} that --all shows" if notes else ""
    return VerifyCheck(
        subject=f"{model}: {counted(len(files.releases), 'release')} unchanged since they were "
        f"read at {since:%Y-%m-%d %H:%M:%S %Z}{more}",
        since=since,
    )


def _model_checks(
    repository: LiveRepository,
    layout: Layout,
    logs: _Logs,
    parts: Sequence[Layout],
    before: VerifiedBefore | None,
    files: ModelFiles | None,
) -> Iterator[VerifyCheck]:
    """Everything of one model but its server."""
    name, record = layout.model, logs.record(layout)
    yield run_check(f"{name} audit log", partial(_check_audit, logs.audit, record))
    if logs.entries is not None:  # else it was said already, and nothing is known to be missing
        yield run_check(f"{name} journal against audit log", record.check_journal_whole)
    yield run_check(f"{name} live release", partial(_check_current, layout, record))
    for version in layout.stored_versions():
        read = before is not None and files is not None and before.is_read(name, version, files)
        check = partial(_check_release, version, record, read=read)
        yield run_check(f"{name} release {version}", check)
        if repository.signing is not None and not read:
            signed = partial(_check_signature, repository.signing, record, version)
            yield run_check(f"{name} release {version} signature", signed)
        if layout.release_file(version).is_file():
            promised = partial(_check_promise, repository.signing, record, version)
            yield run_check(f"{name} release {version} promise", promised)
    if parts:
        yield run_check(f"{name} composing models", partial(_check_parts, layout, parts))
    yield run_check(f"{name} config.pbtxt", partial(_check_config, layout))


def run_check(subject: str, check: Callable[[], str | None]) -> VerifyCheck:
    """Look at one thing; what it raises is the problem, what it returns a note."""
    try:
        note = check() or ""
    except EnginegateError as error:
        if isinstance(error.__cause__, PermissionError):
            return _unread(subject, error.__cause__)
        return VerifyCheck(subject=subject, problem=str(error))
    except PermissionError as error:
        return _unread(subject, error)
    except OSError as error:
        return VerifyCheck(subject=subject, problem=f"it cannot be read: {error}")
    return VerifyCheck(subject=subject, note=note)


def _unread(subject: str, error: PermissionError) -> VerifyCheck:
    unread = f"it may not be read by this user: {error}. Verify as somebody who may."
    return VerifyCheck(subject=subject, unknown=unread)


def _check_journal(journal: Journal) -> None:
    unfinished = journal.unfinished()
    if unfinished:
        entry = unfinished[0]
        raise RepositoryError(
            f"A {entry.kind} of {entry.model} release {entry.version} was cut short after its step "
            f"'{entry.step}'. Finish or undo it with `enginegate verify --repair`."
        )


def _check_current(layout: Layout, record: LiveRecord) -> None:
    """What is live must be what journal and audit log say was made live last."""
    entries = record.entries
    change = last_change(entries)
    last = change.version if change is not None and change.kind != "withdraw" else None
    current = layout.current()
    live = current.version if current else None
    if entries and live != last:
        raise TamperedError(
            f"{layout.current_file} says that release {live or 'none'} is live; the journal's last "
            f"change made it {last or 'none'}. Somebody changed the folder."
        )
    record.check_commit_point(current)


def _check_release(version: int, record: LiveRecord, *, read: bool) -> None:
    """That it is as published; its bytes too, unless they were ``read`` and have not changed."""
    layout = record.layout
    release = layout.release(version)
    record.check_release_known(version)
    record.check_as_published(release)
    if not read:
        ReleaseFiles(layout, release).check()


def _check_signature(signing: ReleaseSigning, record: LiveRecord, version: int) -> str:
    return signing.check(ReleaseFiles(record.layout, record.layout.release(version)).signed())


def _check_promise(signing: ReleaseSigning | None, record: LiveRecord, version: int) -> str:
    """A promise that a release was given is the one that the journal has, and is signed."""
    layout, entries = record.layout, record.entries
    current = layout.current()
    held = current.promises.get(version) if current is not None else None
    given, own = last_promise(entries, layout.model, version), (layout.model, version)
    # One that was cut short may have been committed; that it was is a problem of its own.
    begun = {
        intent_detail(entries, entry)["promise"]
        for entry in unfinished(entries)
        if entry.kind == "promise" and (entry.model, entry.version) == own
    }
    if current is not None and held != given and held not in begun:
        raise TamperedError(
            f"{layout.current_file} holds release {version} to the promise "
            f"{(held or 'its own')[:12]}; the journal's last one is {(given or 'its own')[:12]}. "
            "Somebody changed the folder: promote an approved scorecard of it again."
        )
    renewed = layout.renewed(version)
    if renewed is None or signing is None:
        return ""
    return signing.check(signed_promise(layout, renewed))


def _check_audit(audit: AuditLog, record: LiveRecord) -> None:
    """The chain is whole, nothing is missing from its end, and every operation is in it."""
    check_audit(record.layout, audit)
    record.check_log_whole()


def _check_config(layout: Layout) -> None:
    current = layout.current()
    wrong = wrong_files(layout, current) if current is not None else {}
    if current is not None and wrong:
        raise TamperedError(
            f"{', '.join(map(str, wrong))} is not what release {current.version} was published "
            "with. Find out who changed it, then put it back with `enginegate verify --repair`."
        )


def _check_parts(layout: Layout, parts: Sequence[Layout]) -> None:
    """Every version of a composing model is some release's; its bytes are checked with that one."""
    known = {(part.name, part.version) for each in layout.releases() for part in each.engine.parts}
    for part in parts:
        strangers = [v for v in part.stored_versions() if (part.model, v) not in known]
        if strangers:
            raise TamperedError(
                f"{part.version_folder(strangers[0])} belongs to no release of {layout.model}. "
                "Find out who put it there, then remove it."
            )


def _check_served(live: Deployment, audit: AuditLog) -> None:
    current = live.layout.current()
    live.check_settled(patience_s=min(live.load_timeout_s, _SETTLED_S))
    if current is not None:
        live.prove_all(current)
        return
    model = live.layout.model
    last = last_live_event(audit.of(model), model)
    if last is not None and last.event == "withdrawn":
        live.prove_gone(wait=False)


def _server(
    server: FleetServer, primary: LiveRepository, records: VerifiedRecords | None
) -> Iterator[VerifyCheck]:
    if not server.shares:
        for check in verify_folder(server.repository, records):
            yield check.model_copy(update={"subject": f"{server.name}: {check.subject}"})
    for model in sorted({*models(primary.root), *server.models()}):
        subject = f"{server.name}: {model} as on the primary"
        who = RolloutState(primary.root).under_way_by(model)
        if who is not None:
            yield VerifyCheck(subject=subject, note=f"It is being rolled out by {who}.")
        elif _is_silent(server, primary, model):
            yield VerifyCheck(
                subject=subject,
                unknown=f"Server {server.name!r} does not answer, so what it serves could not "
                "be found out. Start it, or take it out of target.fleet in the policy.",
            )
        else:
            yield run_check(subject, partial(_as_on_primary, server, primary, model))


def _is_silent(server: FleetServer, primary: LiveRepository, model: str) -> bool:
    """Whether nothing but its server could say that a server serves what is live."""
    live = Layout(primary.root, model).current()
    here = Layout(server.repository.root, model).current()
    if live is None or here is None or here.version != live.version:
        return False
    return not server.answers()


def _as_on_primary(server: FleetServer, primary: LiveRepository, model: str) -> None:
    current = Layout(primary.root, model).current()
    live = current.version if current else None
    here = Layout(server.repository.root, model).current()
    if live is None and here is not None and was_withdrawn(Layout(primary.root, model)):
        raise RepositoryError(
            f"{model} was withdrawn; server {server.name!r} has release {here.version} in "
            f"{server.repository.root}. Take it out with `enginegate verify --repair`."
        )
    if live is not None and not server.serves(model, live):
        state = "does not serve it" if server.answers() else "does not answer"
        raise RepositoryError(
            f"Release {live} of {model} is live; server {server.name!r} {state}. Bring it to the "
            "primary's with `enginegate verify --repair`."
        )


def _objects(target: StoredTarget, *, read_back: bool) -> Iterator[VerifyCheck]:
    where = f"{target.model} in {target.store.url}"
    yield run_check(f"{where}: journal", partial(_check_object_journal, target))
    yield run_check(f"{where}: live release", partial(_check_pointer, target))
    yield run_check(f"{where}: what killed uploads left", partial(_check_stray_objects, target))
    for version in target.releases.versions() if read_back else ():
        if target.releases.has_bytes(version):
            check = partial(target.releases.check, version)
            yield run_check(f"{where}: release {version}", check)


def _check_object_journal(target: StoredTarget) -> None:
    entries = target.journal.read()
    if entries and is_open(entries[-1]) and is_abandoned(entries[-1]):
        raise RepositoryError(
            f"{cut_short(entries[-1])} Finish or undo it with `enginegate verify --repair`."
        )


def _check_pointer(target: StoredTarget) -> None:
    """What is live must be what the journal says, with that manifest, and be so here too."""
    target.journal.check_recorded(target.releases, AuditLog(target.root).of(target.model))
    pointer = target.current()
    live = pointer.version if pointer else None
    if pointer is not None and live is not None:
        target.releases.release_of(pointer)
    current = Layout(target.root, target.model).current()
    here = current.version if current else None
    if here != live:
        raise RepositoryError(
            f"Release {live or 'none'} is live; {target.root} has {here or 'none'}. Replicate it "
            "with `enginegate pull`."
        )
    if pointer is not None and current is not None and live is not None:
        wanted, held = pointer.promises.get(live), current.promises.get(live)
        if pointer.missing_promise(current):
            raise RepositoryError(
                f"Release {live} is held to the promise {(wanted or 'its own')[:12]}, and in "
                f"{target.root} to {(held or 'its own')[:12]}. Replicate it with `enginegate pull`."
            )


def _check_stray_objects(target: StoredTarget) -> None:
    last = target.journal.last()
    stray = target.releases.stray()
    if stray and not (last is not None and is_open(last)):
        raise RepositoryError(
            f"There are objects of {', '.join(map(str, stray))}, which never became releases. "
            "Remove them with `enginegate verify --repair`."
        )
