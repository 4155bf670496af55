"""TensorRT-RTX takes repaired models: strongly typed, with nodes at FP32 among reduced ones."""

import pytest

from enginegate.engines import build_engine, plan_engine

pytestmark = [pytest.mark.rtx, pytest.mark.xdist_group("precision")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("tensorrt-fp16+keep2", {"fp16": 7, "fp32": 2}, id="fp16"),
        pytest.param("tensorrt-bf16+keep2", {"bf16": 7, "fp32": 2}, id="bf16"),
        pytest.param("tensorrt-int8+keep2", {"fp32": 2, "int8": 7}, id="int8"),
        pytest.param("tensorrt-fp8+keep2", {"fp32": 2, "fp8": 7}, id="fp8"),
    ],
)
def test_kept_nodes_compile(hostile, policy, candidate, tmp_path, name, expected):
    """The plan is built, and the parser's types prove it is what its name says."""
    plan = plan_engine(
        hostile.source,
        candidate(name),
        tables=policy(calibration={"method": "max"}).engine_tables,
        calibration=hostile.calibration,
        keep=("conv3", "conv4"),
    )

    engine = build_engine(plan, tmp_path).value

    assert engine.candidate.name == name
    assert engine.kept_nodes == ("conv3", "conv4")
    assert engine.proof.weighted_layers == expected
    assert engine.proof.proven


def test_plans_differ_by_the_nodes_they_keep(hostile, policy, candidate):
    """The same candidate with other nodes kept is another engine; their order does not matter."""

    def key(*keep):
        return plan_engine(
            hostile.source,
            candidate("tensorrt-fp16+keep2"),
            tables=policy().engine_tables,
            calibration=None,
            keep=keep,
        ).key

    assert key("conv3", "conv4") == key("conv4", "conv3") != key("conv4", "conv5")
