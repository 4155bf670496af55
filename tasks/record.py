"""All the evidence as one scorecard: in the workspace, and in MLflow."""

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from enginegate.atomic_io import write_file
from enginegate.benchmark.config_comments import measured_config
from enginegate.candidate import Candidate, Engine, OnnxModel, Sha256, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet
from enginegate.data_sources import load_data
from enginegate.decision import Release, replaced_release
from enginegate.devices import DeviceQualification, PartStore
from enginegate.engine_kinds import engine_kinds
from enginegate.errors import InputError
from enginegate.evidence import (
    Benchmark,
    DataDigests,
    DeviceEvidence,
    EagerSpeed,
    EngineSpeed,
    ReplacedRelease,
    Scorecard,
    Verdict,
)
from enginegate.machine import gpus, processor, user_at_host
from enginegate.policy.benchmarking import Search, Slo
from enginegate.policy.data import Data
from enginegate.policy.operating import Approval, Signing
from enginegate.precision import TradeoffCurve, tradeoff_chart
from enginegate.records import canonical_json, sha256_bytes
from enginegate.report import (
    accuracies,
    candidate_figures,
    page_of_log,
    scorecard_markdown,
    serving_figures,
    serving_page,
    serving_report,
)
from enginegate.report.progress import told_as
from enginegate.repository import Layout, ReleaseSigning
from enginegate.tracking import CandidateArtifacts, Tracker
from enginegate.workspace import Workspace, now, remembered
from validation.choice import choose
from validation.engine_speed import judge_engine_speeds
from validation.speedup import with_speed

_log = logging.getLogger("enginegate.record")
_PACKAGES = ("enginegate", "numpy", "onnx", "torch")  # and those of the engine kinds


@dataclass(frozen=True, slots=True)
class Qualification:
    """What one run of `qualify` found, candidate by candidate in the order of the policy.

    Attributes:
        policy_sha256: digest of the whole policy, for this version of the model.
        results: of each attempt, Great Expectations' results by name.
        benchmarks: of each attempt; None: it was not measured.
        engine_speeds: of each attempt, without a server; None: not measured.
        eager_speeds: of the source's own PyTorch model, by precision.
        approval_hours: for how long the policy lets an approval stand.
        unmeasured: why a candidate was not benchmarked.
        curves: what repairs tried.
    """

    policy_sha256: Sha256
    model: str
    model_uri: str
    onnx: OnnxModel
    data: DataDigests
    attempts: Sequence[ContentFolder[Engine] | Unbuilt]
    verdicts: Sequence[Verdict]
    results: Sequence[Mapping[str, str]]
    benchmarks: Sequence[Benchmark | None]
    unmeasured: Mapping[Candidate, str]
    curves: Mapping[Candidate, TradeoffCurve]
    engine_speeds: Sequence[EngineSpeed | None] = ()
    eager_speeds: tuple[EagerSpeed, ...] = ()
    approval_hours: float | None = None


def digests_of(data: Data, shadow: DataSet | None) -> DataDigests:
    """Of the evaluation and calibration data, and of the shadow sample that was used."""
    return DataDigests(
        evaluation=load_data(data.evaluation).sha256,
        calibration=load_data(data.calibration).sha256 if data.calibration is not None else None,
        shadow=shadow.sha256 if shadow is not None else None,
    )


@task(task_run_name="scorecard-{found.model}", cache_policy=NO_CACHE)
def make_scorecard(
    found: Qualification,
    slo: Slo,
    search: Search,
    repository: Path,
    workspace: Workspace,
    device: str = "",
) -> Scorecard:
    """Put the evidence together and name the winner; the same evidence is the same scorecard.

    Args:
        found: the evidence.
        slo: says what speedup is asked for, and over what.
        search: says what the best candidate is.
        repository: the live one, which may hold a release that the winner would replace.
        workspace: keeps the scorecard that was first made of this evidence.
        device: the kind of device that it is about; empty: the policy names none.
    """
    layout = Layout(repository, found.model)
    current = layout.current()
    release = layout.release(current.version) if current else None
    live = _engine_on(release, device) if release else None
    judged = with_speed(found.benchmarks, slo, search, live=live)
    measured = tuple(each for each in judged if each is not None)
    choice = choose(found.verdicts, measured, search, fp32_may_win=slo.fp32_may_win)
    card = Scorecard(
        model=found.model,
        model_uri=found.model_uri,
        created_at=now(),
        onnx_sha256=found.onnx.file.sha256,
        policy_sha256=found.policy_sha256,
        data=found.data,
        environment=_environment(),
        verdicts=tuple(found.verdicts),
        benchmarks=measured,
        replaces=release.version if release else None,
        replaced=_replaced(release, workspace) if release else None,
        winner=choice.winner,
        reason=choice.reason,
        tied=choice.tied,
        requested_by=_requester(),
        approval_hours=found.approval_hours,
        unmeasured={candidate.name: why for candidate, why in found.unmeasured.items()},
        engine_speeds=tuple(speed for speed in found.engine_speeds if speed is not None),
        eager_speeds=found.eager_speeds,
        device=device,
    )
    card = card.model_copy(update={"speed_findings": judge_engine_speeds(card)})
    return first_made(card, workspace)


def _engine_on(release: Release, device: str) -> Sha256:
    """Digest of the engine that a release has for a kind of device, else for its publisher's."""
    found = (each for each in release.engines if each.device == device)
    return next(found, release.engine).engine_sha256


def gather_parts(
    parts: Sequence[DeviceQualification],
    onnx: OnnxModel,
    approval_hours: float,
    workspace: Workspace,
) -> list[Qualification]:
    """What each part found, as one run of `qualify` on that device would have.

    Raises:
        InputError: two parts were judged on different data.
    """
    first = parts[0]
    for part in parts:
        if part.data != first.data:
            raise InputError(
                f"{first.device} was judged on other data than {part.device}, so their evidence "
                "does not belong together: "
                f"{_differing_data(first.data, part.data)}. Recorded traffic must be in the "
                "workspace that all workers share; then qualify again."
            )
    store = PartStore(workspace)
    return [
        Qualification(
            policy_sha256=part.identity.policy_sha256,
            model=part.identity.model,
            model_uri=part.identity.model_uri,
            onnx=onnx,
            data=part.data,
            attempts=store.attempts(part),
            verdicts=part.evidence.verdicts,
            results=[part.results.get(v.candidate.name, {}) for v in part.evidence.verdicts],
            benchmarks=[_of(part.evidence, v.candidate) for v in part.evidence.verdicts],
            unmeasured={},
            curves={},
            approval_hours=approval_hours,
        )
        for part in parts
    ]


def _differing_data(one: DataDigests, other: DataDigests) -> str:
    mine, theirs = one.model_dump(), other.model_dump()
    differ = (name for name, digest in mine.items() if theirs[name] != digest)
    return ", ".join(
        f"{name} {(mine[name] or 'none')[:12]} and {(theirs[name] or 'none')[:12]}"
        for name in differ
    )


def _of(evidence: DeviceEvidence, candidate: Candidate) -> Benchmark | None:
    return next((b for b in evidence.benchmarks if b.candidate == candidate), None)


@task(task_run_name="scorecard-{first.model}", cache_policy=NO_CACHE)
def gather_scorecard(
    parts: Sequence[DeviceQualification],
    first: Qualification,
    repository: Path,
    workspace: Workspace,
) -> Scorecard:
    """One scorecard of the parts of all kinds of device; the same parts are the same scorecard.

    Args:
        parts: that of the target's own server first.
        first: what that one found.
        repository: the live one, which may hold a release that the winners would replace.
        workspace: keeps the scorecard that was first made of this evidence.
    """
    layout = Layout(repository, first.model)
    current = layout.current()
    release = layout.release(current.version) if current else None
    own = {name: getattr(parts[0].evidence, name) for name in DeviceEvidence.model_fields}
    card = Scorecard(
        **own,
        model=first.model,
        model_uri=first.model_uri,
        created_at=now(),
        onnx_sha256=first.onnx.file.sha256,
        policy_sha256=first.policy_sha256,
        data=first.data,
        replaces=release.version if release else None,
        replaced=_replaced(release, workspace) if release else None,
        requested_by=_requester(),
        approval_hours=first.approval_hours,
        further=tuple(part.evidence for part in parts[1:]),
    )
    return first_made(card, workspace)


@task(task_run_name="record-{card.model}", cache_policy=NO_CACHE)
@told_as("scorecard")
def file_scorecard(  # noqa: PLR0913
    card: Scorecard,
    found: Qualification,
    slo: Slo,
    approval: Approval,
    signing: Signing,
    workspace: Workspace,
    *,
    further: Sequence[Qualification] = (),
) -> Scorecard:
    """File the scorecard in MLflow, one run for each candidate; the filed one names its run.

    Args:
        card: the scorecard.
        found: what it was made of; with several kinds of device, on that of the target's server.
        slo: what was asked.
        approval: rules that the decision page shows.
        signing: how the filed scorecard is signed.
        workspace: keeps it.
        further: what was found on the other kinds of device, in the scorecard's order.
    """
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    by_device = [
        _all_artifacts(slo, view, each)
        for view, each in zip(card.by_device, (found, *further), strict=True)
    ]
    run = tracker.record(
        card,
        by_device[0],
        report=scorecard_markdown(card, sizes_of(found.attempts)),
        files=_files(slo, card),
        params=_params(slo, card),
        make_page=partial(page_of_log, rules=approval),
        further=dict(zip(card.devices[1:], by_device[1:], strict=True)),
    )
    filed = card.model_copy(update={"mlflow_run": run})
    path = workspace.save_scorecard(filed)
    unsigned = ReleaseSigning.of(signing, workspace).sign_record(filed, path)
    if unsigned:
        _log.info("the scorecard is not signed: %s", unsigned)
    _log.info("scorecard %s: %s", filed.digest[:12], path)
    return filed


def _all_artifacts(
    slo: Slo, card: Scorecard, found: Qualification
) -> dict[Candidate, CandidateArtifacts]:
    return {
        attempt.value.candidate: replace(
            _artifacts(card, attempt, results),
            plots=_plots(slo, card, attempt.value.candidate, found.curves),
        )
        for attempt, results in zip(found.attempts, found.results, strict=True)
        if not isinstance(attempt, Unbuilt)
    }


def _replaced(release: Release, workspace: Workspace) -> ReplacedRelease:
    """The live release in numbers, with its evidence where this workspace has it."""
    try:
        return replaced_release(release, workspace.scorecard(release.scorecard_sha256))
    except InputError as error:
        _log.info("of release %s only the manifest is known: %s", release.version, error)
        return replaced_release(release, None)


def first_made(card: Scorecard, workspace: Workspace) -> Scorecard:
    """The scorecard that was first made of this evidence: when, and for whom, stays as it was.

    A remembered scorecard is logged and signed, so a file with other evidence is not believed.
    """
    evidence = _evidence(card)
    path = workspace.results / "scorecards" / f"{evidence}.json"
    found = remembered(path, Scorecard, lambda: card, worth_keeping=lambda _: True)
    if _evidence(found) == evidence:
        return found
    _log.warning("%s was edited after it was written, so it was made again.", path)
    write_file(path, card.pretty_json())
    return card


def _evidence(card: Scorecard) -> Sha256:
    asked = {"created_at", "requested_by"}
    return sha256_bytes(canonical_json(card.model_dump(mode="json", exclude=asked)))


def sizes_of(attempts: Sequence[ContentFolder[Engine] | Unbuilt]) -> dict[Candidate, int]:
    """Bytes of each engine that was built."""
    engines = [attempt.value for attempt in attempts if not isinstance(attempt, Unbuilt)]
    return {engine.candidate: engine.file.size_bytes for engine in engines}


def _artifacts(
    card: Scorecard, built: ContentFolder[Engine], results: Mapping[str, str]
) -> CandidateArtifacts:
    measured, config = card.benchmark(built.value.candidate), ""
    if measured is not None:
        config = measured_config(
            card.model, built.value, built.folder, measured, model_uri=card.model_uri
        )
    return CandidateArtifacts(
        built=(built.value, built.folder),
        config_pbtxt=config,
        # Verdicts that an earlier version remembered have pages beside the results.
        expectations_json=_joined({n: t for n, t in results.items() if not n.endswith(".html")}),
    )


def _params(slo: Slo, card: Scorecard) -> dict[str, str]:
    """What the qualification was asked: the SLO, and the policy by its digest."""
    asked = slo.model_dump(exclude_none=True)
    return {f"slo.{name}": str(value) for name, value in asked.items()} | {
        "policy": card.policy_sha256[:12],
        "model_uri": card.model_uri,
    }


def _files(slo: Slo, card: Scorecard) -> dict[str, bytes]:
    """Serving as a page and its pictures for people, and as JSON for programs."""
    if not card.benchmarks:
        return {}
    report = serving_report(card, slo)
    figures = serving_figures(report, accuracies(card))
    return {
        "serving.html": serving_page(report, figures).encode(),
        "serving.json": report.pretty_json(),
        **{f"plots/{name}.svg": svg for name, svg in figures.items()},
    }


def _plots(
    slo: Slo,
    card: Scorecard,
    candidate: Candidate,
    curves: Mapping[Candidate, TradeoffCurve],
) -> dict[str, bytes]:
    plots = candidate_figures(serving_report(card, slo), candidate)
    if candidate in curves:
        plots["tradeoff"] = tradeoff_chart(curves[candidate])
    return plots


def _joined(results: Mapping[str, str]) -> str:
    """One JSON object of several texts that are JSON already."""
    parts = (f'"{scope}": {text}' for scope, text in sorted(results.items()))
    return "{" + ", ".join(parts) + "}" if results else ""


def _requester() -> str:
    """Whom Prefect knows as the run's creator (an automation, a schedule), else this user."""
    context = FlowRunContext.get()
    creator = context.flow_run.created_by if context and context.flow_run else None
    return (creator.display_value if creator else None) or user_at_host()


def _environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "processor": processor()}
    if gpus():
        found["gpu"] = gpus()
    kinds = [name for kind in engine_kinds().values() for name in kind.packages]
    for name in (*_PACKAGES, *kinds):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
