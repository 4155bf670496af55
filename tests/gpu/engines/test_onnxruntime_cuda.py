"""ONNX Runtime's CUDA provider: proven, warm, and in agreement with the reference."""

import warnings

import numpy as np
import pytest

from benchmarks.networks import exported, planned, samples
from enginegate.engines import build_engine, open_engine, open_reference
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.errors import BuildError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes

pytestmark = pytest.mark.gpu
onnxruntime = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    pytest.skip("onnxruntime-gpu is not installed", allow_module_level=True)

TABLES = {
    "shapes": Shapes(batch=DimensionRange(min=1, best=8, max=8)),
    "onnxruntime": OnnxRuntimeTable(device="cuda"),
}


@pytest.fixture(scope="module")
def images():
    """Images for three channels."""
    values = np.random.default_rng(0).random((24, 3, 16, 16), dtype=np.float32)
    return samples({"image": values}, "images")


@pytest.fixture(scope="module")
def cnn(tmp_path_factory, images):
    """A CNN with random weights, and MaxPool: the GPU has no kernel for its newest version."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.ReLU())
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 5 * 5, 10))
    example = {name: array[:2] for name, array in images.inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exported(network, example, tmp_path_factory.mktemp("cnn"))


@pytest.fixture(scope="module")
def build(cnn, images, tmp_path_factory):
    """Builds an engine for the GPU."""
    root = tmp_path_factory.mktemp("engines")

    def make(name):
        rules = CalibrationTable(method="max", max_samples=16)
        return build_engine(planned(cnn, name, images, tables=TABLES, calibration=rules), root)

    return make


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 5e-3), ("fp16", 5e-3)]
)
def test_runs_on_the_gpu_and_agrees(build, cnn, images, precision, tolerance):
    """What was asked for is what runs, with captured graphs; padding changes no answer."""
    built = build(f"onnxruntime-{precision}")

    with open_reference(cnn.value, cnn.folder) as reference:
        exact = reference.run(dict(images.inputs))["output"]
    with open_engine(built.value, built.folder) as runner:
        answer = runner.run(dict(images.inputs))["output"]
        odd = runner.run({"image": images.inputs["image"][:3]})["output"]

    assert built.value.proof.proven, built.value.proof.detail
    assert built.value.proof.device == runner.device == "CUDAExecutionProvider"
    assert built.value.target.startswith("cuda sm")
    assert built.value.flags["cuda_graphs"] == "on"
    assert built.value.flags["copies_in_graph"] == "0"
    scale = np.abs(exact).max()
    assert np.abs(answer - exact).max() <= tolerance * scale
    assert np.abs(odd - exact[:3]).max() <= tolerance * scale


def test_bound_runs_work_on_device_memory(build, images):
    """A batch is run from device memory, and the engine answers as before afterwards."""
    built = build("onnxruntime-fp32")
    batch = {name: array[:8] for name, array in images.inputs.items()}

    with open_engine(built.value, built.folder) as runner:
        with runner.bound(batch) as repeat:
            repeat(20)
            bound_s = min(repeat(50) for _ in range(3)) / 50
        answer = runner.run(batch)["output"]

    assert 0.0 < bound_s < 0.1
    assert np.isfinite(answer).all()


def test_fp8_is_refused(build):
    """There are no fp8 kernels for this; the error says what has them."""
    with pytest.raises(BuildError, match="TensorRT has fp8"):
        build("onnxruntime-fp8")
