"""Bringing a host to a release that is live elsewhere, by the path that every promotion takes."""

import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.decision import Release
from enginegate.errors import (
    EnginegateError,
    NotEverywhereError,
    RepositoryBusyError,
    RepositoryError,
)
from enginegate.machine import user_at_host
from enginegate.repository.history.audit import FOLLOWING, AuditLog, AuditRecord, origin
from enginegate.repository.history.journal import Entry
from enginegate.repository.lock import locked
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import Withdrawal
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.store.object_journal import ObjectJournal, holder
from enginegate.repository.store.object_lease import check_recorded, live_version, was_undone
from enginegate.repository.store.object_release import ObjectReleases, Pointer
from enginegate.repository.store.release_files import check_same

_LOCK = ".enginegate-pull.lock"
_LOCK_TIMEOUT_S = 30.0
_log = logging.getLogger("enginegate.repository")


@dataclass(frozen=True, slots=True)
class WayBack:
    """How a host came to an earlier release.

    Attributes:
        was_here: nothing was changed, because this host served it already.
        partly: what keeps a server of a fleet from it, where the others serve it.
    """

    was_here: bool
    partly: NotEverywhereError | None


def replicate(
    local: LiveRepository | Fleet, releases: ObjectReleases, journal: ObjectJournal
) -> Release | None:
    """Bring this host to what is live in storage; None where nothing is.

    Raises:
        As `install_release`; RepositoryError: it was left while it was fetched.
        TamperedError: what storage says is live is not what its journal says.
    """
    check_recorded(journal, releases, AuditLog(local.root).read())
    pointer, _ = releases.pointer()
    release = releases.release_of(pointer) if pointer else None
    if release is None:
        _leave(local, journal, pointer)
        return None
    check = partial(_check_wanted, releases, journal, release)
    follower = as_replica(local, journal)
    install_release(follower, releases, release, check=check)
    if pointer is not None and promise_differs(
        pointer, Layout(local.root, release.model).current()
    ):
        given = pointer.promises[release.version]
        follower.renew(releases.fetch_promise(release.version, given, local.root), new=False)
    return release


def promise_differs(pointer: Pointer, here: Current | None) -> bool:
    """Whether a host that has the live release does not know of the promise it was given since."""
    if here is None or pointer.version != here.version:
        return False
    given = pointer.promises.get(here.version)
    return given is not None and given != here.promises.get(here.version)


def install_release(
    local: LiveRepository | Fleet,
    releases: ObjectReleases,
    release: Release,
    *,
    reason: str = "",
    check: Callable[[], None] = lambda: None,
) -> None:
    """Serve a release here: go back to it if it is here, else fetch it and publish the copy.

    A fleet with a window watches the canary of one that is newer than what it serves, also if it
    is here: it may have been left because it did not hold.

    Args:
        local: this host's servers.
        releases: where to fetch it.
        release: what to serve.
        reason: for the audit log.
        check: raises if it should not serve any more; called before anything is loaded.

    Raises:
        TamperedError: a file or an object is not what was published.
        PublishError: it did not prove itself; what served before still serves.
        NotEverywhereError: it serves, but not on every server of a fleet.
    """
    layout = Layout(local.root, release.model)
    here = layout.current()
    if here is not None and layout.version_folder(release.version).is_dir():
        check_same(local.root, layout.release(release.version), release.digest)
        if here.version != release.version:
            check()
            forward = release.version > here.version
            if isinstance(local, Fleet) and local.hold is not None and forward:
                local.publish_again(release.model, release.version, reason=reason)
            else:
                local.rollback(release.model, release.version, reason=reason)
        elif not local.serves(release.model):
            local.bring_up(release.model)
        return
    with _pulling(local.root, _LOCK_TIMEOUT_S):
        _remove_left(local.root, release.model)
        around = local.root.absolute().parent
        with tempfile.TemporaryDirectory(dir=around, prefix=_prefix(release.model)) as folder:
            copy = releases.fetch(release.version, Path(folder))
            check_same(releases.store.url, copy.release, release.digest)
            expected = here.version if here else None
            local.publish(copy, expected=expected, placed=lambda _: check())


def go_back_here(
    local: LiveRepository | Fleet, releases: ObjectReleases, release: Release, *, reason: str
) -> WayBack:
    """Serve an earlier release here at once: no canary is watched on the way back.

    What a pull began to load before the turn was taken is waited for, and its canary's window is
    ended; from then on none begins.

    Raises:
        As `install_release`.
    """
    at_once = local
    if isinstance(local, Fleet):
        local.end(release.model)
        at_once = replace(local, hold=None)
    else:
        local.recover()
    was_here = live_version(Layout(local.root, release.model).current()) == release.version
    try:
        install_release(at_once, releases, release, reason=reason)
    except NotEverywhereError as error:
        return WayBack(was_here, error)
    return WayBack(was_here, None)


def note_way_back(
    local: LiveRepository | Fleet, release: Release, *, reason: str, left: str
) -> None:
    """Say in this host's audit log that it decided on a way back which changed nothing here.

    Others only follow, so no other log has it. It is live by now: a log that cannot be written
    fails nothing. Where this host has followed something later meanwhile, the log is not told that
    it went back after that: its last change is what is live.
    """
    lead = local.lead if isinstance(local, Fleet) else local
    deed = AuditRecord(
        event="rolled back",
        model=release.model,
        who=user_at_host(),
        why=f"{reason}; {left}" if reason else left,
        origin=origin(lead.way),
        release=release.version,
        scorecard=release.scorecard_sha256,
    )
    try:
        with locked(lead.root, timeout_s=_LOCK_TIMEOUT_S):
            if live_version(Layout(lead.root, release.model).current()) == release.version:
                AuditLog(lead.root, lead.way).note(deed)
                return
        why_not = "another release was followed meanwhile"
    except EnginegateError as error:
        why_not = str(error)
    _log.warning("the audit log does not say that release %d is live: %s", deed.release, why_not)


def as_replica(local: LiveRepository | Fleet, journal: ObjectJournal) -> LiveRepository | Fleet:
    """The same, but its audit log says that what it does now was decided by another host.

    Not where it leaves what this host itself could not commit: no other log has that.
    """
    current = Layout(local.root, journal.model).current()
    if _is_own_failure(journal.last(), current):
        return local
    if isinstance(local, Fleet):
        return replace(local, lead=replace(local.lead, way=FOLLOWING))
    return replace(local, way=FOLLOWING)


def _check_wanted(releases: ObjectReleases, journal: ObjectJournal, release: Release) -> None:
    journal.check_not_ours()
    live = live_version(releases.pointer()[0])
    if live != release.version:
        raise RepositoryError(
            f"Release {release.version} of {release.model} is no longer live in "
            f"{releases.store.url}, but {live or 'none'}. Pull again."
        )


def _leave(local: LiveRepository | Fleet, journal: ObjectJournal, pointer: Pointer | None) -> None:
    """Nothing is live in storage: take away here what was withdrawn there, or never got in."""
    here = Layout(local.root, journal.model).current()
    if here is None:
        return
    if pointer is not None:
        # Also where this host has not followed for long, and has something later or earlier.
        why = pointer.why or "its promotion failed"
        as_replica(local, journal).take_away(
            journal.model, here.version, by=Withdrawal(pointer.who, why)
        )
    elif was_undone(journal.last(), here):
        as_replica(local, journal).withdraw(journal.model, here.version)


def _is_own_failure(last: Entry | None, here: Current | None) -> bool:
    if last is None or last.step != "undone" or last.kind == "promise":
        return False
    host, _, _ = holder(last).rpartition(" pid ")
    reached = None if last.kind == "withdraw" else last.version
    return host == socket.gethostname() and reached == (here.version if here else None)


def sweep_pulls(root: Path, model: str) -> None:
    """Remove what a killed pull had fetched so far; one that is under way is left alone."""
    if any(root.absolute().parent.glob(f"{_prefix(model)}*")):
        with suppress(RepositoryBusyError), _pulling(root, 0.0):
            _remove_left(root, model)


@contextmanager
def _pulling(root: Path, timeout_s: float) -> Iterator[None]:
    """One pull to a host at a time."""
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(root / _LOCK, timeout_s=timeout_s))
        except TimeoutError as error:
            raise RepositoryBusyError(
                f"A release is being fetched for {root} by {error}. Try again when it has finished."
            ) from error
        except OSError as error:
            raise RepositoryError(
                f"Nothing can be fetched for {root}: {error.strerror}."
            ) from error
        yield


def _remove_left(root: Path, model: str) -> None:
    for left in root.absolute().parent.glob(f"{_prefix(model)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(model: str) -> str:
    return f".{model}-pull."
