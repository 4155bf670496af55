"""Candidates against FP32, on labelled data and on the shadow sample."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from enginegate import __version__
from enginegate.candidate import Engine, OnnxModel, Sha256, Unbuilt
from enginegate.canonical import Record, canonical_json, sha256_bytes
from enginegate.data import DataSet, Tensors, read_data
from enginegate.engines import open_engine, open_reference, runnable_here
from enginegate.errors import EnginegateError
from enginegate.evidence import Finding, Outcome, Verdict
from enginegate.policy import Gates, Policy
from enginegate.sources import Kept
from enginegate.workspace import Workspace, remembered
from validation.agreement import Comparison, compare
from validation.expectations import judge
from validation.shadow import judge_noise
from validation.verdict import for_errored, for_unbuilt, for_unrunnable, verdict_on

_log = logging.getLogger("enginegate.validate")


@dataclass(frozen=True, slots=True)
class Observed:
    """What FP32 answers on one set of data, and how much it differs from itself."""

    data: DataSet
    outputs: Tensors
    noise: Comparison


@dataclass(frozen=True, slots=True)
class Reference:
    """What every candidate is compared with."""

    onnx_sha256: Sha256
    evaluation: Observed
    shadow: Observed | None
    notes: tuple[Finding, ...]


class Judgement(Record):
    """A verdict with the Great Expectations results it came from, by scope."""

    verdict: Verdict
    results: dict[str, str] = Field(default_factory=dict)


@task(task_run_name="reference", cache_policy=NO_CACHE)
def observe(
    rules: Policy, source: Kept[OnnxModel], shadow: DataSet | None, notes: tuple[Finding, ...]
) -> Reference:
    """Run FP32 twice on everything: once to compare with, once to know its own noise."""
    data = read_data(rules.data.evaluation)
    data.check_fits(source.value.inputs)
    with open_reference(source.value, source.folder) as runner:
        evaluation = _observed(runner.run, data, "evaluation")
        live = _observed(runner.run, shadow, "shadow") if shadow is not None else None
    return Reference(source.value.file.sha256, evaluation, live, notes)


@task(task_run_name="validate", cache_policy=NO_CACHE)
def validate(rules: Policy, attempt: Kept[Engine] | Unbuilt, reference: Reference) -> Judgement:
    """The verdict on one candidate; the same engine, data and gates are judged once."""
    if isinstance(attempt, Unbuilt):
        return Judgement(verdict=for_unbuilt(attempt.candidate, attempt.why))
    engine = attempt.value
    obstacle = runnable_here(engine)
    if obstacle is not None:
        _log.info("%s: no device can run it here", engine.candidate)
        return Judgement(verdict=for_unrunnable(engine, obstacle))
    gates = rules.gates_for(engine.candidate.precision)
    judgement = remembered(
        Workspace.here().results / "verdicts" / f"{_key(engine, reference, gates)}.json",
        Judgement,
        lambda: _judge(attempt, reference, gates),
        worth_keeping=lambda made: made.verdict.outcome is not Outcome.ERRORED,
    )
    _log.info("%s: %s", engine.candidate, judgement.verdict.outcome.word)
    return judgement


def _judge(built: Kept[Engine], reference: Reference, gates: Gates) -> Judgement:
    observed = [reference.evaluation, *([reference.shadow] if reference.shadow else [])]
    try:
        with open_engine(built.value, built.folder) as runner:
            answers = [runner.run(dict(part.data.inputs)) for part in observed]
    except EnginegateError as error:
        return Judgement(verdict=for_errored(built.value, str(error)))
    judged = [
        judge(compare(part.outputs, answer, part.data, part.noise.scope), gates)
        for part, answer in zip(observed, answers, strict=True)
    ]
    noise = [judge_noise(part.noise, gates) for part in observed]
    return Judgement(
        verdict=verdict_on(built.value, judged, *noise, *reference.notes),
        results={part.scope: part.result_json for part in judged},
    )


def _observed(run: Callable[[Tensors], Tensors], data: DataSet, scope: str) -> Observed:
    outputs = run(dict(data.inputs))
    return Observed(data, outputs, compare(outputs, run(dict(data.inputs)), data, scope))


def _key(engine: Engine, reference: Reference, gates: Gates) -> Sha256:
    """Digest of everything a verdict depends on."""
    shadow = reference.shadow.data.sha256 if reference.shadow else None
    deciding = {
        "enginegate": __version__,
        "engine": engine.digest,
        "reference": reference.onnx_sha256,
        "evaluation": reference.evaluation.data.sha256,
        "shadow": shadow,
        "notes": [note.digest for note in reference.notes],
        "gates": gates.digest,
    }
    return sha256_bytes(canonical_json(deciding))
