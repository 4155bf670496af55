"""Looks at live releases, kept: what was read, how it was judged, what was done about it."""

import logging
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt

from enginegate.atomic_io import file_lock, write_file
from enginegate.candidate import Sha256
from enginegate.decision import Release
from enginegate.errors import EnginegateError, ExitCode, InputError
from enginegate.evidence import Finding, Outcome, worst
from enginegate.records import Record
from enginegate.watch.probe import LiveReading
from enginegate.workspace import Workspace

Action: TypeAlias = Literal["none", "alert", "rollback"]

# At one look in ten minutes, the last four days; older ones are in MLflow.
_KEPT = 600
_ROLLED_BACK = "rolled-back"
_LOCK = ".lock"
_LOCK_TIMEOUT_S = 30.0

_log = logging.getLogger("enginegate.watch")


class Count(Record):
    """What one look adds to a share that is judged over all looks together."""

    what: str = Field(
        description="e.g. error_share, error_share/SERVER, slice_agreement/light=night"
    )
    samples: NonNegativeInt
    bad: NonNegativeInt


class WatchCheck(Record):
    """One look at one release."""

    schema_version: Literal[1] = 1
    model: str
    version: PositiveInt
    release_sha256: Sha256
    number: PositiveInt = Field(description="of this release's looks, from 1")
    at: datetime
    intensive: bool = Field(
        description="whether the release was younger than its watch window, or a fleet's canary"
    )
    reading: LiveReading | None = Field(description="None when nothing could be read")
    others: dict[str, LiveReading] = Field(
        default_factory=dict, description="of the fleet's further servers, by name"
    )
    findings: tuple[Finding, ...]
    counts: tuple[Count, ...] = ()
    sample: Sha256 | None = Field(default=None, description="shadow sample it was compared on")
    scorecard: Sha256 | None = Field(
        default=None, description="whose promise it was compared with; none: the release's own"
    )
    action: Action = "none"

    def promised_by(self, release: Release) -> str:
        """Digest of the scorecard whose promise the release was compared with."""
        return self.scorecard or release.scorecard_sha256

    @property
    def outcome(self) -> Outcome:
        """The worst of the findings that count."""
        return worst(self.findings)

    @property
    def found(self) -> tuple[Finding, ...]:
        """The findings that count and did not pass, worst first."""
        kept = [f for f in self.findings if not f.advisory and f.outcome is not Outcome.PASSED]
        return tuple(sorted(kept, key=lambda finding: -finding.outcome))

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings by which the promise was broken, also where another one is errored."""
        return tuple(finding for finding in self.found if finding.outcome is Outcome.FAILED)

    def __str__(self) -> str:
        said = "; ".join(f"{gate_of(f)}: {f.reason}" for f in self.found)
        name = f"look {self.number} at release {self.version} of {self.model}"
        return f"{name}: {self.outcome.word}{f' ({said})' if said else ''}"


@dataclass(frozen=True, slots=True)
class Watched:
    """What one run of the watch did and saw.

    Attributes:
        done: one sentence for each thing that was done.
        looks: at what is live; none when nothing is.
    """

    done: tuple[str, ...]
    looks: tuple[WatchCheck, ...]


class PromiseBrokenError(EnginegateError):
    """A live release did not do what its scorecard promised, and nobody has acknowledged it.

    Attributes:
        watched: what the run did and saw all the same.
    """

    exit_code = ExitCode.GATES_FAILED

    def __init__(self, message: str, watched: Watched) -> None:
        """The message says what was promised, what was measured, and the next command."""
        super().__init__(message)
        self.watched = watched


def gate_of(finding: Finding) -> str:
    """A finding's gate, and which further server of a fleet it is about."""
    server = finding.scope.partition("/")[2]
    return f"{finding.gate} on {server}" if server else finding.gate


def _file_of(look: WatchCheck) -> str:
    return f"{look.number:08d}.json"


@dataclass(frozen=True, slots=True)
class SampledTraffic:
    """What a fresh sample of live requests said; empty when there is none."""

    findings: tuple[Finding, ...] = ()
    counts: tuple[Count, ...] = ()
    sample: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class WatchLog:
    """The looks at one release, one file each; the oldest are forgotten."""

    folder: Path

    @classmethod
    def at(cls, workspace: Workspace, release: Release) -> "WatchLog":
        """Of a release: another one of the same number has another digest."""
        return cls(workspace.results / "watch" / release.digest)

    def read(self) -> tuple[WatchCheck, ...]:
        """Oldest first; a damaged file is left out, and said."""
        looks = []
        for path in sorted(self.folder.glob("[0-9]*.json")):
            try:
                looks.append(WatchCheck.read(path))
            except InputError as error:
                _log.warning("an earlier look does not count: %s", error)
        return tuple(looks)

    def next_number(self) -> int:
        """Never one that was given before, also when its file is damaged."""
        return max((int(path.stem) for path in self.folder.glob("[0-9]*.json")), default=0) + 1

    def add(self, look: WatchCheck) -> WatchCheck:
        """Keep a look, and forget the oldest; the look as it was kept.

        Watches that overlap give the same number to two looks: the one that ends later moves on.
        A look that is kept already stays under its number, as it says now.

        Raises:
            EnginegateError: the folder cannot be written to.
        """
        try:
            with file_lock(self.folder / _LOCK, timeout_s=_LOCK_TIMEOUT_S):
                if self._is_taken(look):
                    look = look.model_copy(update={"number": self.next_number()})
                write_file(self.folder / _file_of(look), look.pretty_json())
        except TimeoutError as error:
            raise EnginegateError(
                f"Another watch is keeping a look in {self.folder}, by {error}, and has not ended "
                f"in {_LOCK_TIMEOUT_S:.0f} s. End that process if it hangs; the next look is kept."
            ) from error
        except OSError as error:
            raise EnginegateError(
                f"A look cannot be kept in {self.folder}: {error.strerror}. Free space or fix "
                "permissions there."
            ) from error
        for path in sorted(self.folder.glob("[0-9]*.json"))[:-_KEPT]:
            path.unlink(missing_ok=True)
        return look

    def _is_taken(self, look: WatchCheck) -> bool:
        """Whether another look has its number; a damaged one may be any."""
        path = self.folder / _file_of(look)
        try:
            return path.exists() and WatchCheck.read(path).at != look.at
        except InputError:
            return True

    @property
    def rolled_back(self) -> bool:
        """Whether a watch has rolled this release back before."""
        return (self.folder / _ROLLED_BACK).exists()

    def claim_rollback(self) -> bool:
        """Take the one automatic rollback that a release has; False when it was taken before.

        It counts as taken from here on, also if this process dies: a person then decides.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self.folder / _ROLLED_BACK, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def return_claim(self) -> None:
        """The rollback was refused, so the release is live still and may be tried again."""
        (self.folder / _ROLLED_BACK).unlink(missing_ok=True)
