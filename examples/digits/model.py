"""A convolutional classifier, trained from scratch in seconds; same recipe, same weights.

Nine copies of each image, moved by up to one pixel, are read and averaged: serving takes nine times
the arithmetic that training does, so that a request costs computing rather than travelling.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from enginegate.data import DataSet
from examples.digits.data import CLASSES, INPUT, SIDE, Images, Labels, moved
from examples.digits.recipe import Recipe, Training

# On images this small more threads gain little, wait for a busy core, and change the last bits.
_THREADS = 1
# Below the contrast of any image: keeps an empty one from dividing by zero.
_LEAST_CONTRAST = 1e-6
# Images that are read at a time: with their views they stay within the processor's caches.
_CHUNK = 32

_TRAINED: dict[Training, dict[str, Tensor]] = {}


class DigitsNet(nn.Module):
    """Three convolutions and a linear layer; ``image`` (N, 1, 8, 8) in 0..1 -> logits (N, 10)."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.views, self.stretch = recipe.views, recipe.stretch
        first, second, third = recipe.channels
        self.first = nn.Conv2d(1, first, 3, padding=1)
        self.features = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(second, third, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(third * 4, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        contrast = image.amax((1, 2, 3), keepdim=True)
        # No sum and no clip: int8 would round those to a step of the brightest image's contrast.
        contrast = contrast.maximum(contrast.new_full((), _LEAST_CONTRAST))
        if self.stretch == "image":
            convolved = self.first(self._seen(image / contrast))
        else:
            faint = nn.functional.conv2d(self._seen(image), self.first.weight, padding=1)
            of_each = contrast.expand(-1, self.views, -1, -1).reshape(-1, 1, 1, 1)
            convolved = faint / of_each + self.first.bias.reshape(1, -1, 1, 1)
        logits: Tensor = self.head(self.features(convolved).flatten(1))
        return logits.unflatten(0, (-1, self.views)).mean(1)

    def _seen(self, images: Tensor) -> Tensor:
        """Every view of every image, as images: shape ``(N * views, 1, 8, 8)``."""
        if self.views == 1:
            return images
        padded = nn.functional.pad(images, (1, 1, 1, 1))
        views = [view for rows in _moves(padded, 2) for view in _moves(rows, 3)]
        return torch.cat(views, 1).reshape(-1, 1, SIDE, SIDE)


def _moves(padded: Tensor, axis: int) -> list[Tensor]:
    """Three windows along an axis, each a pixel after the one before."""
    return [padded.narrow(axis, start, SIDE) for start in range(3)]


def train(
    recipe: Recipe, images: Images, labels: Labels, progress: Callable[[str], None]
) -> DigitsNet:
    """Train on the CPU; ``progress`` gets one line an epoch.

    Weights that this process trained before, for another version, are taken as they are.
    """
    network = DigitsNet(recipe)
    if recipe.training not in _TRAINED:
        _TRAINED[recipe.training] = _weights(recipe, images, labels, progress)
    network.load_state_dict(_TRAINED[recipe.training])
    return network.eval()


def _weights(
    recipe: Recipe, images: Images, labels: Labels, progress: Callable[[str], None]
) -> dict[str, Tensor]:
    """Trained on one view, which is as good a teacher as all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            network = DigitsNet(recipe.model_copy(update={"views": 1, "stretch": "image"}))
            return _train(network, recipe.training, images, labels, progress)
    finally:
        torch.set_num_threads(threads)


def _train(
    network: DigitsNet,
    recipe: Training,
    images: Images,
    labels: Labels,
    progress: Callable[[str], None],
) -> dict[str, Tensor]:
    random = np.random.default_rng(recipe.seed)
    steps = len(images) // recipe.batch_size
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe.learning_rate, total_steps=recipe.epochs * steps
    )
    judge = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    for epoch in range(1, recipe.epochs + 1):
        order, total = random.permutation(len(images)), 0.0
        for rows in np.array_split(order[: steps * recipe.batch_size], steps):
            optimiser.zero_grad()
            loss = judge(network(_varied(images[rows], random)), torch.from_numpy(labels[rows]))
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
        progress(f"epoch {epoch}/{recipe.epochs}, loss {total / steps:.3f}")
    return network.state_dict()


def _varied(images: Images, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(moved(images, random.integers(-1, 2, size=(len(images), 2))))


def forget_trained() -> None:
    """Train anew what this process has trained before."""
    _TRAINED.clear()


def accuracy(network: nn.Module, data: DataSet) -> float:
    """Share of labelled images whose largest logit is their label's."""
    images = torch.from_numpy(data.inputs[INPUT])
    with torch.no_grad():
        guessed = torch.cat([network(some).argmax(1) for some in images.split(_CHUNK)]).numpy()
    return float((guessed == data.labels).mean())
