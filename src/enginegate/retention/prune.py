"""From everything that exists and refers to what is deleted, beside runs that go on.

Nothing is deleted that was not in the plan somebody saw. When a run begins meanwhile, or a person
answers, the plan is made anew from what is true then. Whoever uses something gives it the present
as its time, under the same lock under which it is deleted only if it is still as old as it was.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.candidate import RegistryUri
from enginegate.content_store import delete_left, delete_unused
from enginegate.errors import EnginegateError, InputError, RepositoryBusyError
from enginegate.policy.operating import LiveTables
from enginegate.repository.history.audit import AUDIT
from enginegate.retention.live_listing import LiveListing, LocalModel, StoredModel
from enginegate.retention.plan import (
    PrunePlan,
    RepositoryFacts,
    RetentionFacts,
    ScorecardFacts,
    StoredEntry,
    find_references,
    plan_pruning,
)
from enginegate.retention.running import RunsUnderWay, runs_in
from enginegate.retention.shared_listing import SharedListing
from enginegate.retention.workspace_listing import WorkspaceListing
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace, now

# Whatever a run has just taken is safe also if its clock and this one differ by that much.
SHORTEST_UNUSED = timedelta(hours=1)
# Runs that begin one after the other make it plan again so often; the rest is left to the next.
_PLANS = 5
_LOOK_EVERY_S = 0.5
_SHARED = frozenset({"shared engine", "shared onnx", "shared part"})
_RELEASES = frozenset({"release", "release in storage"})
_log = logging.getLogger("enginegate.retention")


@dataclass(frozen=True, slots=True)
class PruneScope:
    """What is pruned, and what may refer to it.

    Attributes:
        tables: of every policy that uses the workspace.
        part_stores: URLs of object storage that the policies' devices leave parts in.
        unused_for: what was not used for so long, and nothing refers to, is deleted.
        keep: releases whose bytes stay, of each model; None: as its policy says.
        retired: models that no policy is for any more, by a person's word.
        elsewhere: asks for runs that this workspace knows nothing of.
    """

    workspace: Workspace
    tables: tuple[LiveTables, ...]
    unused_for: timedelta
    part_stores: tuple[str, ...] = ()
    keep: int | None = None
    retired: frozenset[str] = frozenset()
    elsewhere: Callable[[], RunsUnderWay] = RunsUnderWay


@dataclass(slots=True)
class PruneOutcome:
    """What became of a plan.

    Attributes:
        deleted: entries that are gone.
        failed: why an entry could not be deleted, by its place.
        left: entries that somebody began to use, or that were not reached.
    """

    deleted: list[StoredEntry] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[StoredEntry] = field(default_factory=list)

    @property
    def freed_bytes(self) -> int:
        """Of what is gone."""
        return sum(entry.size_bytes for entry in self.deleted)


def plan_scope(scope: PruneScope) -> PrunePlan:
    """What can be deleted now; nothing is changed.

    Raises:
        EnginegateError: something that may refer to it cannot be read: a repository, object
            storage, MLflow, Prefect, or an answer of a person.
    """
    with _explained(scope.workspace):
        return _Collected.of(scope).plan()


def prune_scope(scope: PruneScope, shown: PrunePlan) -> PruneOutcome:
    """Delete what somebody saw, as far as it may still go.

    Args:
        scope: as it was planned.
        shown: nothing besides this is deleted.

    Raises:
        RepositoryBusyError: another process prunes this workspace.
        EnginegateError: as `plan_scope`.
    """
    lock = scope.workspace.root / ".prune.lock"
    try:
        with _explained(scope.workspace), file_lock(lock):
            return _carry_out(scope, shown)
    except TimeoutError as error:
        raise RepositoryBusyError(
            f"{scope.workspace.root} is being pruned by {error}. Wait until it has finished."
        ) from error


def _carry_out(scope: PruneScope, shown: PrunePlan) -> PruneOutcome:
    outcome, wanted = PruneOutcome(), {entry.place: entry for entry in shown.delete}
    for _ in range(_PLANS if wanted else 0):
        before = _Seen.in_scope(scope)
        collected = _Collected.of(scope, frozenset(wanted))
        plan = collected.plan()
        still = [entry for entry in plan.delete if entry.place in wanted]
        if _delete(still, collected, plan, before, outcome):
            break
        gone = {entry.place for entry in outcome.deleted} | outcome.failed.keys()
        wanted = {place: entry for place, entry in wanted.items() if place not in gone}
        _log.info("a run began, or somebody answered: planned again")
    gone = {entry.place for entry in outcome.deleted} | outcome.failed.keys()
    outcome.left = [entry for entry in shown.delete if entry.place not in gone]
    return outcome


def _delete(
    entries: Iterable[StoredEntry],
    collected: "_Collected",
    plan: PrunePlan,
    before: "_Seen",
    outcome: PruneOutcome,
) -> bool:
    """Delete one after the other; False: the plan may not be right any more."""
    looked_at = time.monotonic()
    for entry in entries:
        if time.monotonic() - looked_at > _LOOK_EVERY_S:
            if _Seen.in_scope(collected.scope) != before:
                return False
            looked_at = time.monotonic()
        try:
            if collected.delete(entry, plan.unused_since):
                outcome.deleted.append(entry)
        except FileNotFoundError:
            outcome.deleted.append(entry)
        except (OSError, EnginegateError) as error:
            outcome.failed[entry.place] = str(error)
    return True


@dataclass(frozen=True, slots=True)
class _Seen:
    """What changes when a run begins or somebody answers."""

    runs: frozenset[str]
    answers: tuple[int, ...]

    @classmethod
    def in_scope(cls, scope: PruneScope) -> "_Seen":
        logs = (root / AUDIT for root in LiveListing(scope.tables).roots())
        places = (scope.workspace.root / "decisions", *logs)
        return cls(runs_in(scope.workspace).marks, tuple(_written_at(path) for path in places))


def _written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@dataclass(slots=True)
class _Collected:
    """Everything that was read for one plan.

    Attributes:
        local: each model in the repositories of this host.
        stored: each model in object storage.
        aliased: versions that aliases stand for, by the registered model's name.
        shown: places that somebody saw in a plan.
        forgotten: repositories whose releases were dealt with.
    """

    scope: PruneScope
    local: tuple[LocalModel, ...]
    stored: tuple[StoredModel, ...]
    aliased: Mapping[str, frozenset[int]] = field(default_factory=dict)
    shown: frozenset[str] = frozenset()
    forgotten: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of(cls, scope: PruneScope, shown: frozenset[str] = frozenset()) -> "_Collected":
        live = LiveListing(scope.tables, scope.keep)
        return cls(scope, live.local(), live.stored(), shown=shown)

    def plan(self) -> PrunePlan:
        scope, began = self.scope, now()
        live = LiveListing(scope.tables, scope.keep)
        listing = WorkspaceListing(scope.workspace)
        runs = runs_in(scope.workspace).and_also(scope.elsewhere())
        unused_for = max(scope.unused_for, SHORTEST_UNUSED)
        unused_since = min(began - unused_for, runs.since or began)
        scorecards = listing.scorecards()
        published = {card.model for card in scorecards if card.replaces is not None}
        known = live.check_whole(scope.workspace, frozenset(published))
        known_models: tuple[LocalModel | StoredModel, ...] = (*self.local, *self.stored)
        models = [each.listed() for each in known_models]
        repositories = tuple(facts for facts, _ in models)
        self.aliased = _aliased(scope.workspace, repositories, scorecards)
        references = find_references(
            RetentionFacts(
                repositories=repositories,
                scorecards=scorecards,
                parts=listing.parts(),
                recorded=live.recorded(),
                aliased=self.aliased,
                asked=runs.scorecards,
                models=frozenset(each.model for each in scope.tables) | scope.retired,
                unused_since=unused_since,
            )
        )
        entries = chain(
            listing.entries(),
            *(entries for _, entries in models),
            SharedListing(scope.part_stores).entries(),
        )
        plan = plan_pruning(entries, references, unused_since)
        known.note(scope.workspace)
        return plan

    def delete(self, entry: StoredEntry, unused_since: datetime) -> bool:
        """Delete one entry unless it was used since; whether it is gone."""
        if entry.kind in _RELEASES:
            return self._forget(entry)
        if entry.kind in _SHARED:
            return SharedListing(self.scope.part_stores).delete_unused(entry, unused_since)
        path = self.scope.workspace.root / entry.place
        if entry.kind == "leftover":
            return delete_left(path, unused_since)
        gone = delete_unused(path, unused_since)
        if gone and entry.kind == "scorecard":
            path.with_suffix(".sig").unlink(missing_ok=True)
        return gone

    def _forget(self, entry: StoredEntry) -> bool:
        """All releases of a model that were shown and are not needed go at once, under one lock."""
        of_model: tuple[LocalModel | StoredModel, ...] = (*self.local, *self.stored)
        model = next(each for each in of_model if each.has(entry.place))
        if model.place not in self.forgotten:
            self.forgotten.add(model.place)
            model.forget(self.aliased, self.shown)
        return model.is_gone(entry.place)


def _aliased(
    workspace: Workspace,
    repositories: Iterable[RepositoryFacts],
    scorecards: Iterable[ScorecardFacts],
) -> dict[str, frozenset[int]]:
    """Versions that aliases stand for, of every registered model that is known here.

    Raises:
        TrackingError: MLflow cannot say.
    """
    uris = {release.model_uri for each in repositories for release in each.releases}
    uris |= {card.model_uri for card in scorecards}
    names = {parsed.name for uri in uris if (parsed := RegistryUri.parse(uri)) is not None}
    if not names:
        return {}
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    tracker.check_answers()
    return {name: tracker.aliased(name) for name in sorted(names)}


@contextmanager
def _explained(workspace: Workspace) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise InputError(
            f"Not everything in {workspace.root}, or that refers to it, can be read: {error}. "
            "Nothing is decided without it: run this as the user that qualifies, or mend that."
        ) from error
