"""What a turn at a model in object storage begins with, and what ends one that failed."""

import logging

from enginegate.errors import EnginegateError, RepositoryError
from enginegate.repository.journal import Entry
from enginegate.repository.layout import Current
from enginegate.repository.object_journal import ObjectJournal, Turn, holder, is_abandoned
from enginegate.repository.object_release import ObjectReleases, Pointer

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


def close(turn: Turn, releases: ObjectReleases) -> None:
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
    close(Turn(journal, last), releases)
    return (f"{cut_short(last)} {in_words(releases)}",)


def cut_short(entry: Entry) -> str:
    """What became of an operation whose holder is dead."""
    return (
        f"A {entry.kind} of {entry.model} release {entry.version} by {holder(entry)} was cut short "
        f"after its step '{entry.step}'."
    )
