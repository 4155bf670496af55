"""What live repositories hold and refer to, on this host and in object storage.

Audit logs and journals are read as text: every digest in one counts as a reference. A repository
that is not there, or has less than was known of it, may be a file system that is not mounted:
nothing is decided without it.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import Field, NonNegativeInt

from enginegate.atomic_io import open_regular, read_file, write_file
from enginegate.candidate import Sha256
from enginegate.decision import Release
from enginegate.errors import InputError, RepositoryError
from enginegate.object_storage import ObjectStore
from enginegate.policy.operating import LiveTables
from enginegate.records import Record
from enginegate.repository import Layout
from enginegate.repository.history.audit import AUDIT, Cursor
from enginegate.repository.history.journal import JOURNAL, Journal
from enginegate.repository.lock import hold_lock
from enginegate.repository.rollout.object_repository import LEASE_S
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.store.object_journal import ObjectJournal
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.repository.store.release_files import ReleaseFiles, record_files
from enginegate.repository.store.removal import forget_old
from enginegate.retention.plan import ReleaseFacts, RepositoryFacts, StoredEntry, kept_releases
from enginegate.retention.workspace_listing import digests_in
from enginegate.workspace import Workspace

# The chain's own digests refer to lines, not to what was kept.
_PREVIOUS = re.compile(rb'"previous":\s*"[0-9a-f]{64}"')
Aliased = Mapping[str, frozenset[int]]


class KnownRepositories(Record):
    """How far each audit log had come when somebody pruned last."""

    lines: dict[str, NonNegativeInt] = Field(
        default_factory=dict, description="by the repository's absolute path"
    )

    @classmethod
    def of(cls, workspace: Workspace) -> "KnownRepositories":
        """Those of a workspace; none before its first pruning."""
        path = _known_file(workspace)
        return cls.read(path) if path.exists() else cls()

    def note(self, workspace: Workspace) -> None:
        """Keep them; a disk that is full forgets nothing that was known."""
        with suppress(OSError):
            write_file(_known_file(workspace), self.pretty_json())


def _known_file(workspace: Workspace) -> Path:
    return workspace.cursors / "retention.json"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model in one live repository of this host.

    Attributes:
        keep: releases whose bytes stay.
        journal: of its repository, which every model there shares: it is read once.
    """

    root: Path
    model: str
    keep: int
    journal: Journal

    @property
    def layout(self) -> Layout:
        """Its paths."""
        return Layout(self.root, self.model)

    @property
    def place(self) -> tuple[str, str]:
        """Which repository, and which model in it."""
        return str(self.root), self.model

    def facts(self) -> RepositoryFacts:
        """Its releases, and which of them are needed now.

        Raises:
            EnginegateError: a manifest, the live pointer or the journal cannot be read.
        """
        return self._facts(self.layout.releases())

    def listed(self) -> tuple[RepositoryFacts, tuple[StoredEntry, ...]]:
        """Its releases, and the bytes of each."""
        layout, releases = self.layout, self.layout.releases()
        entries = (
            StoredEntry(
                kind="release",
                place=_place(layout, release.version),
                size_bytes=_bytes_of(layout, release),
                used_at=release.published_at,
                about=f"{self.model} {release.version}",
            )
            for release in releases
            if layout.has_bytes(release.version)
        )
        return self._facts(releases), tuple(entries)

    def _facts(self, releases: tuple[Release, ...]) -> RepositoryFacts:
        layout = self.layout
        current = layout.current()
        needed: set[int | None] = {*current.known, *current.served} if current else set()
        if current is not None:
            needed |= {r.previous_version for r in releases if r.version == current.version}
        open_now = (entry for entry in self.journal.unfinished() if entry.model == self.model)
        needed |= {entry.version for entry in open_now}
        rollout = RolloutState(self.root).of(self.model)
        needed |= {rollout.before, rollout.canary} if rollout else set()
        return RepositoryFacts(
            model=self.model,
            live=current.version if current else None,
            needed=frozenset(number for number in needed if number is not None),
            keep=self.keep,
            releases=tuple(_facts_of(layout, release) for release in releases),
        )

    def forget(self, aliased: Aliased, shown: frozenset[str]) -> None:
        """Delete the bytes of ``shown`` releases that are not needed, by what is true under a lock.

        Raises:
            EnginegateError: the repository is being changed, or cannot be.
            OSError: bytes cannot be deleted.
        """
        with hold_lock(self.root):
            forget_old(self.layout, self.keep, _pinned(self.facts(), aliased, shown))

    def has(self, place: str) -> bool:
        """Whether an entry is a release of it."""
        return Path(place).parent == self.layout.folder

    def is_gone(self, place: str) -> bool:
        """Whether the bytes of an entry are deleted."""
        return not Path(place).is_dir()


def _pinned(facts: RepositoryFacts, aliased: Aliased, shown: frozenset[str]) -> frozenset[int]:
    """Releases that stay: those that are needed now, and those at a place that nobody was shown."""
    unseen = (release.version for release in facts.releases if release.place not in shown)
    return frozenset(r.version for r, _ in kept_releases(facts, aliased)).union(unseen)


def _facts_of(layout: Layout, release: Release) -> ReleaseFacts:
    promises = (
        path
        for path in record_files(layout, release.version)
        if path.name.startswith(f"{release.version}.promise-") and path.suffix == ".json"
    )
    given = [digests_in(read_file(path)) for path in promises]
    return replace(
        _facts_of_manifest(release, _place(layout, release.version)),
        scorecards=_scorecards_of(release).union(*given),
        has_bytes=layout.has_bytes(release.version),
    )


def _facts_of_manifest(release: Release, place: str) -> ReleaseFacts:
    return ReleaseFacts(
        version=release.version,
        names=frozenset({release.digest}),
        scorecards=_scorecards_of(release),
        engines=frozenset(engine.engine_sha256 for engine in release.engines),
        model_uri=release.model_uri,
        has_bytes=True,
        place=place,
    )


def _scorecards_of(release: Release) -> frozenset[str]:
    decisions = (release.decision, *release.further_decisions)
    return frozenset({release.scorecard_sha256, *(d.scorecard_sha256 for d in decisions)})


def _place(layout: Layout, version: int) -> str:
    return str(layout.version_folder(version).absolute())


def _bytes_of(layout: Layout, release: Release) -> int:
    files = ReleaseFiles(layout, release)
    folders = (files.served | files.spare).values()
    return sum(digest.size_bytes for named in folders for digest in named.values())


@dataclass(frozen=True)
class StoredModel:
    """One model's releases in object storage.

    Attributes:
        url: of the storage.
        keep: releases whose bytes stay.
        known: manifests that are here anyway, by number.
    """

    url: str
    model: str
    keep: int
    known: Mapping[int, Release] = field(default_factory=dict)

    @cached_property
    def releases(self) -> ObjectReleases:
        """Its releases."""
        return ObjectReleases(ObjectStore(self.url), self.model)

    @property
    def place(self) -> tuple[str, str]:
        """Which storage, and which model in it."""
        return self.url, self.model

    @property
    def journal(self) -> ObjectJournal:
        """Who is changing them."""
        return ObjectJournal(self.releases.store, self.model, LEASE_S)

    def facts(self) -> RepositoryFacts:
        """Its releases, and which of them are needed now.

        Raises:
            EnginegateError: storage cannot be read, or something in it is damaged.
        """
        return self._facts(self._sizes())

    def listed(self) -> tuple[RepositoryFacts, tuple[StoredEntry, ...]]:
        """Its releases, and the bytes of each."""
        sizes = self._sizes()
        facts = self._facts(sizes)
        entries = (
            StoredEntry(
                kind="release in storage",
                place=release.place,
                size_bytes=sizes[release.version],
                used_at=self._manifest(release.version).published_at,
                about=f"{self.model} {release.version}",
            )
            for release in facts.releases
            if release.has_bytes
        )
        return facts, tuple(entries)

    def forget(self, aliased: Aliased, shown: frozenset[str]) -> None:
        """Delete ``shown`` bytes that are not needed, under the lease of every other change.

        Raises:
            EnginegateError: another change is under way, or storage refuses.
        """
        pointer, _ = self.releases.pointer()
        if pointer is None or pointer.version is None:
            return
        # It renews the promise that the live release has: the same state before and after.
        given = pointer.promises.get(pointer.version, "")
        lease = self.journal.acquire("promise", pointer.version, promise=given, purpose="retention")
        try:
            self.releases.forget_old(self.keep, _pinned(self.facts(), aliased, shown))
        finally:
            lease.add("done")

    def has(self, place: str) -> bool:
        """Whether an entry is a release of it."""
        return place.startswith(self._key(""))

    def is_gone(self, place: str) -> bool:
        """Whether the bytes of an entry are deleted."""
        return not self.releases.has_bytes(int(place.rstrip("/").rpartition("/")[2]))

    def _facts(self, sizes: Mapping[int, int]) -> RepositoryFacts:
        pointer, _ = self.releases.pointer()
        live = pointer.version if pointer else None
        releases = tuple(self._release(version, sizes) for version in self.releases.versions())
        needed = {None if live is None else self._manifest(live).previous_version}
        if (under_way := self.journal.under_way()) is not None:
            needed.add(under_way.version)
        return RepositoryFacts(
            model=self.model,
            live=live,
            needed=frozenset(number for number in needed if number is not None),
            keep=self.keep,
            releases=releases,
        )

    def _release(self, version: int, sizes: Mapping[int, int]) -> ReleaseFacts:
        facts = _facts_of_manifest(self._manifest(version), self._key(f"{version}/"))
        return replace(facts, has_bytes=version in sizes)

    def _manifest(self, version: int) -> Release:
        return self.known.get(version) or self.releases.release(version)

    def _sizes(self) -> dict[int, int]:
        """Bytes in storage of each release that has any."""
        sizes: dict[int, int] = {}
        for found in self.releases.store.entries(f"{self.model}/"):
            version = found.key.removeprefix(f"{self.model}/").partition("/")[0]
            if version.isdigit():
                sizes[int(version)] = sizes.get(int(version), 0) + found.size_bytes
        return sizes

    def _key(self, rest: str) -> str:
        return f"{self.url}/{self.model}/{rest}"


@dataclass(frozen=True, slots=True)
class LiveListing:
    """The repositories of several policies.

    Attributes:
        tables: of each policy.
        keep: releases whose bytes stay; None: as each policy says.
    """

    tables: tuple[LiveTables, ...]
    keep: int | None = None

    def local(self) -> tuple[LocalModel, ...]:
        """Each model in each repository of this host once, those of fleets included."""
        found: dict[tuple[Path, str], int] = {}
        for each in self.tables:
            fleet = (server.repository for server in each.target.fleet)
            for root in (each.target.repository, *(own for own in fleet if own)):
                key = root.absolute(), each.model
                found[key] = max(found.get(key, 0), self._keep(each))
        journals = {root: Journal(root) for root, _ in found}
        return tuple(
            LocalModel(root, model, keep, journals[root]) for (root, model), keep in found.items()
        )

    def stored(self) -> tuple[StoredModel, ...]:
        """Each model in object storage once."""
        found: dict[tuple[str, str], StoredModel] = {}
        for each in self.tables:
            if each.target.objects is None:
                continue
            layout = Layout(each.target.repository, each.model)
            known = {r.version: r for r in layout.releases()} if layout.root.is_dir() else {}
            key, keep = (each.target.objects, each.model), self._keep(each)
            before = found.get(key)
            keep = max(keep, before.keep) if before else keep
            found[key] = StoredModel(*key, keep, known)
        return tuple(found.values())

    def roots(self) -> tuple[Path, ...]:
        """Each repository of this host once."""
        return tuple(sorted({each.root for each in self.local()}))

    def recorded(self) -> frozenset[Sha256]:
        """Every digest that an audit log or a journal states."""
        return frozenset().union(
            *(_digests_of(root / name) for root in self.roots() for name in (AUDIT, JOURNAL))
        )

    def check_whole(self, workspace: Workspace, published: frozenset[str]) -> KnownRepositories:
        """How far each audit log has come, once none has less than was known of it.

        Args:
            workspace: knows how far each was delivered.
            published: models of which a release was live before.

        Raises:
            RepositoryError: a repository is not there, or its audit log was cut.
        """
        before, lines = KnownRepositories.of(workspace).lines, {}
        primary: dict[Path, set[str]] = {}
        for each in self.tables:
            primary.setdefault(each.target.repository.absolute(), set()).add(each.model)
        for root in self.roots():
            lines[str(root)] = here = _lines_of(root / AUDIT)
            cursor = Cursor.of(workspace, workspace.tracking_uri, root)
            arrived = cursor.read()
            known = max(before.get(str(root), 0), arrived.count if arrived else 0)
            if here < known or (not here and primary.get(root, set()) & published):
                raise RepositoryError(
                    f"{root / AUDIT} has {here} lines, and {max(known, 1)} or more are known of. "
                    "The repository may be on a file system that is not mounted, and what it "
                    "refers to would be deleted. Mount it, or restore the audit log from a backup. "
                    "Only where it was begun anew on purpose, remove what knows of the old one: "
                    f"{_known_file(workspace)}, {cursor.path}."
                )
        return KnownRepositories(lines={**before, **lines})

    def _keep(self, tables: LiveTables) -> int:
        return tables.retention.releases if self.keep is None else self.keep


def _digests_of(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for line in _read_lines(path):
        found |= digests_in(_PREVIOUS.sub(b"", line))
    return frozenset(found)


def _lines_of(path: Path) -> int:
    return sum(1 for _ in _read_lines(path))


def _read_lines(path: Path) -> Iterator[bytes]:
    """A file's lines one at a time, however long it is; none where there is none."""
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    with os.fdopen(handle, "rb") as file:
        yield from file
