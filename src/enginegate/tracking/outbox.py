"""What MLflow is told about releases and decisions, now or as soon as it can be reached.

A rollback must not wait for MLflow. What could not be told is kept as one file a message, and goes
out in order before anything else is told. That a release is about to change is noted before it
does: if the process dies in between, whoever delivers next looks what is live, and tells that.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from enginegate.atomic_io import file_lock, write_file
from enginegate.errors import EnginegateError, InputError, LedgerError
from enginegate.repository import Layout
from enginegate.tracking.messages import Change, Message, live_in, rolls
from enginegate.tracking.tracker import Ledger
from enginegate.workspace import Workspace

_LOCK_TIMEOUT_S = 30.0
# Whoever tells something else may wait for MLflow's own two tries of half a minute, for each of its
# messages, and what cannot be told is taken back: a promotion would rather wait.
_PROMOTION_TIMEOUT_S = 300.0
# A change that has not happened by then never will.
_EXPECTED_FOR = timedelta(hours=24)
_CHANGE = ".change"
_log = logging.getLogger("enginegate.outbox")


@dataclass(frozen=True, slots=True)
class Outbox:
    """Messages of one workspace that MLflow has not had yet."""

    workspace: Workspace

    def tell(self, message: Message) -> None:
        """Tell MLflow now, after what it was not told before; nothing is kept if it refuses.

        While a roll-out decides what stays live, the note of the change tells it afterwards.

        Raises:
            LedgerError: it cannot be reached, or refuses.
        """
        with self._alone(_PROMOTION_TIMEOUT_S):
            self._tell_waiting()
            latest = message.as_of_now()
            if latest is not None and not message.is_early:
                self._send(latest)

    def tell_or_keep(self, message: Message) -> str:
        """Tell MLflow now if it answers, else later; why it could not be told, or empty.

        Where nothing can be kept, it is told now or never.
        """
        lost = ""
        try:
            self._keep(message)
        except OSError as error:
            lost = f"\nNor could it be kept for later in {self._folder}: {error.strerror}."
        try:
            with self._alone():
                self._tell_waiting()
                latest = message.as_of_now()
                if lost and not message.is_early:
                    self._tell(latest)
        except LedgerError as error:
            return f"{error}{lost}"
        return ""

    def deliver(self) -> tuple[str, ...]:
        """Tell what is kept, oldest first, and then what is live after changes that were cut short.

        Returns:
            One sentence for each message that arrived.

        Raises:
            LedgerError: MLflow cannot be reached, or refuses; what is left is kept.
        """
        if not self.waiting() and not self._changes():
            return ()
        with self._alone():
            said = self._tell_waiting()
            for path in self._changes():
                message = _change_message(path)
                said += self._tell(message)
                if message is not None:
                    _forget(path)
        return tuple(said)

    @contextmanager
    def expecting(self, root: Path, model: str) -> Iterator[None]:
        """Note that the block changes what is live, until `told`; a refused change leaves nothing.

        A workspace that cannot be written to keeps nobody from going back.
        """
        change, path = self._change(root, model), None
        with suppress(OSError):
            path = self._folder / f"{change.digest[:16]}{_CHANGE}"
            write_file(path, change.pretty_json())
        try:
            yield
        except EnginegateError:
            # Of a fleet a part may have changed.
            if path is not None and not change.has_happened:
                _forget(path)
            raise

    def told(self, model: str) -> None:
        """What is live was told, or is kept as a message: forget the changes that led to it."""
        for path in self._changes():
            with suppress(EnginegateError):
                change = Change.read(path)
                if change.model == model and change.message() is not None:
                    _forget(path)

    def waiting(self) -> tuple[Path, ...]:
        """Messages that are kept, oldest first."""
        return tuple(sorted(self._folder.glob("[0-9]*.json")))

    @property
    def _folder(self) -> Path:
        return self.workspace.outbox

    def _change(self, root: Path, model: str) -> Change:
        current, uri = Layout(root, model).current(), ""
        with suppress(EnginegateError):  # a damaged manifest keeps nobody from going back
            live = live_in(root, model)
            uri = live.model_uri if live else ""
        return Change(
            at=datetime.now(tz=UTC),
            root=str(root.absolute()),
            model=model,
            before=current.version if current else None,
            before_uri=uri,
        )

    def _changes(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_CHANGE}"))

    @contextmanager
    def _alone(self, patience_s: float | None = None) -> Iterator[None]:
        """One tells MLflow at a time: what another read as live must not arrive after what is.

        So whatever is told of what is live is read in the block.
        """
        limit_s = _LOCK_TIMEOUT_S if patience_s is None else patience_s
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self._folder / ".lock", timeout_s=limit_s))
            except TimeoutError as error:
                raise LedgerError(
                    f"MLflow is just being told what waits in {self._folder}, by {error}. What is "
                    "left is told by the next promotion, rollback or watch."
                ) from error
            except OSError as error:
                # Nobody can keep anything there, and MLflow may still be told.
                _log.warning("%s cannot be written to: %s", self._folder, error.strerror)
            yield

    def _tell_waiting(self) -> list[str]:
        said = []
        for path in self.waiting():
            message = _read(path)
            latest = message.as_of_now() if message else None
            # Only then: what was read may be a canary since.
            if message is None or not message.is_early:
                said += self._tell(latest)
                _forget(path)
        return said

    def _tell(self, message: Message | None) -> list[str]:
        """Send it if MLflow still has what it is about; one sentence of it."""
        if message is None or not self._still_wanted(message):
            return []
        self._send(message)
        return [f"MLflow was told: {message}."]

    def _keep(self, message: Message) -> None:
        stamp = message.at.strftime("%Y%m%dT%H%M%S.%fZ")
        write_file(self._folder / f"{stamp}-{message.digest[:8]}.json", message.pretty_json())

    def _still_wanted(self, message: Message) -> bool:
        """A version or run that was deleted since cannot hold up the messages behind it."""
        ledger = self._ledger()
        if message.checked:
            found = ledger.watch_run(message.model, message.checked) is not None
        elif message.version is None:
            found = ledger.has_run(message.run)
        else:
            found = ledger.version_tags(message.model, message.version) is not None
        if not found:
            _log.warning("MLflow no longer has what this is about, so it was dropped: %s", message)
        return found

    def _ledger(self) -> Ledger:
        ledger = Ledger(self.workspace.tracking_uri, self.workspace.artifacts)
        ledger.check_answers()
        return ledger

    def _send(self, message: Message) -> None:
        ledger = self._ledger()
        if message.version is None:
            run = message.run
            if message.checked:
                run = ledger.watch_run(message.model, message.checked) or ""
            if run:
                ledger.tag_run(run, message.tags)
            return
        ledger.tag_version(message.model, message.version, message.tags)
        if message.withdrawn:
            ledger.remove_alias(message.model, message.alias, message.version)
        elif message.alias:
            ledger.move_alias(message.model, message.alias, message.version)
        _log.info("%s", message)


def _change_message(path: Path) -> Message | None:
    """What is live after a change that was cut short; None while it has not happened.

    One that never happened is forgotten after a day, a damaged one at once.
    """
    try:
        change = Change.read(path)
    except InputError as error:
        _log.error("A note of a change was dropped: %s", error)
        _forget(path)
        return None
    with suppress(EnginegateError):
        message = change.message()
        if message is not None:
            return message
    over = datetime.now(tz=UTC) - change.at > _EXPECTED_FOR
    if over and not rolls(Path(change.root), change.model):
        _forget(path)
    return None


def _read(path: Path) -> Message | None:
    """A message; a damaged one is dropped, as it cannot hold up those behind it."""
    try:
        return Message.read(path)
    except InputError as error:
        _log.error("A message to MLflow was dropped: %s", error)
        return None


def _forget(path: Path) -> None:
    """What cannot be deleted is told once more, which changes nothing."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
