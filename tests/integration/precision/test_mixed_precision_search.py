"""A CNN that INT8 breaks is repaired by keeping the few layers that break it."""

import numpy as np
import pytest

from enginegate.candidate import Candidate
from enginegate.data import write_data
from enginegate.engines import build_engine, open_engine, open_reference, plan_engine
from enginegate.evidence import Finding, Outcome, Verdict
from enginegate.policy import CalibrationTable
from enginegate.precision import judge_range, open_emulated, sensitivities
from enginegate.workspace import Workspace
from tasks.repair import repair
from tests.integration.precision.conftest import LAYERS

pytestmark = pytest.mark.xdist_group("precision")

LIMIT = 0.05


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A workspace of its own."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def workbench(hostile, policy, store):
    """Rules, the failing candidate, and a judge that says how far its answers are from FP32's."""
    write_data(hostile.calibration, store / "calibration.npz")
    data = {"evaluation": "eval.npz", "calibration": str(store / "calibration.npz")}

    with open_reference(hostile.source.value, hostile.source.folder) as runner:
        exact = runner.run(dict(hostile.evaluation.inputs))["logits"]
    judged = []

    def judge(built):
        with open_engine(built.value, built.folder) as runner:
            answers = runner.run(dict(hostile.evaluation.inputs))["logits"]
        error = float(np.sqrt(np.square(answers - exact).mean()) / exact.std())
        judged.append(built.value.candidate.name)
        finding = Finding(
            gate="relative_error",
            scope="evaluation",
            outcome=Outcome.PASSED if error <= LIMIT else Outcome.FAILED,
            reason=f"error {error:.3g}, limit {LIMIT}",
            value=error,
            limit=LIMIT,
            relation="<=",
        )
        return Verdict(
            candidate=built.value.candidate,
            engine_sha256=built.value.file.sha256,
            findings=(finding,),
        )

    def start(name="onnxruntime-int8", **limits):
        rules = policy(data=data, calibration={"method": "max"}, repair=limits)
        plan = plan_engine(
            hostile.source,
            Candidate.parse(name),
            tables=rules.engine_tables,
            calibration=hostile.calibration,
        )
        built = build_engine(plan, store / "store" / "engines")
        verdict = judge(built)
        judged.clear()
        return built, verdict, judge, rules.engine_tables, hostile.source, Workspace.of(rules)

    start.judged = judged
    return start


def test_from_failed_to_passed_with_most_layers_int8(workbench):
    """The two layers on either side of the outliers stay FP32; seven of nine stay INT8."""
    broken, verdict, judge, *rest = workbench()

    found = repair.fn(broken, verdict, judge, *rest)

    assert verdict.outcome is Outcome.FAILED
    engine = found.attempt.value
    assert engine.candidate.name == "onnxruntime-int8+keep2"
    assert set(engine.kept_nodes) == {"conv3", "conv4"}
    assert engine.proof.weighted_layers == {"fp32": 2, "int8": LAYERS + 1 - 2}
    assert engine.proof.proven
    assert judge(found.attempt).outcome is Outcome.PASSED


def test_the_curve_records_every_build(workbench):
    """Errors fall from the failed candidate to the repaired one, each with size and latency."""
    given = workbench()

    found = repair.fn(*given)
    trials = found.curve.trials

    assert trials[0].kept == ()
    assert trials[0].divergence > 10 * LIMIT
    assert found.curve.repaired.divergence <= LIMIT
    assert all(trial.size_bytes > 0 and trial.latency_ms > 0 for trial in trials)
    assert {each.node for each in found.curve.ranked[:2]} == {"conv3", "conv4"}
    assert len(trials) <= 1 + given[3].repair.max_builds


def test_second_search_reuses_builds_and_verdicts(workbench):
    """The curve is remembered, and the engine comes from the store."""
    given = workbench()
    first = repair.fn(*given)
    workbench.judged.clear()

    again = repair.fn(*given)

    assert again.curve == first.curve
    assert again.attempt.reused
    assert workbench.judged == []


def test_exhausted_budget_is_reported(workbench):
    """One build is not enough for two layers: no candidate, and the curve says why."""
    found = repair.fn(*workbench(max_builds=1))

    assert found.attempt is None
    assert "1 builds, the policy's limit" in found.curve.reason
    assert len(found.curve.trials) == 2


def test_ranking_stops_when_its_time_is_over(hostile):
    """What was measured by then is ranked; at least one node is."""
    order = {"data": hostile.calibration, "rules": CalibrationTable(method="max"), "samples": 8}
    name = Candidate.parse("onnxruntime-int8")

    everything = sensitivities(hostile.path, name, **order)
    hurried = sensitivities(hostile.path, name, **order, budget_s=0.0)

    assert len(everything) == LAYERS + 1
    assert len(hurried) == 1
    assert hurried[0] in everything


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        pytest.param("onnxruntime-fp32", {}, id="passed"),
        pytest.param("onnxruntime-int8", {"max_builds": 0}, id="switched-off"),
    ],
)
def test_passed_candidate_is_not_searched(workbench, name, limits):
    """A candidate that passed, and any when repair is off, are left alone."""
    assert repair.fn(*workbench(name, **limits)) is None


def test_precision_failure_is_not_searched(workbench):
    """An engine that is not what its name says is not repaired."""
    broken, verdict, judge, *rest = workbench()
    proof = Finding(
        gate="precision_proof", scope="engine", outcome=Outcome.FAILED, reason="fp32 inside"
    )
    refuted = verdict.model_copy(update={"findings": (*verdict.findings, proof)})

    assert repair.fn(broken, refuted, judge, *rest) is None


@pytest.mark.rtx
def test_overflow_is_repaired_without_a_gpu(squaring, large, policy, store):
    """An FP16 plan that no device here can run: emulation fails it, and passes it with 3 nodes."""
    write_data(large, store / "calibration.npz")
    rules = policy(
        data={"evaluation": "eval.npz", "calibration": str(store / "calibration.npz")},
        repair={"max_kept_share": 0.8},
    )

    def judge(built):
        engine = built.value
        with open_emulated(
            squaring.folder / "model.onnx",
            engine.candidate,
            data=None,
            rules=rules.calibration,
            keep=engine.kept_nodes,
            converted_sha256=engine.converted_sha256,
        ) as runner:
            runner.run(dict(large.inputs))
            ranged = judge_range(runner.report(), "evaluation")
        unseen = Finding(
            gate="device", scope="engine", outcome=Outcome.INCONCLUSIVE, reason="no GPU here"
        )
        sha256 = engine.file.sha256
        return Verdict(candidate=engine.candidate, engine_sha256=sha256, findings=(ranged, unseen))

    name = Candidate.parse("tensorrt-fp16")
    plan = plan_engine(squaring, name, tables=rules.engine_tables, calibration=large)
    broken = build_engine(plan, store / "store" / "engines")

    found = repair.fn(
        broken, judge(broken), judge, rules.engine_tables, squaring, Workspace.of(rules)
    )

    assert judge(broken).outcome is Outcome.FAILED
    assert found.attempt.value.candidate.name == "tensorrt-fp16+keep3"
    assert set(found.attempt.value.kept_nodes) == {"square", "mean", "root"}
    assert found.curve.repaired.outcome is Outcome.INCONCLUSIVE
    assert found.curve.repaired.latency_ms is None
