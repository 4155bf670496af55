"""An engine is proven to compute in what its name says, or it is not."""

from dataclasses import replace

import pytest

from enginegate.candidate import Candidate
from enginegate.engines.precision_check import check_precision_proof
from enginegate.precision import GraphStats


@pytest.mark.parametrize(
    ("name", "census", "proven"),
    [
        pytest.param("tensorrt-fp32", GraphStats({"fp32": 4}, 0), True, id="fp32"),
        pytest.param(
            "tensorrt-fp32", GraphStats({"fp16": 1, "fp32": 3}, 0), False, id="fp32-mixed"
        ),
        pytest.param("tensorrt-tf32", GraphStats({"fp32": 4}, 0), True, id="tf32"),
        pytest.param("tensorrt-fp16", GraphStats({"fp16": 3, "fp32": 1}, 0), True, id="fp16"),
        pytest.param("tensorrt-fp16", GraphStats({"fp32": 4}, 0), False, id="fp16-is-fp32"),
        pytest.param("tensorrt-bf16", GraphStats({"fp16": 4}, 0), False, id="bf16-is-fp16"),
        pytest.param("onnxruntime-int8", GraphStats({"fp32": 1, "int8": 3}, 3), True, id="int8"),
        pytest.param("onnxruntime-int8", GraphStats({"fp32": 4}, 0), False, id="int8-is-fp32"),
        pytest.param("tensorrt-fp8", GraphStats({"int8": 4}, 4), False, id="fp8-is-int8"),
        pytest.param("tensorrt-fp16", GraphStats({}, 0), False, id="no-layers"),
    ],
)
def test_counts_decide(name, census, proven):
    """The layers that are there decide, not the name that was asked for."""
    proof = check_precision_proof(Candidate.parse(name), census, device="cpu")

    assert proof.proven is proven
    assert proven or proof.detail.rstrip(".").split(". ")[-1]


def test_tf32_is_named_in_the_counts():
    """FP32 layers that may use TF32 are counted as such."""
    proof = check_precision_proof(
        Candidate.parse("tensorrt-tf32"), GraphStats({"fp32": 4}, 0), device="none here"
    )

    assert proof.weighted_layers == {"tf32": 4}


def test_doubt_refutes():
    """A provider that fell back refutes any counts, and the detail says so."""
    doubt = "Asked for CUDAExecutionProvider, got CPUExecutionProvider."

    proof = check_precision_proof(
        Candidate.parse("onnxruntime-fp32"),
        GraphStats({"fp32": 4}, 0),
        device="cpu",
        doubts=(doubt,),
    )

    assert not proof.proven
    assert doubt in proof.detail


@pytest.mark.parametrize(
    ("name", "census", "executed", "proven"),
    [
        pytest.param("onnxruntime-int8", GraphStats({"int8": 4}, 4), {"int8": 4}, True, id="int8"),
        pytest.param("onnxruntime-int8", GraphStats({"int8": 4}, 4), {"fp32": 4}, False, id="back"),
        pytest.param("onnxruntime-fp16", GraphStats({"fp16": 4}, 0), {"fp32": 4}, False, id="cast"),
        pytest.param("onnxruntime-tf32", GraphStats({"fp32": 4}, 0), {"fp32": 4}, True, id="tf32"),
        pytest.param("onnxruntime-int8", GraphStats({"int8": 4}, 4), None, True, id="not-shown"),
    ],
)
def test_executed_graph_decides_the_precision(name, census, executed, proven):
    """A graph with the right types that the runtime converts back is not what its name says."""
    proof = check_precision_proof(Candidate.parse(name), census, device="any", executed=executed)

    assert proof.proven is proven
    assert proven or "values are converted back" in proof.detail


HEAD_ONLY = GraphStats({"fp32": 1, "int8": 1}, 1, {"fp32": 1})


@pytest.mark.parametrize(
    ("by_type", "share"),
    [
        pytest.param(
            {
                "layer_flops": {"fp32": 27648, "int8": 128},
                "unsized": 0,
                "layer_weights": {"fp32": 1152, "int8": 64},
            },
            "int8: 0.5% of the operations, 5.3% of the layers' weights, 50.0% of the layers",
            id="operations",
        ),
        pytest.param(
            {
                "layer_flops": {"int8": 128},
                "unsized": 1,
                "layer_weights": {"fp32": 1152, "int8": 64},
            },
            "int8: 5.3% of the layers' weights, 50.0% of the layers",
            id="weights",
        ),
    ],
)
def test_minority_precision_is_not_the_engines_precision(by_type, share):
    """A GRU at FP32 with an INT8 head is no INT8 engine; how much is INT8 is said."""
    proof = check_precision_proof(
        Candidate.parse("onnxruntime-int8"), replace(HEAD_ONLY, **by_type), device="cpu"
    )

    assert not proof.proven
    assert share in proof.detail
    assert "1 fp32 of them recurrent" in proof.detail
    assert "Less than half of it computes in int8" in proof.detail


def test_majority_precision_is_proven_with_its_share():
    """One small layer at FP32 refutes nothing."""
    by_type = {
        "layer_flops": {"fp32": 100, "int8": 900},
        "unsized": 0,
        "layer_weights": {"fp32": 10, "int8": 90},
    }

    proof = check_precision_proof(
        Candidate.parse("onnxruntime-int8"),
        GraphStats({"fp32": 3, "int8": 1}, 1, **by_type),
        device="cpu",
    )

    assert proof.proven
    assert "int8: 90.0% of the operations" in proof.detail


def test_mixed_precision_candidate_may_keep_most_operations():
    """Its name says that nodes are kept, and the policy how many may be."""
    by_type = {
        "layer_flops": {"fp32": 900, "int8": 100},
        "unsized": 0,
        "layer_weights": {"fp32": 90, "int8": 10},
    }
    candidate = Candidate.parse("onnxruntime-int8").model_copy(update={"variant": "+keep1"})

    proof = check_precision_proof(
        candidate, GraphStats({"fp32": 1, "int8": 3}, 3, **by_type), device="cpu"
    )

    assert proof.proven
    assert "int8: 10.0% of the operations" in proof.detail
