"""What a workspace holds: every entry with its size and time, and the records that refer.

Scorecards and parts are read as text: every digest in one counts as a reference, whatever the
field, so that a record of another version refers too.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json

from enginegate.atomic_io import read_file
from enginegate.candidate import Engine, OnnxModel
from enginegate.content_store import DELETING
from enginegate.decision import Decision
from enginegate.errors import InputError
from enginegate.records import Record
from enginegate.retention.plan import EntryKind, PartFacts, ScorecardFacts, StoredEntry
from enginegate.workspace import Workspace

# As JSON has it; without the quotation marks the search takes ten times as long.
_DIGEST = re.compile(rb'"([0-9a-f]{64})"')
_MANIFEST = "manifest.json"
# Folders of results whose files others refer to by digest; everything else there is a cache.
_RESULTS: dict[str, EntryKind] = {
    "devices": "part",
    "golden": "golden answers",
    "latencies": "latencies",
    "watch": "checks",
}
# The live server writes there for as long as it runs, which may be months without a line.
_LIVE_LOGS = "live"


def digests_in(record: bytes) -> frozenset[str]:
    """Every sha256 that the JSON of a record states, as a key or a value."""
    return frozenset(found.decode() for found in _DIGEST.findall(record))


@dataclass(frozen=True, slots=True)
class WorkspaceListing:
    """What is in a workspace now."""

    workspace: Workspace

    def entries(self) -> Iterator[StoredEntry]:
        """Everything that could be deleted, one at a time.

        Raises:
            OSError: a folder cannot be read.
        """
        yield from self._scorecards()
        yield from self._store(self.workspace.onnx, "onnx", OnnxModel)
        yield from self._store(self.workspace.engines, "engine", Engine)
        yield from self._store(self.workspace.data, "data", None)
        for folder in _folders(self.workspace.results):
            yield from self._results(folder)
        yield from self._files(self.workspace.logs, "log", but=_LIVE_LOGS)
        for path in _visible(self.workspace.scratch):
            yield self._entry(path, "scratch", newest=True)
        # Only of a demo: elsewhere Prefect's home is not this program's.
        yield from self._files(self.workspace.root / "prefect" / "storage", "Prefect result")

    def scorecards(self) -> tuple[ScorecardFacts, ...]:
        """What each scorecard says that decides whether it is needed.

        Raises:
            EnginegateError: a person's answer cannot be read: it may be a yes.
            OSError: a file cannot be read.
        """
        return tuple(self._facts_of(path) for path in self._scorecard_files())

    def parts(self) -> tuple[PartFacts, ...]:
        """What each part of a qualification names."""
        paths = sorted((self.workspace.results / "devices").glob("[!.]*.json"))
        return tuple(_facts_of_part(path) for path in paths)

    def _scorecard_files(self) -> list[Path]:
        return sorted((self.workspace.root / "scorecards").glob("[!.]*.json"))

    def _scorecards(self) -> Iterator[StoredEntry]:
        for path in self._scorecard_files():
            own = [path, *self._beside(path)]
            yield StoredEntry(
                kind="scorecard",
                place=self._place(path),
                size_bytes=sum(_size(each) for each in own),
                used_at=max(_time(each) for each in own),
                names=frozenset({path.stem}),
            )
        for path in (self.workspace.root / "scorecards").glob("[!.]*.sig"):
            if not path.with_suffix(".json").exists():
                yield self._entry(path, "leftover")
        yield from self._left(self.workspace.root / "scorecards")

    def _beside(self, scorecard: Path) -> list[Path]:
        """What goes with a scorecard: its signature; answers to it make it stay."""
        signature = scorecard.with_suffix(".sig")
        return [signature] if signature.is_file() else []

    def _facts_of(self, path: Path) -> ScorecardFacts:
        try:
            read = from_json(read_file(path))
            cards = [read, *read.get("further", ())]
            verdicts = [each for card in cards for each in card["verdicts"]]
            engines = {v["engine_sha256"] for v in verdicts if v.get("engine_sha256")}
            described: dict[str, Any] = {
                "model": read["model"],
                "model_uri": read["model_uri"],
                "approvable": any(c.get("winner") or c.get("benchmarks") for c in cards),
                "replaces": read.get("replaces"),
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            engines = set()
            described = {"model": "", "model_uri": "", "approvable": False, "replaces": None}
        return ScorecardFacts(
            digest=path.stem,
            used_at=_time(path),
            engines=frozenset(engines),
            read_names=lambda: digests_in(read_file(path)) - {path.stem},
            answer=self._answer(path.stem),
            **described,
        )

    def _answer(self, scorecard: str) -> Literal["", "approve", "reject"]:
        files = sorted((self.workspace.root / "decisions" / scorecard).glob("*.json"))
        return Decision.read(files[-1]).answer if files else ""

    def _store(
        self, folder: Path, kind: EntryKind, record: type[Record] | None
    ) -> Iterator[StoredEntry]:
        for path in _visible(folder):
            names, readable, about = {path.name}, True, ""
            if record is not None:
                found = _manifest(path / _MANIFEST, record)
                names |= {found.file.sha256} if found else set()
                readable, about = found is not None, _about(found)
            yield replace(self._entry(path, kind, names=names, readable=readable), about=about)
        yield from self._left(folder)

    def _results(self, folder: Path) -> Iterator[StoredEntry]:
        kind = _RESULTS.get(folder.name, "result")
        for path in _visible(folder):
            yield self._entry(path, kind, names={path.stem}, newest=kind == "checks")
        yield from self._left(folder)

    def _files(self, folder: Path, kind: EntryKind, *, but: str = "") -> Iterator[StoredEntry]:
        for root, names, files in os.walk(folder):
            names[:] = [name for name in names if not but or Path(root, name) != folder / but]
            for name in files:
                with suppress(FileNotFoundError):
                    yield self._entry(Path(root, name), kind)

    def _left(self, folder: Path) -> Iterator[StoredEntry]:
        """What killed processes left: staging, half of a deletion, locks of nothing."""
        for path in _hidden(folder):
            lock_of = path.name.removeprefix(".").removesuffix(".lock")
            staged = path.name.endswith((".tmp", DELETING))
            if staged or (path.name.endswith(".lock") and not (folder / lock_of).exists()):
                with suppress(FileNotFoundError):
                    yield self._entry(path, "leftover")

    def _entry(
        self,
        path: Path,
        kind: EntryKind,
        *,
        names: Iterable[str] = (),
        readable: bool = True,
        newest: bool = False,
    ) -> StoredEntry:
        """An entry of one path; its time is the path's own, or that of its newest file."""
        size, used_at = _measured(path)
        if path.name.endswith(DELETING):
            used_at = datetime.fromtimestamp(0, UTC)
        elif not newest:
            used_at = _time(path)
        return StoredEntry(kind, self._place(path), size, used_at, frozenset(names), readable)

    def _place(self, path: Path) -> str:
        return path.relative_to(self.workspace.root).as_posix()


def _facts_of_part(path: Path) -> PartFacts:
    text, model = read_file(path), ""
    engines: set[str] = set()
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        read = from_json(text)
        verdicts = read["evidence"]["verdicts"]
        engines = {v["engine_sha256"] for v in verdicts if v.get("engine_sha256")}
        model = read["identity"]["model"]
    return PartFacts(path.stem, model, _time(path), frozenset(engines), digests_in(text))


def _manifest(path: Path, record: type[Record]) -> Any:
    try:
        return record.model_validate_json(read_file(path))
    except (OSError, ValidationError, InputError):
        return None


def _about(manifest: Any) -> str:
    """Which candidate an engine is, or which version an ONNX model is of."""
    return str(getattr(manifest, "candidate", "") or getattr(manifest, "source", ""))


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir() and not path.is_symlink()]


def _visible(folder: Path) -> Iterator[Path]:
    return (path for path in _listed(folder) if not path.name.startswith("."))


def _hidden(folder: Path) -> Iterator[Path]:
    return (path for path in _listed(folder) if path.name.startswith("."))


def _listed(folder: Path) -> Iterator[Path]:
    """What is in a folder, in no order; nothing where there is no folder."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                yield Path(entry.path)
    except FileNotFoundError:
        return


def _measured(path: Path) -> tuple[int, datetime]:
    """Bytes of a file, or of all files of a folder, and the newest time of any."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0, datetime.now(UTC)
    size, newest = status.st_size, status.st_mtime
    if not path.is_symlink() and path.is_dir():
        size = 0
        for root, _, names in os.walk(path):
            for name in names:
                with suppress(FileNotFoundError):
                    status = Path(root, name).lstat()
                    size, newest = size + status.st_size, max(newest, status.st_mtime)
    return size, datetime.fromtimestamp(newest, UTC)


def _size(path: Path) -> int:
    return _measured(path)[0]


def _time(path: Path) -> datetime:
    """When it was used last; the present where it has just gone, so that nothing is decided."""
    try:
        return datetime.fromtimestamp(path.lstat().st_mtime, UTC)
    except FileNotFoundError:
        return datetime.now(UTC)
