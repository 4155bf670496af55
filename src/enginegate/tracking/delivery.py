"""The audit log of a live repository, delivered to MLflow: decisions, what is live, its state.

The log is the only source, and a cursor in the workspace says up to which line MLflow has it. What
cannot be delivered now is delivered by the next promotion, rollback or watch, in the log's order;
MLflow being away holds up nobody who changes what is live.

Of several changes of one model only the newest is delivered: an alias stands for one version. While
a roll-out decides whether its canary stays, the log is delivered up to that line.

An alias that somebody moved by hand returns to what is live. Where another repository promoted a
version of one and the same registered model, it keeps the alias until the next promotion here:
else the watches of both would take it from each other for ever.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from enginegate.candidate import registered_version
from enginegate.decision import Release
from enginegate.errors import EnginegateError, InputError, NoReleaseError, TrackingError
from enginegate.evidence import Scorecard
from enginegate.repository import AuditLog, Layout
from enginegate.repository.history.audit import (
    LIVE_EVENTS,
    REPLICATION,
    Cursor,
    Event,
    What,
    head_at,
    undelivered_events,
)
from enginegate.repository.history.broken_promises import ShownState, shown_state
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.store.scorecard_history import ScorecardHistory
from enginegate.tracking.artifact_download import scorecard_of
from enginegate.tracking.live_checks import state_tags
from enginegate.tracking.page_filing import PageMaker, file_page
from enginegate.tracking.registry_notes import (
    evidence_places,
    note_answer,
    release_notes,
    write_note,
)
from enginegate.tracking.tracker import Tracker
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace

CHAMPION = "champion"
PREVIOUS_ALIAS = "previous"
STATE_TAG = "enginegate.watch"
WITHDRAWN_TAG = "enginegate.withdrawn"
AUDIT_TAG = "enginegate.audit"
# Of another process that delivers the same log: a rollback would rather deliver later.
_LOCK_TIMEOUT_S = 30.0
# The other process may wait for MLflow's own two tries of half a minute, for each line of the log.
# What a promotion cannot deliver is rolled back, so it waits longer than that.
PROMOTION_TIMEOUT_S = 300.0
# Without a cursor an old log would be delivered whole; older decisions than this are MLflow's past.
_FIRST_CONTACT = timedelta(days=7)
_TAG_LENGTH = 1000
# Pages of older scorecards than these are not compared with the log at every delivery; whatever
# happens to one of those files it anew.
_RECENT_PAGES = 4
_CHANGES: frozenset[What] = LIVE_EVENTS | {"promised"}
_ANSWERS = {"approved": "approve", "rejected": "reject"}
_log = logging.getLogger("enginegate.tracking")


def deliver(
    workspace: Workspace,
    root: Path,
    *,
    patience_s: float = _LOCK_TIMEOUT_S,
    reclaim: bool = False,
    model: str | None = None,
    make_page: PageMaker | None = None,
) -> tuple[str, ...]:
    """Give MLflow what it lacks of a repository's audit log, and put right a moved alias.

    Args:
        workspace: with MLflow's address, scorecards, checks, and the cursor.
        root: of the live repository.
        patience_s: how long another process may go on that delivers the same log.
        reclaim: take the alias also from a version that another repository promoted.
        model: of the repository, whose alias is put right, and whose versions and pages are
            described anew; None: every model's.
        make_page: draws a scorecard's decision page, which is filed anew where the log has more
            than the filed one shows; None: pages stay as they are.

    Returns:
        One sentence for each line of the log that changed something in MLflow.

    Raises:
        TrackingError: MLflow cannot be reached, or refuses; the cursor stands before that line.
        TamperedError: the log was changed.
    """
    if not root.is_dir() or AuditLog(root).head() is None:
        return ()
    cursor = Cursor.of(workspace, workspace.tracking_uri, root)
    with _exclusive(cursor, patience_s):
        delivery = _Delivery(workspace, root, cursor, make_page)
        return tuple(delivery.run(reclaim=reclaim, model=model))


def try_deliver(
    workspace: Workspace,
    root: Path,
    *,
    model: str | None = None,
    make_page: PageMaker | None = None,
) -> str:
    """Give MLflow what it lacks, if it answers; why it could not be given, or empty."""
    try:
        deliver(workspace, root, model=model, make_page=make_page)
    except EnginegateError as error:
        return str(error)
    return ""


@contextmanager
def _exclusive(cursor: Cursor, patience_s: float) -> Iterator[None]:
    """One process at a time: what another one read as live must not arrive after what is live."""
    with ExitStack() as lock:
        try:
            lock.enter_context(cursor.exclusive(patience_s))
        except TimeoutError as error:
            raise TrackingError(
                f"The audit log is being delivered to MLflow by {error}. The next promotion, "
                "rollback or watch delivers the rest."
            ) from error
        except OSError as error:
            _log.warning("%s cannot be written to: %s", cursor.path.parent, error.strerror)
        yield


@dataclass(frozen=True)
class _Delivery:
    """One pass over what is not delivered; whoever calls holds the cursor's lock."""

    workspace: Workspace
    root: Path
    cursor: Cursor
    make_page: PageMaker | None = None

    @cached_property
    def tracker(self) -> Tracker:
        return Tracker(self.workspace.tracking_uri, self.workspace.artifacts)

    @cached_property
    def log(self) -> AuditLog:
        return AuditLog(self.root)

    @cached_property
    def events(self) -> Sequence[Event]:
        return self.log.read()

    def run(self, *, reclaim: bool, model: str | None) -> Iterator[str]:
        known = self.cursor.read()
        pending = undelivered_events(self.events, known)
        first_contact = len(pending) == len(self.events)
        newest = {event.model: event for event in self.log.of("", *_CHANGES)}
        for event in pending:
            change = newest.get(event.model)
            is_newest = change is not None and change.sequence == event.sequence
            is_live = is_newest and self._is_live(event)
            if is_live and _is_rolling_out(self.root, event.model):
                return
            sentence = ""
            if is_live:
                sentence = self._deliver_change(event)
            elif not (first_contact and datetime.now(tz=UTC) - event.at > _FIRST_CONTACT):
                sentence = self._deliver_answer(event)
            if sentence or event.sequence == len(self.events) - 1:
                self._move(event)
            if sentence:
                yield _told(sentence)
        delivered = len(self.events) - len(pending)
        for name in sorted({name for name, _ in self.log.tally()}):
            if model is None or name == model:
                change = newest.get(name)
                if change is not None and change.sequence < delivered:
                    yield from self._put_right(change, reclaim=reclaim)
                self._show(name)

    def _put_right(self, change: Event, *, reclaim: bool) -> Iterator[str]:
        if self._is_displaced(change, reclaim=reclaim):
            sentence = self._deliver_change(change)
            if sentence:
                yield _told(sentence)

    def _show(self, model: str) -> None:
        """What people read of a model: its versions' descriptions, and its decision pages.

        Read and not relied on: what cannot be written now is written by the next delivery, and
        keeps no promotion from going on.
        """
        if _is_rolling_out(self.root, model):
            return
        own = self.log.of(model)
        try:
            self.tracker.check_answers()
            with self.tracker.connection.explained(f"describe what is live of {model!r}"):
                self._describe_versions(model, own)
                self._file_pages(model, own)
        except EnginegateError as error:
            _log.warning("MLflow does not show all of what happened to %s yet: %s", model, error)
        except Exception:  # noqa: BLE001 - logged whole
            # A promotion takes back what it cannot deliver; a description is no reason for that.
            _log.exception("MLflow does not show all of what happened to %s", model)

    def _describe_versions(self, model: str, own: Sequence[Event]) -> None:
        """The state of every version with a release here, and the alias of the one before."""
        changes = [event for event in own if event.event in LIVE_EVENTS]
        if not changes or not self._is_live(changes[-1]):
            return
        layout, connection = Layout(self.root, model), self.tracker.connection
        held = [_held_to(layout, release) for release in layout.releases()]
        for uri, note in release_notes(own, held).items():
            version = registered_version(uri)
            if version is not None:
                write_note(connection, version, note, find_places=self._places)
        self._move_previous(layout)

    def _move_previous(self, layout: Layout) -> None:
        """Let ``previous`` stand for what a rollback returns to, beside our ``champion``."""
        current = layout.current()
        if current is None:
            return
        live = layout.release(current.version)
        version = registered_version(live.model_uri)
        if version is None or self.tracker.alias(version[0], CHAMPION) != version[1]:
            return
        name, before = version[0], live.previous_version
        with suppress(NoReleaseError):
            earlier = registered_version(layout.release(before).model_uri) if before else None
            if earlier is not None and earlier[0] == name:
                if self.tracker.alias(name, PREVIOUS_ALIAS) != earlier[1]:
                    self.tracker.move_alias(name, PREVIOUS_ALIAS, earlier[1])
                return
        stood_for = self.tracker.alias(name, PREVIOUS_ALIAS)
        if stood_for is not None:
            self.tracker.remove_alias(name, PREVIOUS_ALIAS, stood_for)

    def _places(self, digest: str) -> dict[str, str]:
        """Pages with the evidence of a release; none where no scorecard of it is found."""
        with suppress(InputError):
            run = scorecard_of(self.workspace, digest).mlflow_run
            found = self.tracker.connection.found(lambda client: client.get_run(run))
            if found is not None:
                return evidence_places(str(found.info.experiment_id), run)
        return {}

    def _file_pages(self, model: str, own: Sequence[Event]) -> None:
        """File the newest scorecards' pages anew, where more happened since they were filed."""
        if self.make_page is None:
            return
        layout = Layout(self.root, model)
        known = {release.version: release.scorecard_sha256 for release in layout.releases()}
        touched = (
            digest
            for event in reversed(own)
            for digest in (event.scorecard, known.get(event.release or 0))
            if digest
        )
        for digest in list(dict.fromkeys(touched))[:_RECENT_PAGES]:
            with suppress(InputError):
                card = scorecard_of(self.workspace, digest)
                history = ScorecardHistory.read(card, self.root, self.workspace)
                file_page(self.tracker.connection, card, history, self.make_page)

    def _move(self, event: Event) -> None:
        try:
            self.cursor.move(head_at(event))
        except OSError as error:
            # The line is delivered once more, which changes nothing.
            _log.warning("%s cannot be written: %s", self.cursor.path, error.strerror)

    def _is_live(self, event: Event) -> bool:
        """Whether a model's newest change is this host's to deliver, and still what is live.

        A change that another host decided is in that host's log. A change that a crash cut short
        gets its own line when it is recovered.
        """
        if event.origin.endswith(f", {REPLICATION}"):
            return False
        current = Layout(self.root, event.model).current()
        live = current.version if current else None
        return live == (None if event.event == "withdrawn" else event.release)

    def _deliver_change(self, event: Event) -> str:
        """Alias and tags of the version that is live, or is not any more."""
        try:
            registered = self._registered(event)
        except TrackingError:
            raise
        except EnginegateError as error:
            _log.error("MLflow does not get the line '%s': %s", event.event, error)
            return ""
        if registered is None:
            return ""
        name, version, tags = registered
        if not self._tag_version(name, version, tags):
            return ""
        if event.event == "withdrawn":
            self.tracker.remove_alias(name, CHAMPION, version)
            return f"{name} version {version} is not {CHAMPION} any more"
        self.tracker.move_alias(name, CHAMPION, version)
        return f"{name}@{CHAMPION} is version {version}"

    def _is_displaced(self, event: Event, *, reclaim: bool) -> bool:
        """Whether the alias is not where a change that was delivered had put it."""
        if not self._is_live(event) or _is_rolling_out(self.root, event.model):
            return False
        try:
            registered = self._registered(event)
        except TrackingError:
            raise
        except EnginegateError:
            return False  # was said when the line was delivered
        if registered is None:
            return False
        name, version, _ = registered
        self.tracker.check_answers()
        champion = self.tracker.alias(name, CHAMPION)
        stands_for_it, is_withdrawn = champion == version, event.event == "withdrawn"
        is_deleted = self.tracker.version_tags(name, version) is None
        if stands_for_it is not is_withdrawn or is_deleted:
            return False
        return reclaim or champion is None or not self._is_anothers(name, champion)

    def _is_anothers(self, name: str, champion: int) -> bool:
        """Whether another repository promoted a version: its tag is a line of another log."""
        line = (self.tracker.version_tags(name, champion) or {}).get(AUDIT_TAG)
        if line is None:
            return False
        count = int(line.partition(":")[0]) if line.partition(":")[0].isdigit() else 0
        ours = 0 < count <= len(self.events) and _line(self.events[count - 1]) == line
        return not ours

    def _registered(self, event: Event) -> tuple[str, int, dict[str, str]] | None:
        """The registered model, its version, and that version's tags; None: not of the registry.

        Raises:
            EnginegateError: the release's manifest or scorecard cannot be read.
            TrackingError: MLflow cannot be reached, which has the scorecard.
        """
        if event.event == "withdrawn":
            tags, model_uri = _withdrawn_tags(event), self._scorecard(event).model_uri
        else:
            layout = Layout(self.root, event.model)
            release = _held_to(layout, layout.release(event.release or 0))
            tags, model_uri = _release_tags(release, event), release.model_uri
        version = registered_version(model_uri)
        return None if version is None else (*version, tags)

    def _deliver_answer(self, event: Event) -> str:
        """A person's decision on a scorecard, or acknowledgement of a broken promise."""
        if event.event in _ANSWERS:
            return self._deliver_decision(event)
        return self._deliver_state(event) if event.event == "acknowledged" else ""

    def _deliver_decision(self, event: Event) -> str:
        try:
            run = self._scorecard(event).mlflow_run
        except InputError as error:
            _log.warning("MLflow does not get who %s a scorecard: %s", event.event, error)
            return ""
        if not run or not self._has_run(run):
            return ""
        tags = {
            "decision": _ANSWERS[event.event],
            "decision.by": event.who,
            "decision.why": event.why,
            "decision.at": event.at.isoformat(timespec="seconds"),
            "decision.origin": event.origin,
        }
        self.tracker.tag_run(run, _cut(tags))
        self._note_answer(event)
        return f"scorecard {(event.scorecard or '')[:12]} was {event.event} by {event.who}"

    def _note_answer(self, event: Event) -> None:
        """Describe the version; one that MLflow does not let be described holds up no change."""
        try:
            with self.tracker.connection.explained(f"describe what was {event.event}"):
                note_answer(self.tracker.connection, self._scorecard(event), event)
        except EnginegateError as error:
            _log.warning("MLflow does not say that %s was %s: %s", event.model, event.event, error)

    def _deliver_state(self, event: Event) -> str:
        """The shown state of a release, on its watch run and on its version."""
        try:
            release = Layout(self.root, event.model).release(event.release or 0)
            checks = WatchLog.at(self.workspace, release).read()
        except EnginegateError:
            return ""  # the manifest of a withdrawn release is gone
        state = shown_state(self.log.of(event.model), event.model, release.version, checks)
        self.tracker.check_answers()
        run = self.tracker.watch_run(release.model, release.digest)
        if run is not None:
            self.tracker.tag_run(run, state_tags(state))
        if version := registered_version(release.model_uri):
            self._tag_version(*version, state_tag(state, release))
        return f"release {release.version} of {release.model} is shown as {state.word}"

    def _scorecard(self, event: Event) -> Scorecard:
        digest = event.scorecard or ""
        try:
            return self.workspace.scorecard(digest)
        except InputError:
            self.tracker.check_answers()
            return scorecard_of(self.workspace, digest)

    def _tag_version(self, name: str, version: int, tags: Mapping[str, str]) -> bool:
        """A version that was deleted since cannot hold up what is behind it."""
        self.tracker.check_answers()
        if self.tracker.version_tags(name, version) is None:
            _log.warning(
                "MLflow has no version %d of %s any more, so it is left out", version, name
            )
            return False
        self.tracker.tag_version(name, version, tags)
        return True

    def _has_run(self, run: str) -> bool:
        self.tracker.check_answers()
        return self.tracker.has_run(run)


def state_tag(state: ShownState, release: Release) -> dict[str, str]:
    """The tag of a registered version with the state of the release that serves it."""
    words = f"{state.word}: release {release.version}"
    if state.latest is not None:
        words += f", {state.latest.at:%Y-%m-%d %H:%M:%S %Z}"
    if state.broken:
        words += f"; nobody has acknowledged check {state.broken[-1].check}"
    return {STATE_TAG: words}


def _held_to(layout: Layout, release: Release) -> Release:
    with suppress(EnginegateError):  # `verify` says what is wrong with its promise
        return layout.held_to(release)
    return release


def _told(sentence: str) -> str:
    _log.info("%s", sentence)
    return f"MLflow was updated: {sentence}."


def _line(event: Event) -> str:
    """One line of one log, told from every line of another."""
    head = head_at(event)
    return f"{head.count}:{head.sha256}"


def _release_tags(release: Release, event: Event) -> dict[str, str]:
    decisions = (*release.further_decisions, release.decision)
    tags = {
        "enginegate.release": str(release.version),
        "enginegate.engine": release.engine.engine_sha256,
        "enginegate.promise": f"{release.promise}, by scorecard {release.scorecard_sha256[:12]}",
        "enginegate.approved_by": ", ".join(d.approver for d in decisions),
        "enginegate.approved_why": "; ".join(d.reason for d in decisions),
        "enginegate.approved_at": release.decision.decided_at.isoformat(timespec="seconds"),
        AUDIT_TAG: _line(event),
    }
    return _cut(tags)


def _withdrawn_tags(event: Event) -> dict[str, str]:
    words = f"release {event.release} by {event.who} at {event.at.isoformat(timespec='seconds')}"
    return _cut({WITHDRAWN_TAG: f"{words}: {event.why}"})


def _cut(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: text[:_TAG_LENGTH] for name, text in tags.items()}


def _is_rolling_out(root: Path, model: str) -> bool:
    """Whether what is live may be rolled back by itself: a roll-out is under way or cut short."""
    rollouts = RolloutState(root)
    try:
        progress = rollouts.of(model)
        if progress is None:
            return False
        return not rollouts.is_settled(progress) or rollouts.under_way_by(model) is not None
    except (EnginegateError, OSError) as error:
        # Delivered later is late; a canary delivered as champion is wrong.
        _log.warning("whether %s is being rolled out from %s is not known: %s", model, root, error)
        return True
