"""Engines alone on a GPU: device-resident, with graphs and memory; PyTorch beside them."""

import warnings

import numpy as np
import pytest

from benchmarks.networks import exported, planned, samples
from enginegate.benchmark.engine_alone import EngineMeter
from enginegate.candidate import PROGRAM_FILE, FileDigest, Precision, TorchProgram
from enginegate.engines import build_engine, cuda
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.engines.python_backend.device import GpuDevice
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes

pytestmark = pytest.mark.gpu
onnxruntime = pytest.importorskip("onnxruntime")
if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
    pytest.skip("onnxruntime-gpu is not installed", allow_module_level=True)

LARGEST = 32
TABLES = {
    "shapes": Shapes(batch=DimensionRange(min=1, best=8, max=LARGEST)),
    "onnxruntime": OnnxRuntimeTable(device="cuda"),
}


@pytest.fixture(scope="module")
def images():
    """Images for three channels; fewer than the largest batch, so that they come again."""
    values = np.random.default_rng(0).random((24, 3, 64, 64), dtype=np.float32)
    return samples({"image": values}, "images")


@pytest.fixture(scope="module")
def network():
    """A CNN with random weights, large enough to keep a GPU busy."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 128, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(128, 128, 3, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def cnn(network, tmp_path_factory, images):
    """The network as ONNX."""
    example = {name: array[:2] for name, array in images.inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exported(network, example, tmp_path_factory.mktemp("cnn"))


@pytest.fixture
def meter(images, tmp_path):
    return EngineMeter(images, images.sha256, (LARGEST,), 5.0, "this machine", tmp_path)


def test_engine_on_a_gpu_is_measured_on_device_memory(cnn, images, meter, tmp_path_factory):
    """With its graphs, each batch size in several windows that differ little; memory is known."""
    rules = CalibrationTable(method="max", max_samples=16)
    plan = planned(cnn, "onnxruntime-fp16", images, tables=TABLES, calibration=rules)
    built = build_engine(plan, tmp_path_factory.mktemp("engines"))

    found = meter.measure(built.value, built.folder)

    assert (found.device, found.inputs_on, found.graphs) == (
        "CUDAExecutionProvider",
        "device",
        True,
    )
    assert [batch.batch_size for batch in found.batches] == [1, 8, LARGEST], found.unmeasured
    assert found.best.batch_size > 1
    assert found.opened_mib > 0
    assert found.largest_batch_mib >= 0


def test_pytorch_is_measured_on_that_gpu(cnn, network, meter):
    """FP32 and the candidates' own precisions; more of a batch is more samples a second."""
    import torch

    path = cnn.folder / PROGRAM_FILE
    axes = ({0: torch.export.Dim("batch", min=1, max=4096)},)
    example = (torch.zeros(2, 3, 64, 64),)
    torch.export.save(torch.export.export(network, example, dynamic_shapes=axes), path)
    program = TorchProgram(
        file=FileDigest.of(path), inputs=("image",), outputs=("output",), parity_max_abs_error=0.0
    )
    onnx = cnn.value.model_copy(update={"program": program})
    wanted = (Precision.FP32, Precision.FP16, Precision.INT8)

    found = {each.precision: each for each in meter.measure_eager(onnx, cnn.folder, 32, wanted)}

    assert set(found) == {Precision.FP32, Precision.FP16}
    for speed in found.values():
        assert (speed.inputs_on, speed.device) == ("device", str(cuda.gpu()))
        assert speed.batches[-1].samples_per_s > speed.batches[0].samples_per_s


def test_memory_in_use_rises_with_what_is_allocated():
    """In MiB, of the first GPU."""
    device = GpuDevice()
    with cuda.used_memory() as read:
        before = read()
        address = device.allocate(256 << 20)
        after = read()
        device.free(address)

    assert 200 < after - before < 400
