"""How far a roll-out to a fleet has come: a file for each model beside the primary's journal.

A second file asks to cancel the analysis of its canary, so that nobody has to wait for its end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import PositiveInt

from enginegate.atomic_io import file_lock, lock_holder, write_file
from enginegate.errors import InputError, RepositoryBusyError, RepositoryError
from enginegate.machine import user_at_host
from enginegate.records import Record
from enginegate.repository.recovery import may_stand
from enginegate.repository.store.layout import Current, Layout

LOCK = ".enginegate-fleet.lock"
_LOCK_TIMEOUT_S = 30.0
_RETRY_S = 0.2
_PROGRESS = ".enginegate-fleet."
_CANCEL = ".enginegate-fleet-cancel."


class RolloutProgress(Record):
    """A roll-out that is under way."""

    model: str
    before: PositiveInt | None = None
    canary: PositiveInt | None = None
    """The release that the primary makes live; no other is ever rolled back."""
    who: str = ""
    why: str = ""
    """Of a withdrawal: by whom, and why."""
    canary_passed: bool = False
    """Before the canary analysis has passed, a kill makes recovery roll the release back."""

    def was_rolled_back(self, left: Current | None, current: Current | None) -> bool:
        """Whether the primary left the canary for what was live before it."""
        if left is None or current is None:
            return False
        return (left.version, current.version) == (self.canary, self.before)


@dataclass(frozen=True, slots=True)
class RolloutState:
    """The roll-outs from one primary's repository."""

    root: Path

    def note(self, progress: RolloutProgress) -> None:
        """Write down how far a roll-out has come."""
        write_file(self._file(progress.model), progress.pretty_json())

    def of(self, model: str) -> RolloutProgress | None:
        """A model's roll-out that is under way, or was cut short."""
        path = self._file(model)
        return _read(path) if path.is_file() else None

    def unfinished(self) -> Iterator[RolloutProgress]:
        """Every roll-out that is under way, or was cut short."""
        for path in sorted(self.root.glob(f"{_PROGRESS}*.json")):
            if (progress := _read(path)) is not None:
                yield progress

    def under_way_by(self, model: str) -> str | None:
        """Who rolls a model out now; None: nobody. A roll-out that a kill cut short is nobody's."""
        return None if self.of(model) is None else lock_holder(self.root / LOCK)

    def is_settled(self, progress: RolloutProgress) -> bool:
        """Whether the release that the primary's repository says is live may stay live."""
        current = Layout(self.root, progress.model).current()
        return may_stand(current, progress)

    def settle(self, model: str) -> None:
        """Forget a roll-out, unless its canary is live, not passed and not rolled back."""
        progress = self.of(model)
        if progress is not None and self.is_settled(progress):
            self._file(model).unlink()
        self._cancel_file(model).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove notes that a killed process had not written whole; the caller is `exclusive`."""
        for left in self.root.glob(f".{_PROGRESS}*.json.*.tmp"):
            left.unlink(missing_ok=True)

    def request_cancel(self, model: str, *, leave: int | None) -> RolloutProgress | None:
        """Ask to cancel the analysis of a canary that has not passed yet.

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
        if leave not in {None, progress.canary}:
            return None
        try:
            write_file(self._cancel_file(model), user_at_host().encode())
        except OSError as error:
            raise RepositoryError(
                f"The canary analysis of {model} release {progress.canary} cannot be cancelled: "
                f"{error}. Free space or fix permissions in {self.root}."
            ) from error
        return progress

    def check_not_cancelled(self, model: str) -> None:
        """Look whether somebody asked to cancel the analysis of the canary.

        Raises:
            RepositoryError: somebody did.
        """
        path = self._cancel_file(model)
        if path.exists():
            raise RepositoryError(
                f"{path.read_text()} asked for a rollback during the canary analysis"
            )

    @contextmanager
    def exclusive(self, patience_s: float | None = None) -> Iterator[None]:
        """One roll-out at a time: its canary may be analysed for longer than a lock is held.

        Raises:
            RepositoryBusyError: one is under way.
            RepositoryError: the folder cannot be written to.
        """
        limit_s = _LOCK_TIMEOUT_S if patience_s is None else patience_s
        try:
            with ExitStack() as stack:
                try:
                    stack.enter_context(file_lock(self.root / LOCK, timeout_s=limit_s))
                except TimeoutError as error:
                    raise RepositoryBusyError(
                        f"A roll-out from {self.root} is under way by {error}. Try again when it "
                        "has finished."
                    ) from error
                yield
        except OSError as error:
            raise RepositoryError(
                f"The live repository {self.root} cannot be changed: {error.strerror or error}."
            ) from error

    def preempt(
        self,
        rolling: ExitStack,
        model: str,
        load_timeout_s: float,
        may: Callable[[RolloutProgress], bool],
    ) -> RolloutProgress | None:
        """Enter `exclusive`, and cancel the canary analysis that is in the way.

        Asked again meanwhile: a canary that is not live yet when this begins cannot be asked.

        Args:
            rolling: what holds `exclusive`.
            model: which roll-out to cancel.
            load_timeout_s: how long a cancelled roll-out may take to roll back.
            may: whether a roll-out may be cancelled.

        Returns:
            The roll-out that was cancelled.

        Raises:
            RepositoryBusyError: one goes on.
        """
        asked, patience_s = None, _LOCK_TIMEOUT_S
        began = time.monotonic()
        while True:
            progress = self.of(model) if asked is None else None
            if progress is not None and may(progress):
                asked = self.request_cancel(model, leave=progress.canary)
                if asked is not None:
                    began, patience_s = time.monotonic(), _LOCK_TIMEOUT_S + load_timeout_s
            try:
                rolling.enter_context(self.exclusive(_RETRY_S))
            except RepositoryBusyError as error:
                if time.monotonic() < began + patience_s:
                    continue
                if asked is None:
                    raise
                raise RepositoryBusyError(
                    f"The canary analysis of {model} release {asked.canary} was cancelled, and it "
                    f"has not ended in {patience_s:.0f} s. It is rolled back at the next canary "
                    f"check. {error}"
                ) from error
            return asked

    def _file(self, model: str) -> Path:
        return self.root / f"{_PROGRESS}{model}.json"

    def _cancel_file(self, model: str) -> Path:
        return self.root / f"{_CANCEL}{model}"


def _read(path: Path) -> RolloutProgress | None:
    """None: the roll-out ended in this moment."""
    try:
        return RolloutProgress.read(path)
    except InputError:
        if path.exists():
            raise
        return None
