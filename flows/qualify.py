"""Registered model -> ONNX -> engines -> verdicts -> benchmarks -> scorecard. Needs no person."""

from pathlib import Path
from typing import Any

from prefect import flow, unmapped
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from enginegate.evidence import Scorecard
from enginegate.policy import Policy, read_policy
from tasks.benchmark import benchmark, losers
from tasks.build import build
from tasks.check import check
from tasks.export import export, resolve
from tasks.record import make_scorecard, record
from tasks.recover import recover_interrupted
from tasks.repair import repair
from tasks.shadow import record_shadow
from tasks.validate import observe, validate

_BUILDERS: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=2)


@flow(
    name="qualify",
    task_runner=_BUILDERS,
    persist_result=False,
    validate_parameters=False,
)
def qualify(policy: Path, model_uri: str | None = None) -> Scorecard:
    """Collect all the evidence on every candidate of one model version.

    Everything is remembered by content: a second run with the same model, data, policy and versions
    builds and measures nothing, and a killed run continues where it was. What a killed promotion
    left in the live repository is finished or undone first.

    Args:
        policy: the model family's policy file.
        model_uri: another registry version than the policy's ``model.uri``.
    """
    wanted = _rules(Path(policy), model_uri)
    recover_interrupted(wanted)
    check(wanted, Path(policy))
    rules = resolve(wanted)
    source = export(rules)
    engines = build.map(rules.candidates.all(), unmapped(rules), unmapped(source)).result()
    shadow = record_shadow(rules, source)
    reference = observe(rules, source, shadow.data, shadow.notes)
    judged = [validate(rules, engine, reference) for engine in engines]
    repairs = [
        repair(
            rules, source, engine, found.verdict, lambda e: validate(rules, e, reference).verdict
        )
        for engine, found in zip(engines, judged, strict=True)
    ]
    repaired = [found.attempt for found in repairs if found and found.attempt]
    curves = {c: found.curve for found in repairs if found for c in found.candidates}
    engines = [*engines, *repaired]
    judged += [validate(rules, engine, reference) for engine in repaired]
    verdicts = [found.verdict for found in judged]
    skipped = losers(rules, verdicts)
    measured = [
        None if verdict.candidate in skipped else benchmark(rules, engine)
        for engine, verdict in zip(engines, verdicts, strict=True)
    ]
    card = make_scorecard(rules, source, shadow.data, verdicts, measured, skipped)
    return record(rules, card, engines, [j.results for j in judged], curves)


def _rules(policy: Path, model_uri: str | None) -> Policy:
    rules = read_policy(policy)
    return rules.with_model(model_uri) if model_uri else rules
