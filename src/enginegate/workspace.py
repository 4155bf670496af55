"""Where a project keeps what it makes: one folder, ``.enginegate`` unless ENGINEGATE_HOME says."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from enginegate.atomic_io import mark_used, write_file
from enginegate.candidate import Candidate, Engine, Sha256
from enginegate.decision import Decision
from enginegate.errors import InputError
from enginegate.evidence import Scorecard, contradictions
from enginegate.policy import Policy
from enginegate.policy.paths import WORKSPACE, project_of
from enginegate.records import Record

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths below one root. Everything under ``store/`` is content-addressed and may be deleted."""

    root: Path

    @classmethod
    def here(cls) -> "Workspace":
        """The workspace of the current folder's project, or of ENGINEGATE_HOME."""
        return cls._in(project_of(Path.cwd()))

    @classmethod
    def of(cls, rules: Policy) -> "Workspace":
        """The workspace of a policy's project, or of ENGINEGATE_HOME."""
        return cls.of_project(rules.root)

    @classmethod
    def of_project(cls, project: Path | None) -> "Workspace":
        """The workspace of a project's folder, or of ENGINEGATE_HOME; None: the current one."""
        return cls._in(project) if project is not None else cls.here()

    @classmethod
    def _in(cls, project: Path) -> "Workspace":
        home = os.environ.get("ENGINEGATE_HOME")
        return cls(Path(home).absolute() if home else project / WORKSPACE)

    @property
    def onnx(self) -> Path:
        """ONNX models, one folder each, by digest of what decides their bytes."""
        return self.root / "store" / "onnx"

    @property
    def engines(self) -> Path:
        """Engines, one folder each, by digest of the plan that built them."""
        return self.root / "store" / "engines"

    @property
    def data(self) -> Path:
        """Data that was no NumPy file, as arrays, one folder each; readable by its owner only."""
        return self.root / "store" / "data"

    @property
    def results(self) -> Path:
        """Verdicts, measurements and reference outputs, by digest of their inputs."""
        return self.root / "store" / "results"

    @property
    def shadow(self) -> Path:
        """Recorded traffic; holds user data, readable by its owner only."""
        return self.root / "shadow"

    @property
    def logs(self) -> Path:
        """Server and builder logs."""
        return self.root / "logs"

    @property
    def scratch(self) -> Path:
        """Model repositories of embedded servers; safe to delete when nothing runs."""
        return self.root / "scratch"

    @property
    def keys(self) -> Path:
        """Keys that releases are signed with; readable by their owner only."""
        return self.root / "keys"

    @property
    def cursors(self) -> Path:
        """Up to which line MLflow and Prefect have each audit log."""
        return self.root / "cursors"

    @property
    def tracking_uri(self) -> str:
        """MLflow's address: MLFLOW_TRACKING_URI, else a database in this workspace."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.root / 'mlflow.db'}"

    @property
    def artifacts(self) -> Path:
        """MLflow's files, when its database is in this workspace."""
        return self.root / "mlartifacts"

    def save_scorecard(self, scorecard: Scorecard) -> Path:
        """Write a scorecard under its digest."""
        path = self.scorecard_file(scorecard)
        write_file(path, scorecard.pretty_json())
        return path

    def scorecard_file(self, scorecard: Scorecard) -> Path:
        """Where a scorecard is kept; its signature is beside it, ending in ``.sig``."""
        return self.root / "scorecards" / f"{scorecard.digest}.json"

    def scorecard(self, reference: str) -> Scorecard:
        """The scorecard of a digest, a unique beginning of one, or a path.

        Raises:
            InputError: none or several match, the file's content is not what its name says, or it
                contradicts itself.
        """
        folder = self.root / "scorecards"
        found = sorted(folder.glob(f"{reference}*.json")) if reference.isalnum() else []
        path = found[0] if len(found) == 1 else Path(reference)
        if len(found) > 1:
            raise InputError(
                f"{reference!r} is the beginning of {len(found)} scorecards; give more of it."
            )
        if not path.is_file():
            raise InputError(
                f"There is no scorecard {reference!r} in {folder}. `enginegate status` lists them."
            )
        return read_scorecard(path) if path.parent == folder else _consistent(path)

    def scorecards(self) -> tuple[Scorecard, ...]:
        """Every scorecard that can be read, oldest first; `unreadable` names the others."""
        read = []
        for path in (self.root / "scorecards").glob("*.json"):
            with suppress(InputError):
                read.append(read_scorecard(path))
        return tuple(sorted(read, key=lambda scorecard: scorecard.created_at))

    def unreadable(self) -> tuple[str, ...]:
        """One message for each file of a scorecard or a decision that is not what it should be."""
        messages = []
        kinds = (("scorecards/*.json", read_scorecard), ("decisions/*/*.json", Decision.read))
        for pattern, read in kinds:
            for path in sorted(self.root.glob(pattern)):
                try:
                    read(path)
                except InputError as error:
                    messages.append(str(error))
        return tuple(messages)

    def save_decision(self, decision: Decision) -> Path:
        """Write a decision on a scorecard; earlier ones are kept beside it.

        The file alone counts for nothing: `repository.record_decision` puts it in the audit log.
        """
        path = self.decision_file(decision)
        write_file(path, decision.pretty_json())
        return path

    def decision_file(self, decision: Decision) -> Path:
        """Where a decision is kept; its signature is beside it, ending in ``.sig``."""
        folder = self.root / "decisions" / decision.scorecard_sha256
        stamp = decision.decided_at.astimezone(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        # Two people may answer in the same instant: neither may overwrite the other.
        return folder / f"{stamp}-{decision.digest[:8]}.json"

    def decisions(self, scorecard: Sha256) -> tuple[Decision, ...]:
        """Every decision on a scorecard, oldest first.

        Raises:
            InputError: one cannot be read: it may be a no, so that nobody decides without it.
        """
        written = (self.root / "decisions" / scorecard).glob("*.json")
        return tuple(Decision.read(path) for path in sorted(written))

    def decision(self, scorecard: Sha256) -> Decision | None:
        """The latest decision on a scorecard."""
        return next(reversed(self.decisions(scorecard)), None)

    def engine(self, sha256: Sha256) -> tuple[Engine, Path]:
        """An engine of the store by the digest of its file, and its folder; the digest is checked.

        Raises:
            InputError: no engine in the store has that digest.
            TamperedError: it is there, and its bytes are not what its manifest says.
        """
        for manifest in sorted(self.engines.glob("[!.]*/manifest.json")):
            engine = Engine.read(manifest)
            if engine.file.sha256 == sha256:
                engine.check(manifest.parent)
                mark_used(manifest.parent)
                return engine, manifest.parent
        raise InputError(
            f"The store {self.engines} holds no engine {sha256[:12]}. It was deleted, or was built "
            "on another machine: run `enginegate qualify` here."
        )

    def engine_sizes(self, scorecard: Scorecard) -> dict[Candidate, int]:
        """Bytes of a scorecard's engines, without weights beside them; those that the store has."""
        sizes: dict[Sha256 | None, int] = {}
        for manifest in self.engines.glob("[!.]*/manifest.json"):
            with suppress(InputError):
                file = Engine.read(manifest).file
                sizes[file.sha256] = file.size_bytes
        return {
            verdict.candidate: sizes[verdict.engine_sha256]
            for verdict in scorecard.verdicts
            if verdict.engine_sha256 in sizes
        }


def read_scorecard(path: Path) -> Scorecard:
    """A scorecard that is named after its digest.

    Raises:
        InputError: it cannot be read, contradicts itself, or is not what its name says.
    """
    scorecard = _consistent(path)
    if path.stem != scorecard.digest:
        raise InputError(
            f"{path} was changed after it was written: its content is {scorecard.digest[:12]}. "
            "Qualify again."
        )
    return scorecard


def _consistent(path: Path) -> Scorecard:
    """A scorecard whose outcomes follow from its findings."""
    scorecard = Scorecard.read(path)
    wrong = tuple(contradictions(scorecard))
    if wrong:
        raise InputError(
            f"{path} contradicts itself: {'; '.join(wrong)}. It was edited by hand, or written by "
            "another version. Qualify again."
        )
    return scorecard


def remembered(
    path: Path, kind: type[R], make: Callable[[], R], *, worth_keeping: Callable[[R], bool]
) -> R:
    """The record at ``path``, or a new one: nothing that was found out is found out twice.

    A damaged record is made again. One that is not worth keeping (it broke, or did not decide) is
    returned and forgotten, so that the next run tries again.
    """
    with suppress(InputError):
        found = kind.read(path)
        mark_used(path)
        return found
    made = make()
    if worth_keeping(made):
        write_file(path, made.pretty_json())
    return made


def now() -> datetime:
    """The current time, with its zone."""
    return datetime.now(tz=UTC)
