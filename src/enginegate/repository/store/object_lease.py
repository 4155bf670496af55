"""What a turn at a model in object storage begins with, and what ends one that failed."""

import logging
from collections.abc import Iterable

from enginegate.errors import (
    EnginegateError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.repository.history.audit import Event, is_followed
from enginegate.repository.history.journal import Entry
from enginegate.repository.store.layout import Current
from enginegate.repository.store.object_journal import (
    Lease,
    ObjectJournal,
    highest,
    holder,
    is_abandoned,
    is_open,
)
from enginegate.repository.store.object_release import ObjectReleases, Pointer

_READS = 3
_log = logging.getLogger("enginegate.repository")


def check_live(releases: ObjectReleases, expected: int | None) -> str | None:
    """Read the commit point, which must say what a change was prepared for.

    Returns:
        Its tag, to commit with: that fails if anybody committed after this.

    Raises:
        RepositoryError: another release is live.
    """
    pointer, tag = releases.pointer()
    live = live_version(pointer)
    if live != expected:
        raise RepositoryError(
            f"Release {live or 'none'} of {releases.model} is live in {releases.store.url}, but "
            f"this was prepared while {expected or 'none'} was. Look at `enginegate status`, then "
            "decide again."
        )
    return tag


def check_recorded(
    journal: ObjectJournal, releases: ObjectReleases, events: Iterable[Event]
) -> None:
    """Refuse a commit point that the journal does not tell of, and a journal that was cut.

    A cut one shows by releases with numbers that it never issued: in storage, and in what this
    host's audit log says was followed. While an operation is open, the commit point may also name
    what this operation makes live.

    Args:
        journal: of the model.
        releases: of the model.
        events: this host's audit log.

    Raises:
        TamperedError: somebody changed the bucket.
        RepositoryBusyError: others commit one change after another.
    """
    # Before the journal: whoever publishes meanwhile has an entry by the time that this is there.
    followed = (e.release or 0 for e in events if e.model == journal.model and is_followed(e))
    newest = max((*releases.versions(), *followed), default=0)
    if newest > highest(journal.last()):
        raise TamperedError(
            f"The journal of {journal.model} in {journal.store.url} ends before release {newest}, "
            "which was published: its newest entries were removed. Restore them from a backup "
            "(or an earlier version of these objects); what serves here still serves."
        )
    for _ in range(_READS):
        pointer, tag = releases.pointer()
        done, last = journal.last_done(), journal.last()
        recorded = None if done is None or done.kind == "withdraw" else done.version
        allowed = {recorded}
        if last is not None and is_open(last):
            allowed.add(None if last.kind == "withdraw" else last.version)
        if live_version(pointer) in allowed:
            return
        if releases.pointer()[1] == tag:  # else somebody committed between these reads
            raise TamperedError(
                f"current.json of {journal.model} in {journal.store.url} says that release "
                f"{live_version(pointer) or 'none'} is live; the journal's last change made it "
                f"{recorded or 'none'}. Somebody changed the bucket, so nothing is followed: "
                "restore the object from a backup (or an earlier version of it)."
            )
    raise RepositoryBusyError(
        f"What is live in {journal.store.url} was changed again and again while it was read. Try "
        "again."
    )


def close(turn: Lease, releases: ObjectReleases) -> None:
    """End an operation by what the commit point says; only what it wrote itself is removed.

    Raises:
        RepositoryBusyError: somebody closed it already.
    """
    entry = turn.entry
    pointer, _ = releases.pointer()
    if entry.kind == "promise":
        given = pointer.promises.get(entry.version) if pointer else None
        turn.add("done" if given == entry.detail["promise"] else "undone")
        return
    if live_version(pointer) == (None if entry.kind == "withdraw" else entry.version):
        turn.add("done")
        return
    own = releases.was_written_by(entry.version, entry.operation)
    if entry.kind == "publish" and own and turn.is_ours():
        releases.remove(entry.version)
    turn.add("undone")


def was_undone(last: Entry | None, here: Current | None) -> bool:
    """Whether what a host serves is what the journal's last operation could not publish."""
    if last is None or here is None:
        return False
    return (last.kind, last.step, last.version) == ("publish", "undone", here.version)


def forget_quietly(releases: ObjectReleases, keep: int, pinned: frozenset[int] | None) -> None:
    """Retention must not fail a promotion that is done."""
    try:
        releases.forget_old(keep, pinned)
    except EnginegateError as error:
        _log.warning("old releases in %s could not be removed: %s", releases.store.url, error)


def live_version(live: Pointer | Current | None) -> int | None:
    """Which release a commit point names."""
    return live.version if live else None


def in_words(releases: ObjectReleases) -> str:
    """What is live in storage, for people."""
    pointer, _ = releases.pointer()
    live = live_version(pointer)
    said = f"Release {live} is live" if live else "Nothing is live"
    return f"{said} in {releases.store.url}."


def close_abandoned(journal: ObjectJournal, releases: ObjectReleases) -> tuple[str, ...]:
    """End the operation whose holder is dead, if there is one, and say so."""
    last = journal.under_way()
    if last is None or not is_abandoned(last):
        return ()
    releases.fence()
    close(Lease(journal, last), releases)
    return (f"{cut_short(last)} {in_words(releases)}",)


def cut_short(entry: Entry) -> str:
    """What became of an operation whose holder is dead."""
    return (
        f"A {entry.kind} of {entry.model} release {entry.version} by {holder(entry)} was cut short "
        f"after its step '{entry.step}'."
    )
