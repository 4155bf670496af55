"""What MLflow is to hear of releases and decisions, and notes that there will be something to tell.

Between making a message and sending it, another release can become live: a message about what is
live says where to look, and what is sent is what is live by then.
"""

import logging
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from enginegate.decision import Decision, Head, Release
from enginegate.errors import EnginegateError
from enginegate.records import Record
from enginegate.repository import AuditLog, Layout
from enginegate.repository.history.broken_promises import ShownState
from enginegate.repository.history.changes import last_live_event
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.tracking.live_checks import state_tags

CHAMPION = "champion"
STATE_TAG = "enginegate.watch"
WITHDRAWN_TAG = "enginegate.withdrawn"
_log = logging.getLogger("enginegate.outbox")
_TAG_LENGTH = 1000


class Message(Record):
    """Facts about one registered version, or one run, and an alias that is to stand for it."""

    schema_version: Literal[1] = 1
    at: datetime
    run: str = ""
    model: str = ""
    version: PositiveInt | None = None
    alias: str = ""
    tags: dict[str, str]
    root: str = ""
    """The live repository that it is about; empty: it says the same whatever becomes live."""
    of: str = ""
    """The model's name in that repository."""
    withdrawn: bool = False
    """Nothing is live any more: the alias must not stay on the version."""
    checked: str = ""
    """Digest of the release whose checks the run is about, where the run is not named; `model` is
    the policy's then."""

    def __str__(self) -> str:
        if self.withdrawn:
            return f"{self.model} version {self.version} is not {self.alias} any more"
        if self.checked:
            return f"the state of release {self.checked[:12]} of {self.model}"
        if self.version is None:
            return f"tags on run {self.run}"
        return f"{self.model}@{self.alias or 'tags'} is version {self.version}"

    @property
    def is_early(self) -> bool:
        """Whether a roll-out decides now what stays live."""
        return bool(self.root) and rolls(Path(self.root), self.of)

    def as_of_now(self) -> "Message | None":
        """The same about what is live by now; None: nothing is, or nothing that is registered.

        That a release was withdrawn stays as it is while nothing is live.

        Where nobody can say what is live, it stays as it is.
        """
        root = Path(self.root)
        if not self.root or not root.is_dir():
            return self
        try:
            live = live_in(root, self.of)
            if live is None:
                return self if self.withdrawn else None
            return live_message(live, root)
        except (EnginegateError, OSError):
            return self


class Change(Record):
    """That another release of a model is about to become live than the one that was."""

    schema_version: Literal[1] = 1
    at: datetime
    root: str
    model: str
    before: PositiveInt | None
    before_uri: str = ""
    """The model version that was live, whose manifest is gone when it was withdrawn."""

    @property
    def has_happened(self) -> bool:
        """Whether anything else is live than before, for now or for good."""
        live = live_in(Path(self.root), self.model)
        return (live.version if live else None) != self.before

    def message(self) -> Message | None:
        """What is live instead, or that nothing is.

        None: it is what was before, may not stay, or is not registered.
        """
        root = Path(self.root)
        live = live_in(root, self.model)
        # Only then: what is read here may be a canary since.
        if (live.version if live else None) == self.before or rolls(root, self.model):
            return None
        if live is None:
            return withdrawn_message(self.before_uri, root, self.model)
        return live_message(live, root)


def live_in(root: Path, model: str) -> Release | None:
    """What is live in a repository; None: nothing."""
    layout = Layout(root, model)
    current = layout.current()
    return layout.release(current.version) if current else None


def rolls(root: Path, model: str) -> bool:
    """Whether what is live may go back by itself: a fleet's roll-out is under way or cut short."""
    rollouts = RolloutState(root)
    try:
        progress = rollouts.of(model)
        if progress is None:
            return False
        return not rollouts.is_settled(progress) or rollouts.under_way_by(model) is not None
    except (EnginegateError, OSError) as error:
        # Not told now is told later; told of a canary is wrong.
        _log.warning("whether %s is being rolled out from %s is not known: %s", model, root, error)
        return True


def live_message(release: Release, root: Path) -> Message | None:
    """That a release is live in ``root``, or whatever is by the time this is sent."""
    held = release
    with suppress(EnginegateError):  # `verify` says what is wrong with a promise it was given
        held = Layout(root, release.model).held_to(release)
    message = _release_message(held, AuditLog(root).head())
    place = {"root": str(root.absolute()), "of": release.model}
    return message.model_copy(update=place) if message else None


def withdrawn_message(model_uri: str, root: Path, model: str) -> Message | None:
    """That a registered version's release was withdrawn, by whom and why, as the audit log says.

    None: it is not registered, or the last change that the log knows of is no withdrawal.
    """
    last = last_live_event(AuditLog(root).read(), model)
    if not model_uri.startswith("models:/") or last is None or last.event != "withdrawn":
        return None
    name, version = model_uri.removeprefix("models:/").split("/")
    said = f"release {last.release} by {last.who} at {last.at.isoformat(timespec='seconds')}"
    return Message(
        at=datetime.now(tz=UTC),
        model=name,
        version=int(version),
        alias=CHAMPION,
        tags={WITHDRAWN_TAG: f"{said}: {last.why}"[:_TAG_LENGTH]},
        root=str(root.absolute()),
        of=model,
        withdrawn=True,
    )


def _release_message(release: Release, audit: Head | None) -> Message | None:
    """That a release is live: alias, approvals and the audit log's head; None: not registered."""
    if not release.model_uri.startswith("models:/"):
        return None
    name, version = release.model_uri.removeprefix("models:/").split("/")
    given = (*release.further_decisions, release.decision)
    tags = {
        "enginegate.release": str(release.version),
        "enginegate.engine": release.engine.engine_sha256,
        "enginegate.promise": f"{release.promise}, by scorecard {release.scorecard_sha256[:12]}",
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


def state_tag(state: ShownState, release: Release) -> dict[str, str]:
    """What a registered version shows of the release that serves it."""
    said = f"{state.word}: release {release.version}"
    if state.latest is not None:
        said += f", {state.latest.at:%Y-%m-%d %H:%M:%S %Z}"
    if state.broken:
        said += f"; nobody has acknowledged check {state.broken[-1].check}"
    return {STATE_TAG: said}


def state_messages(release: Release, state: ShownState) -> tuple[Message, ...]:
    """What a release's run and its registered version show, after somebody acknowledged it."""
    run = Message(
        at=datetime.now(tz=UTC),
        model=release.model,
        checked=release.digest,
        tags=state_tags(state),
    )
    if not release.model_uri.startswith("models:/"):
        return (run,)
    name, version = release.model_uri.removeprefix("models:/").split("/")
    tags = state_tag(state, release)
    return (run, Message(at=datetime.now(tz=UTC), model=name, version=int(version), tags=tags))


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
