"""ResNet-50 that takes images as bytes, for the serving benchmark."""

from pathlib import Path

import numpy as np
import torch
from gpu_engines import Subject
from gpu_points import BATCHES
from networks import exported, samples
from torch import nn


class Pixels(nn.Module):
    """ResNet-50 on images as cameras give them: bytes, normalised inside the model.

    A request is then a quarter of the size, and copying is what serving spends most on.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` (N, 3, 224, 224), uint8 -> logits (N, 1000)."""
        logits: torch.Tensor = self.network((image.float() - 114.0) / 58.0)
        return logits


def pixels(scratch: Path) -> Subject:
    """ResNet-50 with random weights on random bytes."""
    from torchvision.models import resnet50  # noqa: PLC0415 - only here, and slow

    torch.manual_seed(0)
    images = np.random.default_rng(0).integers(0, 256, (max(BATCHES), 3, 224, 224)).astype(np.uint8)
    inputs = {"image": images}
    network = Pixels(resnet50().eval())
    example = {key: array[:2] for key, array in inputs.items()}
    onnx_model = exported(network, example, scratch / "onnx-pixels")
    return Subject("resnet50-u8", network, samples(inputs, "synthetic"), onnx_model)
