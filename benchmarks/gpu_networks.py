"""The networks of the GPU benchmarks, exported as the pipeline does it, for every engine kind."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from networks import Encoder, planned, samples
from torch import nn

from enginegate.candidate import Engine, OnnxModel
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet, Tensors
from enginegate.engines import BuildPlan, build_engine, open_onnx
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.engines.tensorrt.table import TensorRtTable
from enginegate.engines.torch_inductor.process import TorchInductorTable
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_from_source

_CALIBRATION = CalibrationTable(method="max", batch_size=16, max_samples=32)
# Parity with random weights: logits of a ResNet-50 with random weights are small, errors too.
_PARITY = 1e-2


@dataclass(frozen=True)
class Subject:
    """A network, as many samples as its largest batch, and its ONNX form.

    Attributes:
        buckets: batch sizes that runners with fixed ones take.
    """

    name: str
    network: nn.Module
    data: DataSet
    onnx: ContentFolder[OnnxModel]
    buckets: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The largest batch."""
        return self.buckets[-1]

    def rows(self, count: int, at: int = 0) -> Tensors:
        """So many samples, from one on."""
        return {key: array[at : at + count] for key, array in self.data.inputs.items()}

    def build(self, name: str, store: Path, device: str, limit_s: float) -> ContentFolder[Engine]:
        """Build a candidate, ``KIND-PRECISION``, or take it from the store.

        Raises:
            EnginegateError: it cannot be built, or not in that time.
        """
        return build_engine(self.plan(name, device, limit_s), store / "engines")

    def plan(self, name: str, device: str, limit_s: float) -> BuildPlan:
        """How a candidate is built: every kind for the same batch sizes."""
        on = "cuda" if device == "cuda" else "cpu"
        torch_inductor = TorchInductorTable(
            device=on, batch_buckets=self.buckets, timeout_s=limit_s
        )
        return planned(
            self.onnx,
            name,
            self.data,
            tables={
                "shapes": Shapes(batch=DimensionRange(min=1, best=self.largest, max=self.largest)),
                "onnxruntime": OnnxRuntimeTable(device=on, batch_buckets=self.buckets),
                "tensorrt": TensorRtTable(
                    library="tensorrt", timeout_s=limit_s, when_slow="lower", workspace_mib=4096
                ),
                "torch_inductor": torch_inductor,
            },
            calibration=_CALIBRATION,
        )


class Pixels(nn.Module):
    """A classifier of images as cameras give them: bytes, normalised inside the model.

    A request is then a quarter of the size, and copying is what serving spends most on.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` (N, 3, H, W), uint8 -> logits."""
        logits: torch.Tensor = self.network((image.float() - 114.0) / 58.0)
        return logits


def subject(name: str, store: Path, *, largest: int = 128) -> Subject:
    """One of `NAMES`, with random weights: speed does not depend on them.

    Args:
        store: where exported models are kept and found again.
        largest: batch.
    """
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    network, inputs = _MAKE[name](random, largest)
    buckets = (*(size for size in (1, 8, 32) if size < largest), largest)
    path = store / "programs" / f"{name}.pt2"
    if not path.is_file():
        _save(network.eval(), inputs, path)
    data = samples(inputs, "synthetic")
    source = ModelSource(uri=f"file:{path.absolute()}", parity_max_abs_error=_PARITY)
    onnx_model = onnx_from_source(
        source,
        data.head(8),
        onnx_root=store / "onnx",
        tracking_uri="",
        open_onnx=open_onnx,
    )
    return Subject(name, network.eval(), data, onnx_model, buckets)


def _save(network: nn.Module, inputs: Tensors, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        network,
        tuple(torch.from_numpy(array[:2]) for array in inputs.values()),
        dynamic_shapes=tuple({0: batch} for _ in inputs),
        strict=False,
    )
    torch.export.save(program, path)


def _resnet(random: np.random.Generator, count: int) -> tuple[nn.Module, Tensors]:
    from torchvision.models import resnet50  # noqa: PLC0415 - only here, and slow

    return resnet50(), {"x": random.standard_normal((count, 3, 224, 224), np.float32)}


def _pixels(random: np.random.Generator, count: int) -> tuple[nn.Module, Tensors]:
    network, floats = _resnet(random, 2)
    size = (count, *floats["x"].shape[1:])
    return Pixels(network), {"image": random.integers(0, 256, size).astype(np.uint8)}


def _encoder(random: np.random.Generator, count: int) -> tuple[nn.Module, Tensors]:
    ids = random.integers(1000, 30000, (count, 128))
    return Encoder(), {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def _tiny(random: np.random.Generator, count: int) -> tuple[nn.Module, Tensors]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 10))
    return nn.Sequential(*layers), {"input": random.standard_normal((count, 3, 32, 32), np.float32)}


def _tiny_encoder(random: np.random.Generator, count: int) -> tuple[nn.Module, Tensors]:
    ids = random.integers(1000, 30000, (count, 16))
    network = Encoder(layers=1, hidden=32, heads=2)
    return network, {"input_ids": ids, "attention_mask": np.ones_like(ids)}


_MAKE: dict[str, Callable[[np.random.Generator, int], tuple[nn.Module, Tensors]]] = {
    "resnet50": _resnet,
    "resnet50-u8": _pixels,
    "minilm-l6": _encoder,
    "tiny": _tiny,
    "tiny-encoder": _tiny_encoder,
}
NAMES = tuple(_MAKE)
