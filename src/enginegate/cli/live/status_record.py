"""What `status` found of each model before, so that of many models only what changed is read.

A line of a model is shown again while the policy, the live pointer, every manifest, promise, check,
scorecard and decision that it was found from have the inode, size, and times of modification and
change that they had, and the audit log goes on from where it was without a line of the model. Only
what nothing is wrong with, and what no passing of time changes, is kept. The record is sealed by
the key of the workspace's record of what was verified, and may be deleted.
"""

import hmac
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import enginegate
from enginegate.atomic_io import read_file, write_file
from enginegate.cli.output.records import ModelStatus
from enginegate.decision import Decision, Head
from enginegate.engine_kinds import engine_kinds
from enginegate.errors import EnginegateError, InputError
from enginegate.evidence import Scorecard
from enginegate.records import canonical_json, sha256_bytes
from enginegate.repository import AuditLog, Layout
from enginegate.repository.store.layout import DEVICE
from enginegate.repository.verified import seal_key
from enginegate.triton.release_labels import RECORDS
from enginegate.workspace import Workspace, read_scorecard

_FORMAT = 1
# A file that changed so lately may change once more within one tick of the file system's clock.
_SETTLED_NS = 2_000_000_000
# No passing of time changes these; another answer or release does, which is a file.
_TIMELESS = frozenset({"waits for a decision", "not promoted, and cannot be any more"})


class SourceFiles(NamedTuple):
    """The files that a model's status is found from, as they are now.

    Attributes:
        live: digest of the live release; its checks are among the files.
        digest: of their names, inodes, sizes and times.
        settled: whether the newest change is old enough that the next one must show.
        checks: how many of them are checks.
    """

    live: str
    digest: str
    settled: bool
    checks: int


@dataclass(slots=True)
class StatusReading:
    """What was seen while one status was read.

    Attributes:
        ages: whether the passing of time may change it.
        checks: how many checks of the live release could be read.
    """

    ages: bool = False
    checks: int = 0


class _Model(NamedTuple):
    """What is remembered of one policy."""

    place: str
    model: str
    repository: str
    live: str
    digest: str
    status: str


@dataclass(slots=True)
class StatusRecord:
    """The record of one workspace.

    Attributes:
        workspace: whose scorecards and decisions are read, each once.
        key: seals the record; None: nothing is remembered.
        unreadable: one message for each scorecard or decision that is not what it should be.
    """

    workspace: Workspace
    key: bytes | None = None
    unreadable: tuple[str, ...] = ()
    _models: dict[str, _Model] = field(default_factory=dict)
    _found: dict[str, _Model] = field(default_factory=dict)
    _files: dict[str, list[str]] = field(default_factory=dict)
    _heads: dict[str, Head | None] = field(default_factory=dict)
    _heads_now: dict[str, Head | None] = field(default_factory=dict)
    _changed: dict[str, frozenset[str] | None] = field(default_factory=dict)
    _logs: dict[Path, AuditLog] = field(default_factory=dict)
    _cards: dict[str, Scorecard] = field(default_factory=dict)
    _cards_of: dict[str, list[str]] = field(default_factory=dict)
    _answers_to: dict[str, list[str]] = field(default_factory=dict)
    _stale: bool = False

    @classmethod
    def of(cls, workspace: Workspace, *, remembered: bool) -> "StatusRecord":
        """Read scorecards and decisions; those that are remembered and unchanged are not parsed."""
        record = cls(workspace, seal_key(workspace) if remembered else None)
        if record.key is not None:
            record._load(record.key)
        record._read_files()
        return record

    @property
    def file(self) -> Path:
        """Where it is kept."""
        return self.workspace.root / "verified" / "status.json"

    def log(self, root: Path) -> AuditLog:
        """The audit log of a repository, read and checked once."""
        return self._logs.setdefault(root, AuditLog(root))

    def cards(self, model: str) -> tuple[Scorecard, ...]:
        """Scorecards of a model, oldest first."""
        found = []
        for name in self._cards_of.get(model, ()):
            if name not in self._cards:
                with suppress(InputError):  # it went since it was listed
                    self._cards[name] = read_scorecard(self.workspace.root / name)
            if name in self._cards:
                found.append(self._cards[name])
        return tuple(sorted(found, key=lambda card: card.created_at))

    def unchanged(self, policy: Path, place: Path) -> ModelStatus | None:
        """What was shown of a policy's model, for a list; None: it must be read."""
        known = self._models.get(_name(policy))
        if known is None or known.place != str(place):
            return None
        changed = self._models_changed(Path(known.repository))
        if changed is None or known.model in changed:
            return None
        with suppress(OSError, EnginegateError):
            layout = Layout(Path(known.repository), known.model)
            if self._sources(policy, layout, known.live).digest == known.digest:
                self._found[_name(policy)] = known
                return ModelStatus.model_validate_json(known.status)
        return None

    def sources(self, policy: Path, layout: Layout) -> SourceFiles | None:
        """The files of a model before it is read; None: it is not to be remembered."""
        if self.key is None:
            return None
        with suppress(OSError, EnginegateError):
            self._models_changed(layout.root)
            current = layout.current()
            if current is not None:
                live = layout.release(current.version).digest
                return self._sources(policy, layout, live)
        return None

    def keep(
        self,
        policy: Path,
        place: Path,
        status: ModelStatus,
        sources: SourceFiles | None,
        reading: StatusReading,
    ) -> None:
        """Remember what was found, if nothing is wrong with it and no time changes it."""
        whole = (
            sources is not None
            and sources.settled
            and sources.checks == reading.checks
            and status.live is not None
            and status.live.release_sha256 == sources.live
            and not reading.ages
            and not status.problems
            and all(each.state in _TIMELESS for each in status.waiting)
            and status.repository in self._heads_now
        )
        if sources is None or not whole:
            return
        line = status.model_copy(
            update={"live": None, "promise": None, "measured": None, "releases": (), "servers": ()}
        )
        self._stale = True
        self._found[_name(policy)] = _Model(
            str(place),
            status.model,
            status.repository,
            sources.live,
            sources.digest,
            line.model_dump_json(),
        )

    def save(self) -> None:
        """Write what was found; where the workspace cannot be written to, nothing is remembered."""
        if self.key is None or not (self._stale or self._heads_now != self._heads):
            return
        heads = {name: [h.count, h.sha256] if h else None for name, h in self._heads_now.items()}
        content = canonical_json(
            {
                "depends": _depends(),
                "files": self._files,
                "heads": heads,
                "models": self._found,
            }
        )
        with suppress(OSError):
            write_file(self.file, _seal(self.key, content) + b"\n" + content, mode=0o600)

    def _load(self, key: bytes) -> None:
        try:
            seal, _, content = read_file(self.file).partition(b"\n")
        except OSError:
            return
        if not hmac.compare_digest(seal, _seal(key, content)):
            return
        told = json.loads(content)
        if told["depends"] != _depends():
            return
        self._models = {name: _Model(*known) for name, known in told["models"].items()}
        self._files = told["files"]
        self._heads = {
            name: Head(count=known[0], sha256=known[1]) if known else None
            for name, known in told["heads"].items()
        }

    def _models_changed(self, root: Path) -> frozenset[str] | None:
        """Models with new lines in the audit log; None: any may have, or it cannot be read."""
        name = str(root)
        if name not in self._changed:
            self._changed[name] = None
            with suppress(EnginegateError):
                log = self.log(root)
                head = log.head()
                if name in self._heads:
                    self._changed[name] = log.models_since(self._heads[name])
                self._heads_now[name] = head
        return self._changed[name]

    def _read_files(self) -> None:
        """Each scorecard and decision of the workspace, once."""
        known, self._files, messages = self._files, {}, []
        limit_ns = time.time_ns() - _SETTLED_NS
        for name, seen in _workspace_files(self.workspace.root):
            line, path = _line(seen), self.workspace.root / name
            is_card = name.startswith("scorecards/")
            if name in known and known[name][0] == line:
                model = known[name][1]
            else:
                try:
                    if is_card:
                        self._cards[name] = read_scorecard(path)
                        model = self._cards[name].model
                    else:
                        Decision.read(path)
                        model = ""
                except InputError as error:
                    messages.append(str(error))
                    continue
                self._stale = True
            if seen.st_ctime_ns < limit_ns:
                self._files[name] = [line, model]
            if is_card:
                self._cards_of.setdefault(model, []).append(name)
            else:
                self._answers_to.setdefault(path.parent.name, []).append(f"{name} {line}")
        self._stale |= len(known) != len(self._files)
        self.unreadable = tuple(messages)

    def _sources(self, policy: Path, layout: Layout, live: str) -> SourceFiles:
        """The model's files; those of the checks of a live release, where its digest is known.

        Raises:
            OSError: the policy or a folder cannot be read.
        """
        limit_ns = time.time_ns() - _SETTLED_NS
        seen = [("policy", policy.stat())]
        for path in (layout.current_file, layout.folder / DEVICE):
            with suppress(FileNotFoundError):
                seen.append((path.name, os.lstat(path)))
        seen += _json_files(f"{layout.folder}/{RECORDS}/releases")
        checks = _json_files(f"{self.workspace.results}/watch/{live}") if live else []
        checks = [each for each in checks if each[0][0].isdigit()]
        lines = [f"{name} {_line(facts)}" for name, facts in seen]
        lines += [f"check {name} {_line(facts)}" for name, facts in checks]
        settled = all(facts.st_ctime_ns < limit_ns for _, facts in (*seen, *checks))
        for name in self._cards_of.get(layout.model, ()):
            kept = self._files.get(name)
            settled = settled and kept is not None
            answers = self._answers_to.get(Path(name).stem, ())
            lines += [f"{name} {kept[0] if kept else ''}", *answers]
            settled = settled and all(each.partition(" ")[0] in self._files for each in answers)
        text = "\n".join(sorted(lines)).encode(errors="surrogateescape")
        return SourceFiles(live, sha256_bytes(text), settled, len(checks))


def policy_stamp(path: Path) -> str:
    """Inode, size and times of a policy, also behind a link; empty where there is none."""
    try:
        return _line(path.stat())
    except OSError:
        return ""


def _name(policy: Path) -> str:
    """A policy by its place, and as it was named: commands that are shown name it so."""
    return f"{policy.absolute()}\n{policy}"


def _seal(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, b"status\n" + content, "sha256").hex().encode()


def _depends() -> str:
    """What decides beside the files: this program's and the engine kinds' own code."""
    home = str(Path(enginegate.__file__).parent)
    lines = [str(_FORMAT), sys.version, home]
    for folder, _, names in os.walk(home):
        lines += [
            f"{name} {_line(os.lstat(f'{folder}/{name}'))}"
            for name in names
            if name.endswith(".py")
        ]
    for kind in engine_kinds().values():
        source = getattr(sys.modules.get(type(kind).__module__), "__file__", None)
        lines.append(f"{kind.name} {source} {_line(os.lstat(source)) if source else ''}")
    return sha256_bytes("\n".join(sorted(lines)).encode(errors="surrogateescape"))


def _workspace_files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Scorecards, then decisions, by name."""
    for name, seen in sorted(_json_files(f"{root}/scorecards"), key=_by_name):
        yield f"scorecards/{name}", seen
    for folder in sorted(_folders(f"{root}/decisions")):
        for name, seen in sorted(_json_files(f"{root}/decisions/{folder}"), key=_by_name):
            yield f"decisions/{folder}/{name}", seen


def _by_name(listed: tuple[str, os.stat_result]) -> str:
    return listed[0]


def _folders(place: str) -> Iterable[str]:
    try:
        with os.scandir(place) as entries:
            return [each.name for each in entries if each.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _json_files(folder: str) -> list[tuple[str, os.stat_result]]:
    """JSON files of a folder, not sorted; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            return [
                (each.name, each.stat(follow_symlinks=False))
                for each in entries
                if each.name.endswith(".json")
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _line(seen: os.stat_result) -> str:
    return f"{seen.st_mode} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"
