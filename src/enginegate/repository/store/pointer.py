"""The live pointer: from one live state to the next, and the one function that writes it.

Every rule of a change is here, without side effects but `commit`.
"""

from typing import Protocol

from enginegate.atomic_io import sync_folder, write_file
from enginegate.decision import Release, RenewedPromise
from enginegate.errors import NoReleaseError, RepositoryError, RollbackTargetError
from enginegate.repository.store.layout import Current, Layout
from enginegate.workspace import now


def commit(layout: Layout, after: Current | None) -> None:
    """Make ``after`` live, in one rename; None: nothing. Nobody else writes the live pointer.

    Whoever calls holds the repository's lock, and has proved what serves.
    """
    if after is None:
        layout.current_file.unlink(missing_ok=True)
        sync_folder(layout.root)
    else:
        write_file(layout.current_file, after.pretty_json())


class LivePointer(Protocol):
    """What says which release of a model is live."""

    @property
    def version(self) -> int | None:
        """The release's number; None: nothing is live."""


class ReleaseStore(Protocol):
    """Where the releases of one model are kept: a live repository's folder, or object storage."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def place(self) -> str:
        """The folder or address, for people."""

    def release(self, version: int) -> Release:
        """A release's manifest.

        Raises:
            RepositoryError: there is no such release.
            TamperedError: it is no manifest.
        """

    def has_bytes(self, version: int) -> bool:
        """Whether a release can still be served: retention has not removed its bytes."""


def check_expected(store: ReleaseStore, live: LivePointer | None, expected: int | None) -> None:
    """Refuse evidence that was made against another live release (compare-and-swap).

    Raises:
        RepositoryError: the live release is not ``expected``.
    """
    version = live.version if live else None
    if version != expected:
        raise RepositoryError(
            f"Release {version or 'none'} of {store.model} is live in {store.place}, but this was "
            f"prepared while {expected or 'none'} was. Somebody else promoted or rolled back: "
            "check `enginegate status`, then decide again."
        )


def check_still_live(store: ReleaseStore, live: LivePointer | None, expected: int | None) -> None:
    """Refuse to leave another release than the one that was judged; None: whichever is live.

    Raises:
        RepositoryError: the live release is not ``expected``.
    """
    version = live.version if live else None
    if expected is not None and version != expected:
        raise RepositoryError(
            f"Release {version or 'none'} of {store.model} is live, not {expected}, which was to "
            "be left. Somebody else promoted or rolled back meanwhile, so nothing was changed: "
            "check `enginegate status`."
        )


def after_publish(before: Current | None, version: int, *, stays: bool = True) -> Current:
    """The new version is live; the one it replaces stays loaded, ready to come back.

    A copy of an older release comes back under its own number: then only that one serves. So it
    does where the old one cannot stay beside it (``stays``).
    """
    if before is not None and version < before.version:
        return after_rollback(before, version)
    promises = before.promises if before else {}
    standby = before.version if before and stays else None
    known = (standby, version) if standby else (version,)
    return Current(
        version=version, standby=standby, known=known, changed_at=now(), promises=promises
    )


def after_rollback(before: Current, version: int) -> Current:
    """Only the target serves: Triton would send traffic to a higher version that stayed loaded."""
    known = tuple(sorted({*before.known, before.version, version}))
    return Current(version=version, known=known, changed_at=now(), promises=before.promises)


def after_promise(layout: Layout, renewed: RenewedPromise) -> Current:
    """The same release is live, held to another promise.

    Raises:
        RepositoryError: nothing is live.
    """
    current = layout.current()
    if current is None:
        raise RepositoryError(f"Nothing of {layout.model} is live in {layout.root}.")
    promises = {**current.promises, renewed.version: renewed.digest}
    return current.model_copy(update={"promises": promises})


def rollback_target(
    store: ReleaseStore, live: LivePointer | None, to: int | None, *, lost: bool = False
) -> int:
    """The version to roll back to: ``to``, else the one that the live release replaced.

    Args:
        store: of the model.
        live: what is live; of a lost live pointer, what it was.
        to: what somebody asks for.
        lost: the live pointer is lost, so the release that was live may be asked for.

    Raises:
        RepositoryError: nothing is live, or nothing was before the live release, or its bytes were
            removed.
        RollbackTargetError: that of ``to``: there is none, it is live, or its bytes were removed.
    """
    version = live.version if live else None
    if version is None:
        raise RepositoryError(f"{store.place} has no live release of {store.model} to leave.")
    target = store.release(version).previous_version if to is None else to
    if target is None:
        raise RepositoryError(
            f"Release {version} of {store.model} is the first one; nothing is before it. "
            "To leave nothing live: enginegate withdraw POLICY --reason WHY"
        )
    if target == version and not lost:
        raise RollbackTargetError(f"Release {target} of {store.model} is live already.")
    unfit = RepositoryError if to is None else RollbackTargetError
    try:
        store.release(target)
    except NoReleaseError as error:
        raise unfit(str(error)) from error
    if not store.has_bytes(target):
        raise unfit(
            f"The bytes of release {target} of {store.model} were removed by retention. "
            "Promote its scorecard again to publish them under a new number."
        )
    return target


def live_release(layout: Layout) -> Release:
    """The release that is live.

    Raises:
        RepositoryError: nothing is.
    """
    current = layout.current()
    if current is None:
        raise RepositoryError(f"Nothing of {layout.model} is live in {layout.root}.")
    return layout.release(current.version)


def check_withdrawable(store: ReleaseStore, release: Release) -> None:
    """Refuse to withdraw a live release that replaced another one, which can come back.

    Raises:
        RepositoryError: there is a release to roll back to.
    """
    before = release.previous_version
    if before is not None and store.has_bytes(before):
        raise RepositoryError(
            f"Release {release.version} of {release.model} is not the first one: it replaced "
            f"release {before}. Go back with `enginegate rollback POLICY`; a withdrawal leaves "
            "nothing live."
        )


def live_words(current: Current | None) -> str:
    """What is live, for people."""
    return f"Release {current.version} is live" if current else "Nothing is live"
