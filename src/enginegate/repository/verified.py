"""What was verified before, so that verifying again reads only what changed since.

A record in the workspace has, for each model and release that was as published, a fingerprint of
its files: path, kind, inode, size, and times of modification and of change. While a fingerprint is
as it was, the bytes are not read again, for seven days at most. This trusts the kernel (nobody sets
a file's time of change but by turning back the clock or writing to the disk below the file system)
and the record, which is authenticated by a key that only the workspace's owner may read. It sees no
bytes that rot without being written. Whoever does not trust that far reads everything.
"""

import hmac
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from enginegate.atomic_io import read_file, write_file
from enginegate.records import canonical_json, sha256_bytes
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.store.layout import Layout
from enginegate.triton.release_labels import RECORDS
from enginegate.workspace import Workspace, now

# Another format, or other checks than those that a record tells of, make it count for nothing.
_FORMAT = 1
# How long bytes that nothing changed go unread: a longer time finds rot later, a shorter one reads
# large engines more often. A weekly `verify --all` keeps any reading from falling due.
_READ_AGAIN_AFTER = timedelta(days=7)
# A file that changed so lately may change once more within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000


class ModelFiles(NamedTuple):
    """Fingerprints of a model's files as they are now.

    Attributes:
        whole: of everything that its checks depend on.
        releases: of each release's own files, by number.
        settled: whether the newest change is old enough that the next one must show.
        unsettled: releases of which that is not so.
    """

    whole: str
    releases: dict[int, str]
    settled: bool
    unsettled: frozenset[int]


@dataclass(slots=True)
class _Model:
    """What was found of a model that is as it should be."""

    whole: str
    notes: int
    releases: dict[int, tuple[str, float]]


@dataclass(slots=True)
class VerifiedBefore:
    """The record of one repository.

    Attributes:
        file: where it is kept.
        key: that authenticates it.
        depends: digest of what the checks depend on beside the repository, such as trusted keys.
    """

    file: Path
    key: bytes
    depends: str
    _known: dict[str, _Model] = field(default_factory=dict)
    _found: dict[str, _Model] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what a check found that has to be made once more."""
        self._found = {}

    def unchanged_since(self, model: str, files: ModelFiles) -> datetime | None:
        """Since when nothing of a model has changed that was verified; None: it must be checked."""
        known = self._known.get(model)
        if known is None or known.whole != files.whole or not files.settled:
            return None
        oldest = min((at for _, at in known.releases.values()), default=now().timestamp())
        if _is_due(oldest):
            return None
        self._found[model] = known
        return datetime.fromtimestamp(oldest, UTC)

    def notes(self, model: str) -> int:
        """How many notes its checks had."""
        return self._known[model].notes

    def is_read(self, model: str, version: int, files: ModelFiles) -> bool:
        """Whether the bytes of a release were read, and nothing of them has changed since."""
        known = self._known.get(model)
        if known is None or version not in known.releases or version in files.unsettled:
            return False
        fingerprint, at = known.releases[version]
        return fingerprint == files.releases.get(version) and not _is_due(at)

    def keep(self, model: str, files: ModelFiles, *, notes: int) -> None:
        """Take in a model all of whose checks found nothing wrong."""
        at = now().timestamp()
        releases = {
            version: self._known[model].releases[version]
            if self.is_read(model, version, files)
            else (fingerprint, at)
            for version, fingerprint in files.releases.items()
            if version not in files.unsettled
        }
        self._found[model] = _Model(files.whole if files.settled else "", notes, releases)

    def save(self) -> None:
        """Write what was found; where the workspace cannot be written to, nothing is remembered."""
        content = canonical_json(
            {
                "format": _FORMAT,
                "depends": self.depends,
                "models": {
                    name: [model.whole, model.notes, [[v, *of] for v, of in model.releases.items()]]
                    for name, model in self._found.items()
                },
            }
        )
        self._known = self._found
        with suppress(OSError):
            write_file(self.file, self._seal(content) + b"\n" + content, mode=0o600)

    def load(self) -> None:
        """Read what an earlier run found; nothing where the record is not this workspace's own."""
        try:
            seal, _, content = read_file(self.file).partition(b"\n")
        except OSError:
            return
        if not hmac.compare_digest(seal, self._seal(content)):
            return
        told: dict[str, Any] = json.loads(content)
        if (told["format"], told["depends"]) == (_FORMAT, self.depends):
            self._known = {
                name: _Model(whole, notes, {v: (of, at) for v, of, at in releases})
                for name, (whole, notes, releases) in told["models"].items()
            }

    def _seal(self, content: bytes) -> bytes:
        return hmac.digest(self.key, content, "sha256").hex().encode()


@dataclass(frozen=True, slots=True)
class VerifiedRecords:
    """The records of a workspace, one for each repository.

    Attributes:
        whole: read every byte, whatever was read before.
    """

    workspace: Workspace
    whole: bool = False

    def of(self, repository: LiveRepository) -> VerifiedBefore | None:
        """That of one repository; None where the workspace cannot keep one."""
        key = seal_key(self.workspace)
        if key is None:
            return None
        trusted = repository.signing.trusted_state() if repository.signing is not None else ""
        place = sha256_bytes(str(repository.root.absolute()).encode())[:16]
        before = VerifiedBefore(
            self.workspace.root / "verified" / f"{place}.json",
            key,
            sha256_bytes(f"{repository.device}\n{trusted}".encode()),
        )
        if not self.whole:
            before.load()
        return before


def seal_key(workspace: Workspace) -> bytes | None:
    """The key of a workspace's own records, made on first use; None where it cannot be kept."""
    path = workspace.keys / "verified.key"
    if not workspace.root.is_dir():
        return None
    with suppress(OSError):
        return read_file(path)
    try:
        workspace.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, secrets.token_bytes(32), mode=0o600)
    except OSError:
        return None
    return read_file(path)


def fingerprints(layout: Layout, parts: Iterable[Layout], about: object) -> ModelFiles:
    """Look at every file of a model and its composing models; nothing is read.

    Args:
        layout: of the model.
        parts: its composing models.
        about: what else its checks depend on, as something that has a `repr`.

    Raises:
        OSError: a folder cannot be listed.
    """
    began_ns, newest = time.time_ns(), 0
    rest = [repr(about)]
    with suppress(FileNotFoundError):
        pointer = layout.current_file.lstat()
        rest.append(_line(layout.current_file.name, pointer))
        newest = pointer.st_ctime_ns
    releases: dict[int, list[str]] = {}
    changed: dict[int, int] = {}
    for each in (layout, *parts):
        for place, found, at in _places(str(each.folder)):
            newest = max(newest, at)
            lines = found if each is layout else [f"{each.model}/{line}" for line in found]
            if place is None:
                rest += lines
            else:
                releases.setdefault(place, []).extend(lines)
                changed[place] = max(changed.get(place, 0), at)
    digests = {place: _digest(lines) for place, lines in releases.items()}
    limit_ns = began_ns - _SETTLED_NS
    return ModelFiles(
        _digest([*rest, *(f"{place} {digest}" for place, digest in digests.items())]),
        digests,
        newest < limit_ns,
        frozenset(place for place, at in changed.items() if at >= limit_ns),
    )


def _digest(lines: list[str]) -> str:
    return sha256_bytes("\n".join(sorted(lines)).encode(errors="surrogateescape"))


def _places(folder: str) -> Iterator[tuple[int | None, list[str], int]]:
    """What is below a model's folder: the release it belongs to, its lines, its newest change."""
    for name, seen, path in _entries(folder):
        if name == RECORDS:
            yield None, [_line(name, seen)], seen.st_ctime_ns
            for record, of, there in _entries(path):
                if record != "releases":
                    yield None, *_below(there, f"{name}/{record}", of)
                    continue
                yield None, [_line(record, of)], of.st_ctime_ns
                for kept, facts, at in _entries(there):
                    release = _number(kept.partition(".")[0])
                    yield release, *_below(at, f"{name}/{record}/{kept}", facts)
        else:
            yield _number(name), *_below(path, name, seen)


def _below(path: str, name: str, seen: os.stat_result) -> tuple[list[str], int]:
    """A file, or everything below a folder; links are not followed."""
    lines, newest = [_line(name, seen)], seen.st_ctime_ns
    if stat.S_ISDIR(seen.st_mode):
        for entry, of, there in _entries(path):
            more, at = _below(there, f"{name}/{entry}", of)
            lines += more
            newest = max(newest, at)
    return lines, newest


def _entries(folder: str) -> list[tuple[str, os.stat_result, str]]:
    try:
        with os.scandir(folder) as listed:
            return [(e.name, e.stat(follow_symlinks=False), e.path) for e in listed]
    except FileNotFoundError:
        return []


def _line(name: str, seen: os.stat_result) -> str:
    return (
        f"{name} {seen.st_mode} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"
    )


def _number(name: str) -> int | None:
    """The release that a name says; None: it belongs to the model."""
    return int(name) if name.isdecimal() and name.isascii() else None


def _is_due(read_at: float) -> bool:
    # A reading in the future was made before the clock was set back: it could stay there for years.
    return not 0 <= now().timestamp() - read_at <= _READ_AGAIN_AFTER.total_seconds()
