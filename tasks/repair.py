"""Candidates that fail their accuracy gates -> the same with their worst nodes at FP32."""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate import __version__
from enginegate.candidate import KEPT, ONNX_FILE, Candidate, Engine, OnnxModel, Sha256, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet
from enginegate.data_sources import load_data
from enginegate.engine_kinds import kind_named
from enginegate.engines import build_engine, open_engine, plan_engine, runnable_here
from enginegate.errors import BuildError, DataError, tool_errors
from enginegate.evidence import Finding, Outcome, Verdict
from enginegate.policy.building import EngineTables
from enginegate.precision import (
    PrecisionTrial,
    TradeoffCurve,
    search_mixed_precision,
    sensitivities,
)
from enginegate.records import canonical_json, sha256_bytes
from enginegate.workspace import Workspace, remembered
from tasks.run_page import of_candidate

_log = logging.getLogger("enginegate.repair")
_NOT_ACCURACY = frozenset({"build", "runnable", "precision_proof"})
_TIMED_RUNS = 20
_RANKING_SHARE = 0.5  # of the budget

Judge = Callable[[ContentFolder[Engine]], Verdict]


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair found.

    Attributes:
        attempt: the repaired engine; None if no set of nodes that may be kept passes.
        curve: every set that was tried.
        original: the candidate that failed.
    """

    attempt: ContentFolder[Engine] | None
    curve: TradeoffCurve
    original: Candidate

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Whose curve this is: the candidate that failed, and the one that came of it."""
        return (self.original, *([self.attempt.value.candidate] if self.attempt else []))


@task(task_run_name=of_candidate("repair"), cache_policy=NO_CACHE)
def repair(
    attempt: ContentFolder[Engine] | Unbuilt,
    verdict: Verdict,
    judge: Judge,
    tables: EngineTables,
    source: ContentFolder[OnnxModel],
    workspace: Workspace,
) -> Repaired | None:
    """Keep the fewest nodes at FP32 with which the candidate passes; None if nothing is to repair.

    Args:
        verdict: on the candidate as it is.
        judge: the verdict on a candidate that was built.
    """
    if isinstance(attempt, Unbuilt) or tables.repair.max_builds == 0:
        return None
    if not _repairable(attempt.value.candidate, verdict):
        return None
    if tables.calibration_data is None:
        _log.info("%s: not repaired: nodes are ranked on calibration data", verdict.candidate)
        return None
    data = load_data(tables.calibration_data)
    bench = _Bench(tables, source, data, judge, attempt, verdict, workspace)
    try:
        with tool_errors("its nodes could not be tried"):
            curve = bench.curve()
    except (BuildError, DataError) as error:
        _log.warning("%s: could not be repaired: %s", verdict.candidate, error)
        return None
    _log.info("%s: repair: %s", verdict.candidate, curve.reason)
    found = bench.built(curve.repaired.kept) if curve.repaired else None
    return Repaired(found, curve, verdict.candidate)


def _repairable(candidate: Candidate, verdict: Verdict) -> bool:
    """Whether an accuracy gate failed, and nothing that keeping nodes cannot mend."""
    failed = [f.gate for f in verdict.blocking if f.outcome is Outcome.FAILED]
    return (
        bool(failed)
        and _NOT_ACCURACY.isdisjoint(failed)
        and not candidate.precision.is_as_exported
        and not candidate.variant
        and not kind_named(candidate.kind).takes_program  # nodes that may be kept are ONNX's
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """One candidate under repair."""

    tables: EngineTables
    source: ContentFolder[OnnxModel]
    data: DataSet
    judge: Judge
    attempt: ContentFolder[Engine]
    verdict: Verdict
    workspace: Workspace

    def curve(self) -> TradeoffCurve:
        """The search, or what it found when nothing that it depends on has changed."""
        path = self.workspace.results / "repairs" / f"{self._key()}.json"
        return remembered(path, TradeoffCurve, self._search, worth_keeping=lambda _: True)

    def built(self, kept: tuple[str, ...]) -> ContentFolder[Engine]:
        """The engine with these nodes at FP32."""
        base = self.attempt.value.candidate
        candidate = base.model_copy(update={"variant": f"{KEPT}{len(kept)}"})
        plan = plan_engine(
            self.source, candidate, tables=self.tables, calibration=self.data, keep=kept
        )
        return build_engine(plan, self.workspace.engines)

    def _search(self) -> TradeoffCurve:
        candidate = self.attempt.value.candidate
        limits, gate = self.tables.repair, _measured(self.verdict)
        started = time.monotonic()
        ranked = sensitivities(
            self.source.folder / ONNX_FILE,
            candidate,
            data=self.data,
            rules=self.tables.calibration,
            samples=limits.samples,
            budget_s=_RANKING_SHARE * limits.budget_s,
        )
        left = max(limits.budget_s - (time.monotonic() - started), 1.0)
        before = self._trial((), self.attempt, self.verdict, gate)
        return search_mixed_precision(
            before,
            ranked,
            lambda kept: self._tried(kept, gate),
            candidate=candidate,
            limits=limits.model_copy(update={"budget_s": round(left, 1)}),
        )

    def _tried(self, kept: tuple[str, ...], gate: Finding | None) -> PrecisionTrial:
        try:
            with tool_errors(f"with {len(kept)} nodes kept at fp32"):
                built = self.built(kept)
        except BuildError as error:
            return _unbuilt(kept, str(error), gate)
        verdict = self.judge(built)
        _log.info("%s with %d kept: %s", verdict.candidate, len(kept), verdict.outcome.word)
        return self._trial(kept, built, verdict, gate)

    def _trial(
        self,
        kept: tuple[str, ...],
        built: ContentFolder[Engine],
        verdict: Verdict,
        gate: Finding | None,
    ) -> PrecisionTrial:
        runs = runnable_here(built.value) is None
        # What cannot run here is inconclusive at best: enough if nothing fails any more.
        enough = Outcome.PASSED if runs else Outcome.INCONCLUSIVE
        blocking = verdict.blocking
        measured = verdict.finding(gate.gate, gate.scope) if gate else None
        return PrecisionTrial(
            kept=kept,
            passed=verdict.outcome <= enough,
            outcome=verdict.outcome,
            reason=blocking[0].reason if blocking else "every gate passed",
            divergence=measured.value if measured else None,
            measure=_named(gate),
            size_bytes=built.value.file.size_bytes,
            latency_ms=self._latency_ms(built) if runs else None,
            engine_sha256=built.value.file.sha256,
        )

    def _latency_ms(self, built: ContentFolder[Engine]) -> float:
        """Median of some runs of one full batch, without a server."""
        batch = next(self.data.batches(built.value.max_batch_size))
        times = []
        with open_engine(built.value, built.folder) as runner:
            for _ in range(_TIMED_RUNS):
                started = time.perf_counter()
                runner.run(batch)
                times.append(time.perf_counter() - started)
        return round(1e3 * statistics.median(times), 4)

    def _key(self) -> Sha256:
        deciding = {
            "enginegate": __version__,
            "engine": self.attempt.value.digest,
            "verdict": self.verdict.digest,
            "calibration": self.data.sha256,
            "calibrating": self.tables.calibration.digest,
            "limits": self.tables.repair.digest,
        }
        return sha256_bytes(canonical_json(deciding))


def _measured(verdict: Verdict) -> Finding | None:
    """The gate a curve is drawn over: one that failed, of those whose number should be small."""
    small = [f for f in verdict.findings if f.relation == "<=" and (f.value or 0.0) >= 0.0]
    worst_first = sorted(small, key=lambda f: (-f.outcome, f.scope != "evaluation", f.gate))
    return worst_first[0] if worst_first else None


def _named(gate: Finding | None) -> str:
    return f"{gate.gate} of {gate.scope}, {gate.unit}".rstrip(", ") if gate else "not measured"


def _unbuilt(kept: tuple[str, ...], why: str, gate: Finding | None) -> PrecisionTrial:
    return PrecisionTrial(
        kept=kept,
        passed=False,
        outcome=Outcome.FAILED,
        reason=f"could not be built: {why}",
        divergence=None,
        measure=_named(gate),
    )
