"""AOTInductor on a GPU: compiled, captured, proven, and in agreement with the reference."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.networks import exported, planned, samples
from enginegate.candidate import PROGRAM_FILE, FileDigest, TorchProgram
from enginegate.engines import build_engine, open_engine, open_reference
from enginegate.engines.torch_inductor.process import TorchInductorTable
from enginegate.errors import EnginegateError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)


class Network(torch.nn.Module):
    """Convolutions with BatchNorm, which freezing folds, and a linear layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(64, 10),
        )

    def forward(self, image):
        return self.layers(image)


@pytest.fixture(scope="module")
def example():
    source = np.random.default_rng(0)
    return {"image": source.normal(size=(8, 3, 32, 32)).astype(np.float32)}


@pytest.fixture(scope="module")
def network(example, tmp_path_factory):
    """The network as the store has it, with its program."""
    module = Network().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of its own exporter
        onnx = exported(module, example, tmp_path_factory.mktemp("network"))
    program = torch.export.export(
        module,
        (torch.from_numpy(example["image"]),),
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )
    path = onnx.folder / PROGRAM_FILE
    torch.export.save(program, path)
    saved = TorchProgram(
        file=FileDigest.of(path),
        inputs=("image",),
        outputs=("output",),
        parity_max_abs_error=0.0,
    )
    return replace(onnx, value=onnx.value.model_copy(update={"program": saved}))


@pytest.fixture(scope="module")
def built(network, example, tmp_path_factory):
    """Builds an engine by its precision and the keys of its table."""
    store = tmp_path_factory.mktemp("engines")

    def make(precision, **keys):
        tables = {
            "shapes": Shapes(batch=DimensionRange(min=1, best=8, max=8)),
            "torch_inductor": TorchInductorTable(device="cuda", **keys),
        }
        plan = planned(
            network,
            f"torch_inductor-{precision}",
            samples(example, "noise"),
            tables=tables,
            calibration=CalibrationTable(),
        )
        return build_engine(plan, store)

    return make


@pytest.mark.parametrize(
    ("precision", "limit"), [("fp32", 1e-4), ("tf32", 1e-2), ("fp16", 1e-2), ("bf16", 5e-2)]
)
def test_every_precision_is_proven_captured_and_agrees(built, network, example, precision, limit):
    """Generated source, CUDA graph and answers; FP32 is more exact than TF32 would be."""
    engine = built(precision)

    with (
        open_engine(engine.value, engine.folder) as runner,
        open_reference(network.value, network.folder) as reference,
    ):
        expected = reference.run(example)["output"]
        for rows in (1, 3, 8):
            given = runner.run({"image": example["image"][:rows]})["output"]
            np.testing.assert_allclose(given, expected[:rows], atol=limit)
        with runner.bound(example) as repeat:
            assert repeat(20) > 0.0

    assert engine.value.proof.proven, engine.value.proof.detail
    assert engine.value.flags["cuda_graphs"] == "on", engine.value.flags
    assert engine.value.target.startswith("cuda sm")


def test_package_for_every_bucket(built, example):
    """Fixed batches, each with kernels of its own, in one archive."""
    engine = built("fp16", packages="per_bucket", batch_buckets=(1, 8))

    with open_engine(engine.value, engine.folder) as runner:
        alone = runner.run({"image": example["image"][:1]})["output"]
        together = runner.run(example)["output"]

    np.testing.assert_allclose(alone, together[:1], atol=1e-2)


def test_machine_code_of_another_gpu_is_refused(built):
    """PyTorch itself only warns."""
    engine = built("fp16")
    other = engine.value.model_copy(update={"target": "cuda sm70"})

    with (
        pytest.raises(EnginegateError, match="machine code for cuda sm70"),
        open_engine(other, engine.folder),
    ):
        pass
