"""A converter that raises costs its own candidate, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from onnxruntime.quantization import shape_inference

from enginegate.candidate import Candidate, Unbuilt
from enginegate.data import write_data
from enginegate.engines.onnxruntime.session import SessionRunner
from enginegate.evidence import Outcome
from enginegate.policy import parse_policy
from enginegate.workspace import Workspace
from tasks.build import build
from tasks.validate import EvaluationSamples, observe, validate
from tests.integration.engines.conftest import POLICY
from validation.outputs import CLASSIFY

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture
def rules(samples, tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "home"))
    labelled = replace(samples, labels=np.arange(len(samples)) % 10)
    write_data(labelled, tmp_path / "eval.npz")
    data = dict.fromkeys(("evaluation", "calibration"), str(tmp_path / "eval.npz"))
    return parse_policy({**POLICY, "data": data}, "test policy")


def test_build_tool_exception_is_an_errored_candidate(rules, cnn, monkeypatch):
    """Its words are in the verdict; nothing is left in the store; the next candidate is built."""

    def broken(*_arguments, **_options):
        raise Exception("\x1b[31mIncomplete symbolic\nshape inference\x1b[0m")  # noqa: TRY002

    with monkeypatch.context() as patched:
        patched.setattr(shape_inference, "quant_pre_process", broken)
        attempt = build.fn(
            Candidate.parse("onnxruntime-int8"), rules.engine_tables, cnn, Workspace.of(rules)
        )
    other = build.fn(
        Candidate.parse("onnxruntime-fp32"), rules.engine_tables, cnn, Workspace.of(rules)
    )

    assert isinstance(attempt, Unbuilt)
    verdict = validate.fn(
        attempt, None, rules.gates, rules.engine_tables, Workspace.of(rules)
    ).verdict
    assert verdict.outcome is Outcome.ERRORED
    assert (
        "to QInt8: Exception: Incomplete symbolic shape inference\n" in verdict.findings[0].reason
    )
    assert [f.name for f in other.folder.parent.iterdir() if f.is_dir()] == [other.folder.name]


def test_no_memory_is_not_the_candidates_fault(rules, cnn, monkeypatch):
    """It ends the run: every other candidate would meet it too."""

    def full(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr(shape_inference, "quant_pre_process", full)

    with pytest.raises(MemoryError):
        build.fn(Candidate.parse("onnxruntime-int8"), rules.engine_tables, cnn, Workspace.of(rules))


def test_runtime_exception_is_an_errored_verdict(rules, cnn, monkeypatch):
    """An engine that loads and then breaks is errored, with the runtime's words."""
    built = build.fn(
        Candidate.parse("onnxruntime-fp32"), rules.engine_tables, cnn, Workspace.of(rules)
    )
    reference = observe.fn(
        cnn,
        EvaluationSamples(rules.data.evaluation),
        (CLASSIFY,),
        rules.evaluation,
        Workspace.of(rules),
    )

    def broken(_runner, _inputs):
        raise Exception("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Gather out of bounds")  # noqa: TRY002

    monkeypatch.setattr(SessionRunner, "run", broken)
    verdict = validate.fn(
        built, reference, rules.gates, rules.engine_tables, Workspace.of(rules)
    ).verdict

    assert verdict.outcome is Outcome.ERRORED
    assert "Exception: Gather out of bounds" in verdict.findings[0].reason
