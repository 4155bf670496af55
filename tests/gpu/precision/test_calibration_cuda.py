"""Calibration on the CUDA provider: the ranges of the CPU, but for rounding."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginegate.candidate import Candidate
from enginegate.engines.onnxruntime.gpu import load_cuda_libraries
from enginegate.policy import CalibrationTable
from enginegate.precision import convert
from enginegate.precision.session import calibration_provider
from tests.integration.precision.conftest import cnn, images, kept_onnx

pytestmark = pytest.mark.gpu
onnxruntime = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    pytest.skip("onnxruntime-gpu is not installed", allow_module_level=True)


def scales(content):
    """Of every pair, by name."""
    graph = onnx.load_from_string(content).graph
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.name.endswith("_scale")
    }


@pytest.mark.parametrize("method", ["max", "entropy", "percentile"])
def test_scales_are_those_of_the_cpu_but_for_rounding(tmp_path, method):
    """TF32 is off while calibrating; the engine says that the GPU did it."""
    load_cuda_libraries()
    source = kept_onnx(cnn(spike=1.0), tmp_path).folder / "model.onnx"
    made = {
        device: convert(
            source,
            Candidate.parse("onnxruntime-int8"),
            data=images(64, seed=3),
            rules=CalibrationTable(method=method, device=device),
        )
        for device in ("cpu", "cuda")
    }

    on_cpu, on_gpu = (scales(made[device].onnx) for device in ("cpu", "cuda"))
    assert calibration_provider("auto").name == "CUDAExecutionProvider"
    assert made["cuda"].converter.endswith("on CUDAExecutionProvider")
    assert on_cpu.keys() == on_gpu.keys()
    for name, expected in on_cpu.items():
        np.testing.assert_allclose(on_gpu[name], expected, rtol=2e-2)
