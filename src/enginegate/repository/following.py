"""Bringing a host to a release that is live elsewhere, by the path that every promotion takes."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from enginegate.decision import Release
from enginegate.durable import file_lock
from enginegate.errors import NotEverywhereError, RepositoryBusyError
from enginegate.repository.audit import FOLLOWING
from enginegate.repository.copies import check_same
from enginegate.repository.fleet import Fleet
from enginegate.repository.journal import Entry
from enginegate.repository.layout import Current, Layout
from enginegate.repository.live import LiveRepository
from enginegate.repository.object_journal import ObjectJournal, holder
from enginegate.repository.object_release import ObjectReleases

_LOCK = ".enginegate-pull.lock"
_LOCK_TIMEOUT_S = 30.0


def bring_here(
    local: LiveRepository | Fleet, releases: ObjectReleases, release: Release, *, reason: str = ""
) -> None:
    """Serve a release here: go back to it if it is here, else fetch it and publish the copy.

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
            local.publish(copy, expected=here.version if here else None)


def go_back_here(
    local: LiveRepository | Fleet, releases: ObjectReleases, release: Release, *, reason: str
) -> NotEverywhereError | None:
    """Serve an earlier release here at once: no canary is watched on the way back.

    Returns:
        What keeps a server of a fleet from it, where the others serve it.

    Raises:
        As `bring_here`.
    """
    at_once = replace(local, hold=None) if isinstance(local, Fleet) else local
    try:
        bring_here(at_once, releases, release, reason=reason)
    except NotEverywhereError as error:
        return error
    return None


def as_follower(local: LiveRepository | Fleet, journal: ObjectJournal) -> LiveRepository | Fleet:
    """The same, but its audit log says that what it does now was decided by another host.

    Not where it leaves what this host itself could not commit: no other log has that.
    """
    current = Layout(local.root, journal.model).current()
    if _is_own_failure(journal.last(), current):
        return local
    if isinstance(local, Fleet):
        return replace(local, lead=replace(local.lead, way=FOLLOWING))
    return replace(local, way=FOLLOWING)


def _is_own_failure(last: Entry | None, here: Current | None) -> bool:
    if last is None or last.step != "undone":
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
        yield


def _remove_left(root: Path, model: str) -> None:
    for left in root.absolute().parent.glob(f"{_prefix(model)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(model: str) -> str:
    return f".{model}-pull."
