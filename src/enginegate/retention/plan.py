"""What may be deleted, and why the rest is kept: decided from what exists and what refers to it.

Nothing here reads or deletes. A reference is a name (a digest, most often) with the reason for
which whatever has that name is kept. What no reference names is a cache: it is kept while it is
used, and costs time to make again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Literal, TypeAlias

from enginegate.candidate import RegistryUri

EntryKind: TypeAlias = Literal[
    "scorecard",
    "part",
    "engine",
    "onnx",
    "data",
    "golden answers",
    "latencies",
    "result",
    "checks",
    "release",
    "release in storage",
    "shared engine",
    "shared onnx",
    "shared part",
    "Prefect result",
    "log",
    "scratch",
    "leftover",
]
# What refers to something is deleted before it, so that a kill leaves no reference to nothing.
_FIRST: tuple[EntryKind, ...] = ("scorecard", "part", "result")
# Bytes of releases go by their number, not by their age.
_AGELESS: frozenset[EntryKind] = frozenset({"release", "release in storage"})


class Reason(StrEnum):
    """Why something is kept; the first that applies."""

    LIVE = "its release is live"
    ROLLBACK = "its release can be rolled back to"
    RUNNING = "a run that is under way, or suspended, names it"
    WAITING = "its scorecard waits for an answer, or is approved"
    ALIAS = "an alias of the registry names its version"
    NO_POLICY = "no policy here is for its model"
    RECORD = "an audit log, a journal, a manifest or a person's answer names it"
    UNREADABLE = "this version cannot read it"
    USED = "it was used lately"


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One thing that is kept, and deleted whole.

    Attributes:
        kind: what it is.
        place: its path in the workspace, or its address elsewhere; unique.
        size_bytes: of everything that goes with it.
        used_at: when it was used last.
        names: by which references know it.
        readable: whether its record could be read; what could not is never deleted.
        about: what it is of, for people: a candidate, a version, a model.
    """

    kind: EntryKind
    place: str
    size_bytes: int
    used_at: datetime
    names: frozenset[str] = frozenset()
    readable: bool = True
    about: str = ""


@dataclass(frozen=True, slots=True)
class ReleaseFacts:
    """One release of a repository.

    Attributes:
        version: its number.
        names: its manifest's digest, and every other digest by which others know it.
        scorecards: those that it was, or is, held to.
        engines: digests of its engines' files.
        model_uri: of its model's version.
        has_bytes: whether it can still serve.
        place: of its bytes, as its entry has it.
    """

    version: int
    names: frozenset[str]
    scorecards: frozenset[str]
    engines: frozenset[str]
    model_uri: str
    has_bytes: bool
    place: str


@dataclass(frozen=True, slots=True)
class RepositoryFacts:
    """One model in one live repository, or in object storage.

    Attributes:
        model: its name in Triton.
        live: number of the live release; None: nothing is.
        needed: numbers that something under way, standing by or rolled back to needs.
        keep: so many of the newest releases keep their bytes.
        releases: oldest first.
    """

    model: str
    live: int | None
    needed: frozenset[int]
    keep: int
    releases: tuple[ReleaseFacts, ...]


@dataclass(frozen=True, slots=True)
class ScorecardFacts:
    """One scorecard.

    Attributes:
        model: its model's name in Triton; empty: it cannot be read.
        approvable: whether it has anything that somebody may publish.
        replaces: release that was live when it was made.
        engines: digests of the engines it judges.
        read_names: every digest that it states, its own left out; asked only of what is kept with
            all it names, for those of fifty thousand do not fit into memory.
        answer: the newest that a person gave.
    """

    digest: str
    model: str
    model_uri: str
    approvable: bool
    replaces: int | None
    used_at: datetime
    engines: frozenset[str]
    read_names: Callable[[], frozenset[str]]
    answer: Literal["", "approve", "reject"] = ""


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One kind of device's part of a qualification.

    Attributes:
        key: digest of everything that decides it.
        model: its model's name in Triton; empty: it cannot be read.
        engines: digests of the engines it judges.
        names: every digest that it states: folders of engines, golden answers.
    """

    key: str
    model: str
    used_at: datetime
    engines: frozenset[str]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class RetentionFacts:
    """Everything that may refer to something.

    Attributes:
        recorded: digests that audit logs and journals state.
        aliased: versions that aliases stand for, by the registered model's name.
        asked: scorecards that runs name which are under way or suspended; beginnings of digests.
        models: those that the policies here are for, and those that somebody said are retired.
        unused_since: what was used after this is kept.
    """

    repositories: tuple[RepositoryFacts, ...]
    scorecards: tuple[ScorecardFacts, ...]
    parts: tuple[PartFacts, ...]
    recorded: frozenset[str]
    aliased: Mapping[str, frozenset[int]]
    asked: frozenset[str]
    models: frozenset[str]
    unused_since: datetime


@dataclass(frozen=True, slots=True)
class KeptTotal:
    """How much of one kind is kept for one reason."""

    kind: EntryKind
    reason: Reason
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What is to be deleted, in that order, and what is kept.

    Attributes:
        delete: what nothing refers to, and nobody used lately.
        kept: totals.
        unused_since: what was used after this is kept; asked again when it is deleted.
    """

    delete: tuple[StoredEntry, ...]
    kept: tuple[KeptTotal, ...]
    unused_since: datetime

    @property
    def size_bytes(self) -> int:
        """Of what is to be deleted."""
        return sum(entry.size_bytes for entry in self.delete)


def plan_pruning(
    entries: Iterable[StoredEntry], references: Mapping[str, Reason], unused_since: datetime
) -> PrunePlan:
    """Decide about each entry; of what is kept only totals are held in memory.

    Args:
        entries: what exists.
        references: what refers to it, as `find_references` says.
        unused_since: what was used after this is kept.
    """
    delete: list[StoredEntry] = []
    kept: dict[tuple[EntryKind, Reason], list[int]] = {}
    for entry in entries:
        reason = reason_to_keep(entry, references, unused_since)
        if reason is None:
            delete.append(entry)
            continue
        total = kept.setdefault((entry.kind, reason), [0, 0])
        total[0] += 1
        total[1] += entry.size_bytes
    order = {kind: place for place, kind in enumerate(_FIRST)}
    delete.sort(key=lambda entry: (order.get(entry.kind, len(order)), entry.place))
    totals = (KeptTotal(kind, why, *numbers) for (kind, why), numbers in kept.items())
    ranked = sorted(totals, key=lambda total: (list(Reason).index(total.reason), total.kind))
    return PrunePlan(tuple(delete), tuple(ranked), unused_since)


def reason_to_keep(
    entry: StoredEntry, references: Mapping[str, Reason], unused_since: datetime
) -> Reason | None:
    """Why an entry stays; None: it may go."""
    named = [references[name] for name in (entry.place, *entry.names) if name in references]
    if named:
        return min(named, key=list(Reason).index)
    if not entry.readable:
        return Reason.UNREADABLE
    if entry.kind not in _AGELESS and entry.used_at >= unused_since:
        return Reason.USED
    return None


def find_references(facts: RetentionFacts) -> dict[str, Reason]:
    """Every name that something which is needed states, with the strongest reason to keep it."""
    return _References(facts).all()


@dataclass(slots=True)
class _References:
    """The names that are collected; the first reason for a name stays, so strong ones come first.

    Attributes:
        facts: what may refer.
        found: name -> reason.
        live: releases that are live, by model.
        newest: when the newest scorecard of each version, beside what is live, was used.
    """

    facts: RetentionFacts
    found: dict[str, Reason] = field(default_factory=dict)
    live: dict[str, set[int | None]] = field(default_factory=dict)
    newest: dict[tuple[str, str, int | None], datetime] = field(default_factory=dict)

    def all(self) -> dict[str, Reason]:
        self.newest = self._newest()
        for repository in self.facts.repositories:
            self.live.setdefault(repository.model, set()).add(repository.live)
        releases = [
            (reason, release)
            for repository in self.facts.repositories
            for release, reason in kept_releases(repository, self.facts.aliased)
        ]
        cards = {card.digest: card for card in self.facts.scorecards}
        states = {card.digest: self._state(card) for card in self.facts.scorecards}
        for reason in Reason:
            for of_release, release in releases:
                if of_release is reason:
                    self._keep_release(release, reason, cards)
            for digest, state in states.items():
                if state is reason:
                    self._keep(reason, digest, *cards[digest].read_names())
            for part in self.facts.parts:
                if self._state_of_part(part) is reason:
                    self._keep(reason, part.key, *part.names)
        self._keep_records()
        return self.found

    def _keep(self, reason: Reason, *names: str) -> None:
        for name in names:
            self.found.setdefault(name, reason)

    def _keep_release(
        self, release: ReleaseFacts, reason: Reason, cards: Mapping[str, ScorecardFacts]
    ) -> None:
        """With its evidence; of the engines only its own, not those that lost against it."""
        self._keep(reason, release.place, *release.names, *release.engines, *release.scorecards)
        for digest in release.scorecards & cards.keys():
            card = cards[digest]
            self._keep(reason, *(card.read_names() - (card.engines - release.engines)))

    def _keep_records(self) -> None:
        """What happened is not forgotten, however old; what it was about may be made again."""
        for repository in self.facts.repositories:
            for release in repository.releases:
                self._keep(Reason.RECORD, *release.names, *release.scorecards)
        self._keep(Reason.RECORD, *self.facts.recorded)
        self._keep(Reason.RECORD, *(card.digest for card in self.facts.scorecards if card.answer))

    def _state(self, card: ScorecardFacts) -> Reason | None:
        """Why a scorecard is kept with everything that it names; None: it is not."""
        if any(card.digest.startswith(asked) for asked in self.facts.asked):
            return Reason.RUNNING
        if not card.model:
            return Reason.UNREADABLE
        if self._waits(card):
            return Reason.WAITING
        if _is_aliased(card.model_uri, self.facts.aliased):
            return Reason.ALIAS
        if card.model not in self.facts.models:
            return Reason.NO_POLICY
        return Reason.USED if card.used_at >= self.facts.unused_since else None

    def _waits(self, card: ScorecardFacts) -> bool:
        """Whether somebody may still publish it: what it would replace is live.

        Of those that nobody answered, and that are old, only the newest of its version counts.
        """
        if not card.approvable or card.answer == "reject":
            return False
        if card.replaces not in self.live.get(card.model, ()):
            return False
        if card.answer == "approve" or card.used_at >= self.facts.unused_since:
            return True
        return self.newest[card.model, card.model_uri, card.replaces] <= card.used_at

    def _newest(self) -> dict[tuple[str, str, int | None], datetime]:
        """When the newest scorecard of each version was used that somebody may publish."""
        newest: dict[tuple[str, str, int | None], datetime] = {}
        for card in self.facts.scorecards:
            if card.approvable and card.answer != "reject":
                key = card.model, card.model_uri, card.replaces
                newest[key] = max(newest.get(key, card.used_at), card.used_at)
        return newest

    def _state_of_part(self, part: PartFacts) -> Reason | None:
        """A part is kept for what it judged; it alone knows where that is."""
        named = [self.found[name] for name in (part.key, *part.engines) if name in self.found]
        if named:
            return min(named, key=list(Reason).index)
        if not part.model:
            return Reason.UNREADABLE
        if part.model not in self.facts.models:
            return Reason.NO_POLICY
        return Reason.USED if part.used_at >= self.facts.unused_since else None


def kept_releases(
    repository: RepositoryFacts, aliased: Mapping[str, frozenset[int]]
) -> Iterator[tuple[ReleaseFacts, Reason]]:
    """The releases whose bytes stay, and why."""
    stored = [release.version for release in repository.releases if release.has_bytes]
    newest = set(stored[-repository.keep :])
    for release in repository.releases:
        if release.version == repository.live:
            yield release, Reason.LIVE
        elif release.version in repository.needed:
            yield release, Reason.ROLLBACK
        elif not release.has_bytes:
            continue
        elif release.version in newest:
            yield release, Reason.ROLLBACK
        elif _is_aliased(release.model_uri, aliased):
            yield release, Reason.ALIAS


def _is_aliased(model_uri: str, aliased: Mapping[str, frozenset[int]]) -> bool:
    uri = RegistryUri.parse(model_uri)
    return uri is not None and uri.version in aliased.get(uri.name, frozenset())
