"""Registered model -> ONNX -> engines -> verdicts -> benchmarks -> scorecard. Needs no person."""

from pathlib import Path

from prefect import flow

from enginegate.evidence import Scorecard
from enginegate.policy import Policy, read_policy
from tasks.benchmark import benchmark
from tasks.build import build
from tasks.export import export
from tasks.record import make_scorecard, record
from tasks.validate import observe, record_shadow, validate


@flow(name="qualify", persist_result=False)
def qualify(policy: Path, model_uri: str | None = None) -> Scorecard:
    """Collect all the evidence on every candidate of one model version.

    Everything is remembered by content: a second run with the same model, data, policy and versions
    builds and measures nothing, and a killed run continues where it was.

    Args:
        policy: the model family's policy file.
        model_uri: another registry version than the policy's ``model.uri``.
    """
    rules = _rules(policy, model_uri)
    source = export(rules)
    shadow = record_shadow(rules, source)
    engines = build.map(rules.candidates.all(), policy=_once(rules), source=_once(source)).result()
    reference = observe(rules, source, shadow)
    judged = [validate(rules, engine, reference) for engine in engines]
    measured = [benchmark(rules, engine, found) for engine, found in zip(engines, judged)]
    scorecard = make_scorecard(rules, source, judged, measured)
    record(rules, scorecard, engines, judged)
    return scorecard


def _rules(policy: Path, model_uri: str | None) -> Policy:
    rules = read_policy(policy)
    return rules.with_model(model_uri) if model_uri else rules
