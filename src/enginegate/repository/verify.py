"""Is the live repository what was published? Digests, configuration, journal, and what serves."""

from collections.abc import Callable, Iterator
from functools import partial

from enginegate.canonical import Record
from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryError, TamperedError
from enginegate.repository.journal import Entry, Journal
from enginegate.repository.layout import JOURNAL, Layout, locked, models
from enginegate.repository.live import LiveRepository
from enginegate.repository.serving import LiveModel, config_is_right

_LOCK_TIMEOUT_S = 10.0


class Check(Record):
    """One thing that was looked at. ``problem`` is empty when it is as it should be."""

    subject: str
    problem: str = ""


def verify(repository: LiveRepository) -> tuple[Check, ...]:
    """Check everything that can be checked from the folder, and from the server if there is one.

    Nothing is changed, and one problem never hides another.

    Raises:
        RepositoryBusyError: somebody is changing the repository: look again when they are done.
    """
    if not repository.root.exists():
        return ()
    with locked(repository.root, timeout_s=_LOCK_TIMEOUT_S):
        return tuple(_checks(repository))


def _checks(repository: LiveRepository) -> Iterator[Check]:
    journal = Journal(repository.root / JOURNAL)
    yield _checked("journal", partial(_check_journal, journal))
    try:
        entries = journal.read()
    except EnginegateError:
        entries = ()
    for name in sorted({*models(repository.root), *(entry.model for entry in entries)}):
        layout = Layout(repository.root, name)
        own = [entry for entry in entries if entry.model == name]
        yield _checked(f"{name} live release", partial(_check_current, layout, own))
        for version in layout.stored_versions():
            check = partial(_check_release, layout, version, own)
            yield _checked(f"{name} release {version}", check)
        yield _checked(f"{name} config.pbtxt", partial(_check_config, layout))
        if repository.client is not None:
            live = LiveModel(repository.client, layout, repository.load_timeout_s)
            yield _checked(f"{name} on the live server", partial(_check_served, live))


def _checked(subject: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except EnginegateError as error:
        return Check(subject=subject, problem=str(error))
    except OSError as error:
        return Check(subject=subject, problem=f"it cannot be read: {error}")
    return Check(subject=subject)


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
    done = [entry for entry in entries if entry.step == "done"]
    last = done[-1].version if done and done[-1].kind != "withdraw" else None
    current = layout.current()
    live = current.version if current else None
    if entries and live != last:
        raise TamperedError(
            f"{layout.current_file} says that release {live or 'none'} is live; the journal's last "
            f"change made it {last or 'none'}. Somebody changed the folder."
        )


def _check_release(layout: Layout, version: int, entries: list[Entry]) -> None:
    release: Release = layout.release(version)
    placed = [e for e in entries if e.step == "placed" and e.version == version]
    if placed and placed[-1].detail.get("release", release.digest) != release.digest:
        raise TamperedError(
            f"{layout.release_file(version)} is not the manifest that was published: its digest is "
            f"{release.digest}, the journal has {placed[-1].detail['release']}."
        )
    layout.check_files(release)


def _check_config(layout: Layout) -> None:
    current = layout.current()
    if current is not None and not config_is_right(layout, current):
        raise TamperedError(
            f"{layout.config} is not what release {current.version} was published with. Find "
            "out who changed it, then put it back with `enginegate verify --repair`."
        )


def _check_served(live: LiveModel) -> None:
    current = live.layout.current()
    if current is not None:
        live.prove(current, live.layout.release(current.version), wait=False)
