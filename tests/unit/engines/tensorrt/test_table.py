"""Which flags, kernels and level a library is given for a candidate."""

import pytest

from enginegate.candidate import Precision
from enginegate.engines.tensorrt.library import TensorRtLibrary
from enginegate.engines.tensorrt.table import BUILT_IN_TACTICS, TensorRtTable, builder_settings

EMPTY = {"cudnn": "empty", "cublas": "empty", "cublaslt": "empty"}
V8 = TensorRtLibrary("python", "tensorrt", "tensorrt", "8.6.0", dict.fromkeys(EMPTY, "here"))
V10 = TensorRtLibrary("python", "tensorrt", "tensorrt", "10.13.3.9")
RTX = TensorRtLibrary("python", "tensorrt_rtx", "tensorrt_rtx", "1.7.1.116")


@pytest.mark.parametrize(
    ("precision", "on", "off"),
    [
        pytest.param(Precision.FP32, (), ("TF32",), id="fp32"),
        pytest.param(Precision.TF32, ("TF32",), (), id="tf32"),
        pytest.param(Precision.FP16, ("FP16",), ("TF32",), id="fp16"),
        pytest.param(Precision.INT8, ("INT8", "FP16"), ("TF32",), id="int8"),
    ],
)
def test_flags_allow_a_precision_in_a_weakly_typed_network(precision, on, off):
    """TensorRT 8 is told what it may use; TF32, on by default, is switched off by name."""
    found = builder_settings(V8, precision, TensorRtTable())

    assert not found.strong
    assert (found.set_flags, found.clear_flags) == (on, off)
    assert found.tactic_sources is None


@pytest.mark.parametrize("library", [V10, RTX], ids=str)
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT8])
def test_types_decide_in_a_strongly_typed_network(library, precision):
    """From TensorRT 10 on no flag changes what a layer computes in, except TF32."""
    found = builder_settings(library, precision, TensorRtTable())

    assert found.strong
    assert (found.set_flags, found.clear_flags) == ((), ("TF32",))


def test_kernels_of_missing_libraries_are_not_looked_for():
    """Where cuDNN and cuBLAS are placeholders, calling them would crash the builder."""
    library = TensorRtLibrary("python", "tensorrt", "tensorrt", "8.6.0", EMPTY)

    assert library.lacks_kernels
    assert builder_settings(library, Precision.FP16, TensorRtTable()).tactic_sources == (
        BUILT_IN_TACTICS
    )


def test_the_policy_may_name_kernels_and_level():
    """What the policy says goes before what was found."""
    table = TensorRtTable(tactic_sources=("CUDNN",), builder_optimization_level=2)
    found = builder_settings(V8, Precision.FP16, table)

    assert found.tactic_sources == ("CUDNN",)
    assert found.optimization_level == 2


@pytest.mark.parametrize(("level", "lowered"), [(None, 1), (5, 1), (2, 1), (1, None), (0, None)])
def test_second_attempt_is_quicker_or_there_is_none(level, lowered):
    """A second attempt makes sense only at a level below the first."""
    table = TensorRtTable(builder_optimization_level=level)

    assert builder_settings(V8, Precision.INT8, table).lowered == lowered
