"""Building a candidate: what cannot be decided here is not built."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.candidate import Candidate
from enginegate.evidence import Outcome
from enginegate.policy import parse_policy
from enginegate.workspace import Workspace
from tasks.build import build
from tasks.validate import validate

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("onnxruntime-int8", "needs calibration data, and the policy names none"),
        ("onnxruntime-fp16", "computes in fp32 or int8, not in fp16"),
    ],
)
def test_undecidable_candidate_is_neither_built_nor_failed(name, why):
    """There is not even a model to build from; the verdict is inconclusive and says why."""
    raw = tomllib.loads(DIGITS.read_text())
    del raw["data"]["calibration"]
    rules = parse_policy(raw | {"onnxruntime": {"device": "cpu"}}, "a test")

    source = SimpleNamespace(value=None)
    attempt = build.fn(Candidate.parse(name), rules.engine_tables, source, Workspace.of(rules))
    verdict = validate.fn(attempt, None, rules.gates, rules.engine_tables, None).verdict

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert why in verdict.findings[0].reason
