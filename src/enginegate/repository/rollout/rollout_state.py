"""How far a roll-out to a fleet has come: a file for each model beside the lead's journal.

A second file asks a roll-out to end, so that nobody has to wait for a canary's window to go back.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt

from enginegate.atomic_io import file_lock, lock_holder, write_file
from enginegate.errors import InputError, RepositoryBusyError, RepositoryError
from enginegate.records import Record
from enginegate.repository.store.layout import Current, Layout

LOCK = ".enginegate-fleet.lock"
_LOCK_TIMEOUT_S = 30.0
_ASK_AGAIN_S = 0.2
_PROGRESS = ".enginegate-fleet."
_END = ".enginegate-fleet-end."


class RolloutProgress(Record):
    """A roll-out that is under way."""

    model: str
    before: PositiveInt | None = None
    canary: PositiveInt | None = None
    """What was made live on the lead, or is about to be; nothing else is ever taken back."""
    who: str = ""
    why: str = ""
    """Of a withdrawal: by whom, and why."""
    held: bool = False
    """Whether the canary's window has held; before that the release goes back after a kill."""

    def went_back(self, left: Current | None, now: Current | None) -> bool:
        """Whether the lead left the canary for what was live before it."""
        if left is None or now is None:
            return False
        return (left.version, now.version) == (self.canary, self.before)


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The roll-outs from one lead's repository."""

    root: Path

    def note(self, progress: RolloutProgress) -> None:
        """Remember how far one has come."""
        write_file(self._file(progress.model), progress.pretty_json())

    def of(self, model: str) -> RolloutProgress | None:
        """The one of a model that is under way, or was cut short."""
        path = self._file(model)
        return _read(path) if path.is_file() else None

    def unfinished(self) -> Iterator[RolloutProgress]:
        """Every one that is under way, or was cut short."""
        for path in sorted(self.root.glob(f"{_PROGRESS}*.json")):
            if (progress := _read(path)) is not None:
                yield progress

    def under_way_by(self, model: str) -> str | None:
        """Who rolls a model out now; None: nobody. What a kill cut short is nobody's."""
        return None if self.of(model) is None else lock_holder(self.root / LOCK)

    def is_settled(self, progress: RolloutProgress) -> bool:
        """Whether what the lead's repository says may stand."""
        current = Layout(self.root, progress.model).current()
        return progress.held or current is None or current.version != progress.canary

    def settle(self, model: str) -> None:
        """Forget one, unless its canary is live, has not held and could not go back."""
        progress = self.of(model)
        if progress is not None and self.is_settled(progress):
            self._file(model).unlink()
        self._end(model).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove notes that a killed process had not written whole; whoever calls is `alone`."""
        for left in self.root.glob(f".{_PROGRESS}*.json.*.tmp"):
            left.unlink(missing_ok=True)

    def ask_to_end(self, model: str, *, leave: int | None) -> RolloutProgress | None:
        """Ask a roll-out whose canary has not held yet to go back now.

        Args:
            model: which.
            leave: only if this is its canary; None: whichever is.

        Returns:
            The roll-out that was asked; None where there is no such one.

        Raises:
            RepositoryError: the folder cannot be written to.
        """
        progress = self.of(model)
        if progress is None or progress.canary is None or self.is_settled(progress):
            return None
        if leave is not None and leave != progress.canary:
            return None
        try:
            write_file(self._end(model), b"")
        except OSError as error:
            raise RepositoryError(
                f"The roll-out of {model} release {progress.canary} cannot be asked to end: "
                f"{error}. Free space or fix permissions in {self.root}."
            ) from error
        return progress

    @contextmanager
    def alone(self, patience_s: float | None = None) -> Iterator[None]:
        """One roll-out at a time: its canary may be watched for longer than a lock is held.

        Raises:
            RepositoryBusyError: one is under way.
            RepositoryError: the folder cannot be written to.
        """
        limit_s = _LOCK_TIMEOUT_S if patience_s is None else patience_s
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self.root / LOCK, timeout_s=limit_s))
            except TimeoutError as error:
                raise RepositoryBusyError(
                    f"A roll-out from {self.root} is under way by {error}. Try again when it has "
                    "finished."
                ) from error
            except OSError as error:
                raise self._unchangeable(error) from error
            try:
                yield
            except OSError as error:
                raise self._unchangeable(error) from error

    def _unchangeable(self, error: OSError) -> RepositoryError:
        why = error.strerror or str(error)
        return RepositoryError(f"The live repository {self.root} cannot be changed: {why}.")

    def alone_instead(
        self,
        rolling: ExitStack,
        model: str,
        load_timeout_s: float,
        may: Callable[[RolloutProgress], bool],
    ) -> RolloutProgress | None:
        """Enter `alone`; the roll-out that was asked to end for it.

        Asked again meanwhile: a canary that is not live yet, when this begins, cannot be asked.

        Args:
            rolling: what holds `alone`.
            model: which roll-out to end.
            load_timeout_s: how long one that was asked may take to go back.
            may: whether this one may be asked.

        Raises:
            RepositoryBusyError: one goes on.
        """
        asked, end_s = None, time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            progress = self.of(model) if asked is None else None
            if progress is not None and may(progress):
                asked = self.ask_to_end(model, leave=progress.canary)
                if asked is not None:
                    end_s = time.monotonic() + _LOCK_TIMEOUT_S + load_timeout_s
            try:
                rolling.enter_context(self.alone(_ASK_AGAIN_S))
            except RepositoryBusyError:
                if time.monotonic() > end_s:
                    raise
            else:
                return asked

    def check_goes_on(self, model: str) -> None:
        """Look whether somebody asked a roll-out to end.

        Raises:
            RepositoryError: somebody did.
        """
        if self._end(model).exists():
            raise RepositoryError("a rollback was asked for while it was watched")

    def _file(self, model: str) -> Path:
        return self.root / f"{_PROGRESS}{model}.json"

    def _end(self, model: str) -> Path:
        return self.root / f"{_END}{model}"


def _read(path: Path) -> RolloutProgress | None:
    """None: the roll-out ended in this moment."""
    try:
        return RolloutProgress.read(path)
    except InputError:
        if path.exists():
            raise
        return None
