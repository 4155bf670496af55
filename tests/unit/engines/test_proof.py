"""An engine is proven to compute in what its name says, or it is not."""

import pytest

from enginegate.candidate import Candidate
from enginegate.engines.proof import prove
from enginegate.precision import Census


@pytest.mark.parametrize(
    ("name", "census", "proven"),
    [
        pytest.param("tensorrt-fp32", Census({"fp32": 4}, 0), True, id="fp32"),
        pytest.param("tensorrt-fp32", Census({"fp16": 1, "fp32": 3}, 0), False, id="fp32-mixed"),
        pytest.param("tensorrt-tf32", Census({"fp32": 4}, 0), True, id="tf32"),
        pytest.param("tensorrt-fp16", Census({"fp16": 3, "fp32": 1}, 0), True, id="fp16"),
        pytest.param("tensorrt-fp16", Census({"fp32": 4}, 0), False, id="fp16-is-fp32"),
        pytest.param("tensorrt-bf16", Census({"fp16": 4}, 0), False, id="bf16-is-fp16"),
        pytest.param("onnxruntime-int8", Census({"fp32": 1, "int8": 3}, 3), True, id="int8"),
        pytest.param("onnxruntime-int8", Census({"fp32": 4}, 0), False, id="int8-is-fp32"),
        pytest.param("tensorrt-fp8", Census({"int8": 4}, 4), False, id="fp8-is-int8"),
        pytest.param("tensorrt-fp16", Census({}, 0), False, id="no-layers"),
    ],
)
def test_counts_decide(name, census, proven):
    """The layers that are there decide, not the name that was asked for."""
    proof = prove(Candidate.parse(name), census, device="cpu")

    assert proof.proven is proven
    assert proven or proof.detail.rstrip(".").split(". ")[-1]


def test_tf32_is_named_in_the_counts():
    """FP32 layers that may use TF32 are counted as such."""
    proof = prove(Candidate.parse("tensorrt-tf32"), Census({"fp32": 4}, 0), device="none here")

    assert proof.weighted_layers == {"tf32": 4}


def test_doubt_refutes():
    """A provider that fell back refutes any counts, and the detail says so."""
    doubt = "Asked for CUDAExecutionProvider, got CPUExecutionProvider."

    proof = prove(
        Candidate.parse("onnxruntime-fp32"), Census({"fp32": 4}, 0), device="cpu", doubts=(doubt,)
    )

    assert not proof.proven
    assert doubt in proof.detail


@pytest.mark.parametrize(
    ("name", "census", "executed", "proven"),
    [
        pytest.param("onnxruntime-int8", Census({"int8": 4}, 4), {"int8": 4}, True, id="int8"),
        pytest.param("onnxruntime-int8", Census({"int8": 4}, 4), {"fp32": 4}, False, id="back"),
        pytest.param("onnxruntime-fp16", Census({"fp16": 4}, 0), {"fp32": 4}, False, id="cast"),
        pytest.param("onnxruntime-tf32", Census({"fp32": 4}, 0), {"fp32": 4}, True, id="tf32"),
        pytest.param("onnxruntime-int8", Census({"int8": 4}, 4), None, True, id="not-shown"),
    ],
)
def test_what_runs_decides(name, census, executed, proven):
    """A graph with the right types that the runtime converts back is not what its name says."""
    proof = prove(Candidate.parse(name), census, device="any", executed=executed)

    assert proof.proven is proven
    assert proven or "values are converted back" in proof.detail
