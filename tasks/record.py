"""All the evidence as one scorecard: in the workspace, and in MLflow."""

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from enginegate.atomic_io import write_file
from enginegate.benchmark.config_comments import measured_config
from enginegate.candidate import Candidate, Engine, OnnxModel, Sha256, Unbuilt
from enginegate.data import DataSet, read_data
from enginegate.evidence import Benchmark, DataDigests, Scorecard, Verdict
from enginegate.machine import gpus, processor, user_at_host
from enginegate.policy import Policy
from enginegate.precision import TradeoffCurve, curve_plot
from enginegate.records import canonical_json, sha256_bytes
from enginegate.report import accuracies, scorecard_markdown, serving_page, serving_report
from enginegate.repository import Layout, ReleaseSigning
from enginegate.sources import ContentFolder
from enginegate.tracking import CandidateArtifacts, Ledger, plots_available
from enginegate.workspace import Workspace, now, remembered
from validation.decide import choose
from validation.speed import with_speed

_log = logging.getLogger("enginegate.record")
_PACKAGES = ("enginegate", "numpy", "onnx", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13", "torch")


@task(task_run_name="scorecard", cache_policy=NO_CACHE)
def make_scorecard(
    rules: Policy,
    source: ContentFolder[OnnxModel],
    shadow: DataSet | None,
    verdicts: Sequence[Verdict],
    benchmarks: Sequence[Benchmark | None],
    unmeasured: Mapping[Candidate, str],
) -> Scorecard:
    """Put the evidence together and name the winner; the same evidence is the same scorecard."""
    layout = Layout(rules.target.repository, rules.name)
    current = layout.current()
    live = layout.release(current.version).engine_sha256 if current else None
    judged = with_speed(benchmarks, rules.slo, rules.search, live=live)
    measured = tuple(found for found in judged if found is not None)
    choice = choose(verdicts, measured, rules.search)
    card = Scorecard(
        model=rules.name,
        model_uri=rules.model.uri,
        created_at=now(),
        onnx_sha256=source.value.file.sha256,
        policy_sha256=rules.digest,
        data=_data_digests(rules, shadow),
        environment=_environment(),
        verdicts=tuple(verdicts),
        benchmarks=measured,
        replaces=current.version if current else None,
        winner=choice.winner,
        reason=choice.reason,
        tied=choice.tied,
        requested_by=_requester(),
        unmeasured={candidate.name: why for candidate, why in unmeasured.items()},
    )
    return first_made(card, Workspace.of(rules))


@task(task_run_name="record", cache_policy=NO_CACHE)
def record(
    rules: Policy,
    card: Scorecard,
    attempts: Sequence[ContentFolder[Engine] | Unbuilt],
    results: Sequence[dict[str, str]],
    curves: Mapping[Candidate, TradeoffCurve],
) -> Scorecard:
    """File the scorecard in MLflow, one run for each candidate; the filed one names its run."""
    workspace = Workspace.of(rules)
    ledger = Ledger(workspace.tracking_uri, workspace.artifacts)
    exhibits = {
        attempt.value.candidate: replace(
            _exhibit(rules, card, attempt, found), plots=_plots(attempt.value.candidate, curves)
        )
        for attempt, found in zip(attempts, results, strict=True)
        if not isinstance(attempt, Unbuilt)
    }
    run = ledger.record(
        card,
        exhibits,
        slo_p99_ms=rules.slo.p99_ms,
        report=scorecard_markdown(card, sizes_of(attempts)),
        pages=_pages(rules, card),
    )
    filed = card.model_copy(update={"ledger_run": run})
    path = workspace.save_scorecard(filed)
    unsigned = ReleaseSigning.of(rules.signing, workspace).sign_record(filed, path)
    if unsigned:
        _log.info("the scorecard is not signed: %s", unsigned)
    _log.info("scorecard %s: %s", filed.digest[:12], path)
    return filed


def first_made(card: Scorecard, workspace: Workspace) -> Scorecard:
    """The scorecard that was first made of this evidence: when, and for whom, stays as it was.

    What is remembered is filed and signed, so a file that holds other evidence is not believed.
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


def _exhibit(
    rules: Policy, card: Scorecard, built: ContentFolder[Engine], results: dict[str, str]
) -> CandidateArtifacts:
    measured, config = card.benchmark(built.value.candidate), ""
    if measured is not None:
        config = measured_config(
            rules.name, built.value, built.folder, measured, model_uri=card.model_uri
        )
    return CandidateArtifacts(
        built=(built.value, built.folder),
        config_pbtxt=config,
        expectations_json=_joined({n: t for n, t in results.items() if not n.endswith(".html")}),
        pages={name: text for name, text in results.items() if name.endswith(".html")},
    )


def _pages(rules: Policy, card: Scorecard) -> dict[str, bytes]:
    """Serving as a page for people and as JSON for programs."""
    if not card.benchmarks:
        return {}
    report = serving_report(card, rules.slo)
    return {
        "serving.html": serving_page(report, accuracies(card)).encode(),
        "serving.json": report.pretty_json(),
    }


def _plots(candidate: Candidate, curves: Mapping[Candidate, TradeoffCurve]) -> dict[str, bytes]:
    if candidate not in curves or not plots_available():
        return {}
    return {"repair.png": curve_plot(curves[candidate])}


def _joined(results: dict[str, str]) -> str:
    """One JSON object of several texts that are JSON already."""
    parts = (f'"{scope}": {text}' for scope, text in sorted(results.items()))
    return "{" + ", ".join(parts) + "}" if results else ""


def _requester() -> str:
    """Whom Prefect knows as the run's creator (an automation, a schedule), else this user."""
    context = FlowRunContext.get()
    creator = context.flow_run.created_by if context and context.flow_run else None
    return (creator.display_value if creator else None) or user_at_host()


def _data_digests(rules: Policy, shadow: DataSet | None) -> DataDigests:
    def digest(path: Path | None) -> str | None:
        return read_data(path).sha256 if path is not None else None

    return DataDigests(
        evaluation=read_data(rules.data.evaluation).sha256,
        calibration=digest(rules.data.calibration),
        shadow=shadow.sha256 if shadow is not None else None,
    )


def _environment() -> dict[str, str]:
    found = {"python": platform.python_version(), "processor": processor()}
    if gpus():
        found["gpu"] = gpus()
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
