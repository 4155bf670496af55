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
from typing import Literal

from pydantic import PositiveInt

from enginegate.canonical import Record
from enginegate.decision import Decision, Head, Release
from enginegate.durable import file_lock, write_file
from enginegate.errors import EnginegateError, InputError, LedgerError
from enginegate.ledger.ledger import Ledger
from enginegate.repository import AuditLog, Layout
from enginegate.workspace import Workspace

CHAMPION = "champion"
_LOCK_TIMEOUT_S = 30.0
_TAG_LENGTH = 1000
# A change that has not happened by then never will.
_EXPECTED_FOR = timedelta(hours=24)
_CHANGE = ".change"
_log = logging.getLogger("enginegate.outbox")


class Message(Record):
    """Facts about one registered version, or one run, and an alias that is to stand for it."""

    schema_version: Literal[1] = 1
    at: datetime
    run: str = ""
    model: str = ""
    version: PositiveInt | None = None
    alias: str = ""
    tags: dict[str, str]

    def __str__(self) -> str:
        if self.version is None:
            return f"tags on run {self.run}"
        return f"{self.model}@{self.alias or 'tags'} is version {self.version}"


class Change(Record):
    """That another release of a model is about to become live than the one that was."""

    schema_version: Literal[1] = 1
    at: datetime
    root: str
    model: str
    before: PositiveInt | None

    def live(self) -> Release | None:
        """What is live now."""
        layout = Layout(Path(self.root), self.model)
        current = layout.current()
        return layout.release(current.version) if current else None

    def message(self) -> Message | None:
        """What is live instead; None as long as that is what was before, or nothing to tell of."""
        live = self.live()
        if live is None or live.version == self.before:
            return None
        return release_message(live, AuditLog(Path(self.root)).head())


def release_message(release: Release, audit: Head | None) -> Message | None:
    """That a release is live: alias, approvals and the audit log's head; None: not registered."""
    if not release.model_uri.startswith("models:/"):
        return None
    name, version = release.model_uri.removeprefix("models:/").split("/")
    given = (*release.further_decisions, release.decision)
    tags = {
        "enginegate.release": str(release.version),
        "enginegate.engine": release.engine_sha256,
        "enginegate.approved_by": ", ".join(d.approver for d in given),
        "enginegate.approved_why": "; ".join(d.reason for d in given),
        "enginegate.approved_at": release.decision.decided_at.isoformat(timespec="seconds"),
    }
    if audit is not None:
        tags["enginegate.audit"] = f"{audit.count}:{audit.sha256}"
    return Message(
        at=datetime.now(tz=UTC),
        model=name,
        version=int(version),
        alias=CHAMPION,
        tags={name: text[:_TAG_LENGTH] for name, text in tags.items()},
    )


def decision_message(decision: Decision, run: str) -> Message:
    """That a person answered, for the run that filed the scorecard."""
    tags = {
        "decision": decision.answer,
        "decision.by": decision.approver,
        "decision.why": decision.reason[:_TAG_LENGTH],
        "decision.at": decision.decided_at.isoformat(timespec="seconds"),
        "decision.origin": decision.origin,
    }
    return Message(at=datetime.now(tz=UTC), run=run, tags=tags)


@dataclass(frozen=True, slots=True)
class Outbox:
    """Messages of one workspace that MLflow has not had yet."""

    workspace: Workspace

    def tell(self, message: Message) -> None:
        """Tell MLflow now, after what it was not told before; nothing is kept if it refuses.

        Raises:
            LedgerError: it cannot be reached, or refuses.
        """
        with self._alone():
            self._tell_waiting()
            self._send(message)

    def tell_or_keep(self, message: Message) -> str:
        """Tell MLflow now if it answers, else later; why it could not be told, or empty."""
        self._keep(message)
        try:
            with self._alone():
                self._tell_waiting()
        except LedgerError as error:
            return str(error)
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
                if message is not None:
                    if self._still_wanted(message):
                        self._send(message)
                        said.append(f"MLflow was told: {message}.")
                    path.unlink(missing_ok=True)
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
            if path is not None and change.message() is None:
                path.unlink(missing_ok=True)
            raise

    def told(self, model: str) -> None:
        """What is live was told, or is kept as a message: forget the changes that led to it."""
        for path in self._folder.glob(f"*{_CHANGE}"):
            with suppress(EnginegateError):
                change = Change.read(path)
                if change.model == model and change.message() is not None:
                    path.unlink(missing_ok=True)

    def waiting(self) -> tuple[Path, ...]:
        """Messages that are kept, oldest first."""
        return tuple(sorted(self._folder.glob("[0-9]*.json")))

    @property
    def _folder(self) -> Path:
        return self.workspace.outbox

    def _change(self, root: Path, model: str) -> Change:
        current = Layout(root, model).current()
        return Change(
            at=datetime.now(tz=UTC),
            root=str(root.absolute()),
            model=model,
            before=current.version if current else None,
        )

    def _changes(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_CHANGE}"))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One tells MLflow at a time: what another read as live must not arrive after what is."""
        with ExitStack() as held:
            try:
                held.enter_context(file_lock(self._folder / ".lock", timeout_s=_LOCK_TIMEOUT_S))
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
            if message is not None and self._still_wanted(message):
                self._send(message)
                said.append(f"MLflow was told: {message}.")
            path.unlink(missing_ok=True)
        return said

    def _keep(self, message: Message) -> None:
        stamp = message.at.strftime("%Y%m%dT%H%M%S.%fZ")
        write_file(self._folder / f"{stamp}-{message.digest[:8]}.json", message.pretty_json())

    def _still_wanted(self, message: Message) -> bool:
        """A version or run that was deleted since cannot hold up the messages behind it."""
        ledger = self._ledger()
        if message.version is None:
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
            ledger.tag_run(message.run, message.tags)
            return
        ledger.tag_version(message.model, message.version, message.tags)
        if message.alias:
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
        path.unlink(missing_ok=True)
        return None
    with suppress(EnginegateError):
        message = change.message()
        if message is not None:
            return message
    if datetime.now(tz=UTC) - change.at > _EXPECTED_FOR:
        path.unlink(missing_ok=True)
    return None


def _read(path: Path) -> Message | None:
    """A message; a damaged one is dropped, as it cannot hold up those behind it."""
    try:
        return Message.read(path)
    except InputError as error:
        _log.error("A message to MLflow was dropped: %s", error)
        return None
