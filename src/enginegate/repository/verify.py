"""Is the live repository what was published? Digests, configuration, journal, and what serves."""

from collections.abc import Callable, Iterator
from functools import partial

from enginegate.candidate import FileDigest
from enginegate.canonical import Record
from enginegate.errors import EnginegateError, RepositoryError, TamperedError
from enginegate.repository.audit import AuditLog
from enginegate.repository.composing import LiveRelease, wrong_files
from enginegate.repository.journal import CLOSING, Entry, Journal, last_change
from enginegate.repository.layout import (
    AUDIT,
    JOURNAL,
    Layout,
    earlier_models,
    locked,
    models,
)
from enginegate.repository.live import LiveRepository
from enginegate.repository.parts import owned_parts
from enginegate.repository.published import check_as_published
from enginegate.repository.signing import ReleaseSigning

_LOCK_TIMEOUT_S = 10.0
_LOOKS = 3


class Check(Record):
    """One thing that was looked at. ``problem`` is empty when it is as it should be."""

    subject: str
    problem: str = ""
    note: str = ""
    """What could not be checked, and need not be."""


def verify_folder(repository: LiveRepository) -> tuple[Check, ...]:
    """Check everything that can be checked from the folder, and from the server if there is one.

    Nothing is changed, and one problem never hides another. Nobody waits meanwhile: what somebody
    changed while it was looked at is looked at once more.

    Raises:
        RepositoryBusyError: somebody is changing the repository: look again when they are done.
    """
    if not repository.root.exists():
        return ()
    found: tuple[Check, ...] = ()
    before = _state(repository)
    for _ in range(_LOOKS):
        found = tuple(_checks(repository))
        after = _state(repository)
        if after == before:
            return found
        before = after
    changed = f"{repository.root} was changed while it was looked at; look again."
    return (*found, Check(subject="repository", problem=changed))


def _state(repository: LiveRepository) -> list[FileDigest | None]:
    """How far journal and audit log have come, at a moment when nobody changes anything."""
    with locked(repository.root, timeout_s=_LOCK_TIMEOUT_S):
        paths = [repository.root / name for name in (JOURNAL, AUDIT)]
        return [FileDigest.of(path) if path.is_file() else None for path in paths]


def _checks(repository: LiveRepository) -> Iterator[Check]:
    journal = Journal(repository.root / JOURNAL)
    yield checked("journal", partial(_check_journal, journal))
    try:
        entries = journal.read()
    except EnginegateError:
        entries = ()
    for name in earlier_models(repository.root):
        yield checked(f"{name} live release", partial(_read_current, Layout(repository.root, name)))
    for name in sorted({*models(repository.root), *(entry.model for entry in entries)}):
        layout = Layout(repository.root, name)
        audit = AuditLog(repository.root)
        yield checked(f"{name} audit log", partial(_check_audit, audit, name, entries))
        own = [entry for entry in entries if entry.model == name]
        yield checked(f"{name} live release", partial(_check_current, layout, own))
        for version in layout.stored_versions():
            check = partial(_check_release, layout, version, own)
            yield checked(f"{name} release {version}", check)
            if repository.signing is not None:
                signed = partial(_check_signature, repository.signing, layout, version)
                yield checked(f"{name} release {version} signature", signed)
            if layout.release_file(version).is_file():
                promised = partial(_check_promise, repository, layout, version)
                yield checked(f"{name} release {version} promise", promised)
        if owned_parts(layout):
            yield checked(f"{name} parts", partial(_check_parts, layout))
        yield checked(f"{name} config.pbtxt", partial(_check_config, layout))
        if repository.client is not None:
            live = LiveRelease(repository.client, layout, repository.load_timeout_s)
            yield checked(f"{name} on the live server", partial(_check_served, live))


def checked(subject: str, check: Callable[[], str | None]) -> Check:
    """Look at one thing; what it raises is the problem, what it returns a note."""
    try:
        note = check() or ""
    except EnginegateError as error:
        return Check(subject=subject, problem=str(error))
    except OSError as error:
        return Check(subject=subject, problem=f"it cannot be read: {error}")
    return Check(subject=subject, note=note)


def _read_current(layout: Layout) -> None:
    layout.current()


def _check_journal(journal: Journal) -> None:
    unfinished = journal.unfinished()
    if unfinished:
        entry = unfinished[0]
        raise RepositoryError(
            f"A {entry.kind} of {entry.model} release {entry.version} was cut short after its step "
            f"'{entry.step}'. Finish or undo it with `enginegate verify --repair`."
        )


def _check_current(layout: Layout, entries: list[Entry]) -> None:
    """What is live must be what the journal says was made live last."""
    change = last_change(entries)
    last = change.version if change is not None and change.kind != "withdraw" else None
    current = layout.current()
    live = current.version if current else None
    if entries and live != last:
        raise TamperedError(
            f"{layout.current_file} says that release {live or 'none'} is live; the journal's last "
            f"change made it {last or 'none'}. Somebody changed the folder."
        )


def _check_release(layout: Layout, version: int, entries: list[Entry]) -> None:
    release = layout.release(version)
    check_as_published(layout, release, entries)
    layout.check_files(release)


def _check_signature(signing: ReleaseSigning, layout: Layout, version: int) -> str:
    return signing.check(layout, layout.release(version))


def _check_promise(repository: LiveRepository, layout: Layout, version: int) -> str:
    """A promise that a release was given is the one that the journal has, and is signed."""
    current = layout.current()
    held = current.promises.get(version) if current is not None else None
    given = Journal(repository.root / JOURNAL).last_promise(layout.model, version)
    if current is not None and held != given:
        raise TamperedError(
            f"{layout.current_file} holds release {version} to the promise "
            f"{(held or 'its own')[:12]}; the journal's last one is {(given or 'its own')[:12]}. "
            "Somebody changed the folder: promote an approved scorecard of it again."
        )
    renewed = layout.renewed(version)
    if renewed is None or repository.signing is None:
        return ""
    return repository.signing.check_promise(layout, renewed)


def _check_audit(audit: AuditLog, model: str, entries: tuple[Entry, ...]) -> None:
    """The chain holds, nothing is missing from its end, and every operation is in it."""
    audit.check(model)
    events = audit.read()
    told = {event.operation for event in events}
    begun = next((e.at for e in events if e.operation), None)
    untold = [
        e
        for e in entries
        if e.model == model and e.step in CLOSING and begun is not None and e.at >= begun
        if e.operation not in told
    ]
    if untold:
        raise TamperedError(
            f"{audit.path} does not tell of a {untold[0].kind} of {model} release "
            f"{untold[0].version} that the journal has. Lines were removed from it."
        )


def _check_config(layout: Layout) -> None:
    current = layout.current()
    wrong = wrong_files(layout, current) if current is not None else {}
    if current is not None and wrong:
        raise TamperedError(
            f"{', '.join(map(str, wrong))} is not what release {current.version} was published "
            "with. Find out who changed it, then put it back with `enginegate verify --repair`."
        )


def _check_parts(layout: Layout) -> None:
    """Every version of a part is some release's; its bytes are checked with that release."""
    known = {(part.name, part.version) for each in layout.releases() for part in each.parts}
    for part in owned_parts(layout):
        strangers = [v for v in part.stored_versions() if (part.model, v) not in known]
        if strangers:
            raise TamperedError(
                f"{part.version_folder(strangers[0])} belongs to no release of {layout.model}. "
                "Find out who put it there, then remove it."
            )


def _check_served(live: LiveRelease) -> None:
    current = live.layout.current()
    if current is not None:
        live.prove_all(current)
