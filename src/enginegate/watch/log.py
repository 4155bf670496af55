"""The log of checks of live releases: what was read, how it was judged, what was done about it."""

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

WatchAction: TypeAlias = Literal["none", "alert", "rollback"]

# At one check in ten minutes, the last four days: every run reads them all. MLflow has the rest.
_MOST_CHECKS = 600
_ROLLED_BACK = "rolled-back"
_LOCK = ".lock"
_LOCK_TIMEOUT_S = 30.0

_log = logging.getLogger("enginegate.watch")


class ShareCount(Record):
    """One check's part of a share that is judged over all checks together."""

    what: str = Field(
        description="e.g. error_share, error_share/SERVER, slice_agreement/light=night"
    )
    samples: NonNegativeInt
    bad: NonNegativeInt


class WatchCheck(Record):
    """One check of one release."""

    schema_version: Literal[1] = 1
    model: str
    version: PositiveInt
    release_sha256: Sha256
    number: PositiveInt = Field(description="of this release's checks, from 1")
    at: datetime
    intensive: bool = Field(
        description="whether the release was younger than its watch window, or a fleet's canary"
    )
    reading: LiveReading | None = Field(description="None when nothing could be read")
    others: dict[str, LiveReading] = Field(
        default_factory=dict, description="of the fleet's further servers, by name"
    )
    findings: tuple[Finding, ...]
    counts: tuple[ShareCount, ...] = ()
    sample: Sha256 | None = Field(default=None, description="shadow sample it was compared on")
    scorecard: Sha256 | None = Field(
        default=None, description="whose promise it was compared with; none: the release's own"
    )
    action: WatchAction = "none"

    def promised_by(self, release: Release) -> str:
        """Digest of the scorecard whose promise the release was compared with."""
        return self.scorecard or release.scorecard_sha256

    @property
    def outcome(self) -> Outcome:
        """The worst of the findings that count."""
        return worst(self.findings)

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that count and did not pass, worst first."""
        counting = [f for f in self.findings if not f.advisory and f.outcome is not Outcome.PASSED]
        return tuple(sorted(counting, key=lambda finding: -finding.outcome))

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings by which the promise was broken, also where another one is errored."""
        return tuple(finding for finding in self.problems if finding.outcome is Outcome.FAILED)

    def __str__(self) -> str:
        reasons = "; ".join(f"{gate_of(f)}: {f.reason}" for f in self.problems)
        name = f"check {self.number} of release {self.version} of {self.model}"
        return f"{name}: {self.outcome.word}{f' ({reasons})' if reasons else ''}"


@dataclass(frozen=True, slots=True)
class WatchResult:
    """One run of the watch.

    Attributes:
        done: one sentence for each thing that was done.
        checks: of the live release; none when nothing is live.
    """

    done: tuple[str, ...]
    checks: tuple[WatchCheck, ...]


class PromiseBrokenError(EnginegateError):
    """A live release did not do what its scorecard promised, and nobody has acknowledged it.

    Attributes:
        watched: the run in which this was noticed.
    """

    exit_code = ExitCode.GATES_FAILED

    def __init__(self, message: str, watched: WatchResult) -> None:
        """The message says what was promised, what was measured, and the next command."""
        super().__init__(message)
        self.watched = watched


def gate_of(finding: Finding) -> str:
    """A finding's gate, and which further server of a fleet it is about."""
    server = finding.scope.partition("/")[2]
    return f"{finding.gate} on {server}" if server else finding.gate


@dataclass(frozen=True, slots=True)
class SampledTraffic:
    """The comparison of a fresh sample of live requests with FP32; empty when there is none."""

    findings: tuple[Finding, ...] = ()
    counts: tuple[ShareCount, ...] = ()
    sample: Sha256 | None = None


@dataclass(frozen=True, slots=True)
class WatchLog:
    """The checks of one release, one file each; the oldest are deleted."""

    folder: Path

    @classmethod
    def at(cls, workspace: Workspace, release: Release) -> "WatchLog":
        """The log of a release, by its digest: another release may have the same number."""
        return cls(workspace.results / "watch" / release.digest)

    def read(self) -> tuple[WatchCheck, ...]:
        """Oldest first; a damaged file is left out and logged."""
        checks = []
        for path in self._files():
            try:
                checks.append(WatchCheck.read(path))
            except InputError as error:
                _log.warning("an earlier check does not count: %s", error)
        return tuple(checks)

    def next_number(self) -> int:
        """A number that no check has had, also when its file is damaged."""
        return max((int(path.stem) for path in self._files()), default=0) + 1

    def add(self, check: WatchCheck) -> WatchCheck:
        """Write a check and delete the oldest; returns the check as it was written.

        Watches that overlap give the same number to two checks: the check that ends later gets
        another. A check that was written before is written again under its number.

        Raises:
            EnginegateError: the folder cannot be written to.
        """
        try:
            with file_lock(self.folder / _LOCK, timeout_s=_LOCK_TIMEOUT_S):
                if self._is_taken(check):
                    check = check.model_copy(update={"number": self.next_number()})
                write_file(self._path(check), check.pretty_json())
        except TimeoutError as error:
            raise EnginegateError(
                f"Another watch is keeping a check in {self.folder}, by {error}, and has not ended "
                f"in {_LOCK_TIMEOUT_S:.0f} s. End that process if it hangs; the next check is kept."
            ) from error
        except OSError as error:
            raise EnginegateError(
                f"A check cannot be kept in {self.folder}: {error.strerror}. Free space or fix "
                "permissions there."
            ) from error
        for path in self._files()[:-_MOST_CHECKS]:
            path.unlink(missing_ok=True)
        return check

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.json"))

    def _path(self, check: WatchCheck) -> Path:
        return self.folder / f"{check.number:08d}.json"

    def _is_taken(self, check: WatchCheck) -> bool:
        """Whether another check has its number; a damaged file may be any check's."""
        path = self._path(check)
        try:
            return path.exists() and WatchCheck.read(path).at != check.at
        except InputError:
            return True

    @property
    def rolled_back(self) -> bool:
        """Whether a watch has claimed this release's rollback."""
        return (self.folder / _ROLLED_BACK).exists()

    def claim_rollback(self) -> bool:
        """Claim the one automatic rollback that a release has; False when it was claimed before.

        It stays claimed also if this process dies: a person then decides.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self.folder / _ROLLED_BACK, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def return_claim(self) -> None:
        """Give the claim up: the rollback was refused, so the release is still live."""
        (self.folder / _ROLLED_BACK).unlink(missing_ok=True)
