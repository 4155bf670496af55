"""A small convolutional classifier, trained from scratch in seconds; same recipe, same weights."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from enginegate.data import DataSet
from examples.digits.data import CLASSES, INPUT, Images, Labels, moved
from examples.digits.recipe import Recipe

# On images this small more threads gain little, wait for a busy core, and change the last bits.
_THREADS = 1


class DigitsNet(nn.Module):
    """Three convolutions and a linear layer; ``image`` (N, 1, 8, 8) in 0..1 -> logits (N, 10)."""

    def __init__(self, channels: tuple[int, int, int]) -> None:
        super().__init__()
        first, second, third = channels
        self.features = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
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
        logits: Tensor = self.head(self.features(image).flatten(1))
        return logits


def train(
    recipe: Recipe, images: Images, labels: Labels, progress: Callable[[str], None]
) -> DigitsNet:
    """Train on the CPU; ``progress`` gets one line an epoch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            return _train(recipe, images, labels, progress)
    finally:
        torch.set_num_threads(threads)


def _train(
    recipe: Recipe, images: Images, labels: Labels, progress: Callable[[str], None]
) -> DigitsNet:
    network, random = DigitsNet(recipe.channels), np.random.default_rng(recipe.seed)
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
            loss = judge(
                network(_varied(recipe, images[rows], random)), torch.from_numpy(labels[rows])
            )
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item()
        progress(f"epoch {epoch}/{recipe.epochs}, loss {total / steps:.3f}")
    return network.eval()


def _varied(recipe: Recipe, images: Images, random: np.random.Generator) -> Tensor:
    moves = random.integers(-1, 2, size=(len(images), 2))
    light = random.uniform(1 - recipe.contrast, 1 + recipe.contrast, size=(len(images), 1, 1, 1))
    return torch.from_numpy(np.clip(moved(images, moves) * light.astype(np.float32), 0.0, 1.0))


def accuracy(network: nn.Module, data: DataSet) -> float:
    """Share of labelled images whose largest logit is their label's."""
    with torch.no_grad():
        guessed = network(torch.from_numpy(data.inputs[INPUT])).argmax(1).numpy()
    return float((guessed == data.labels).mean())
