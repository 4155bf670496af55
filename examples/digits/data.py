"""Handwritten digits (8x8 greyscale, real scans) cut into what a promotion needs.

No image is in two of training, calibration and evaluation. The cut is stratified by digit and the
same on every machine. One image in fifteen is made faint, as from a hard pencil or a bad lamp: the
slice ``light``. Traffic is made from evaluation images, moved and re-lit a little: it stands for
requests in production, so it has slices but no labels.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

from enginegate.data import DataSet, write_data

Images: TypeAlias = NDArray[np.float32]
Labels: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = NDArray[np.bool_]

INPUT = "image"
CLASSES = 10
SIDE = 8
TRAINING_IMAGES = 750
CALIBRATION_IMAGES = 128
TRAFFIC_REQUESTS = 2000

_SEED = 20240
_BRIGHTEST = 16.0
# Mean intensity at a third and two thirds of the training images.
_STROKE_EDGES = (0.29, 0.325)
_STROKES = np.array(["thin", "medium", "bold"])
_FAINT_EVERY = 15
# Of full contrast. A scanner of 12 bits tells such strokes from paper, one of 8 bits does not.
_FAINT = np.float32(1 / 160)
# Low digits lead, as in amounts and house numbers.
_TRAFFIC_MIX = np.array([0.19, 0.17, 0.13, 0.11, 0.09, 0.08, 0.07, 0.06, 0.05, 0.05])
_MOVED_SHARE = 0.3
_CONTRAST = (0.85, 1.15)


@dataclass(frozen=True, slots=True)
class Digits:
    """The four sets; images have shape ``(N, 1, 8, 8)`` and lie in 0..1."""

    training_images: Images
    training_labels: Labels
    calibration: DataSet
    evaluation: DataSet
    traffic: DataSet

    def write(self, folder: Path) -> None:
        """Write calibration.npz, evaluation.npz and traffic.npz; the same bytes every time."""
        for name in ("calibration", "evaluation", "traffic"):
            write_data(getattr(self, name), folder / f"{name}.npz")


def read_digits() -> Digits:
    """Cut scikit-learn's 1797 digits; nothing is downloaded."""
    raw = load_digits()
    images = (raw.images / _BRIGHTEST).astype(np.float32)[:, None]
    labels = raw.target.astype(np.int64)
    everything = np.arange(len(labels))
    training, held_out = train_test_split(
        everything, train_size=TRAINING_IMAGES, stratify=labels, random_state=_SEED
    )
    calibration, evaluation = train_test_split(
        held_out, train_size=CALIBRATION_IMAGES, stratify=labels[held_out], random_state=_SEED
    )
    return Digits(
        training_images=images[training],
        training_labels=labels[training],
        calibration=_labelled("calibration", calibration, images, labels),
        evaluation=_labelled("evaluation", evaluation, images, labels),
        traffic=_traffic(images[evaluation], labels[evaluation]),
    )


def _labelled(origin: str, rows: NDArray[np.int64], images: Images, labels: Labels) -> DataSet:
    ids = np.array([f"digits-{row:04d}" for row in rows])
    chosen, faint = images[rows], _faint(len(rows))
    shown = {INPUT: _faded(chosen, faint)}
    return DataSet(origin, shown, labels[rows], ids, _slices(chosen, labels[rows], faint))


def _slices(images: Images, labels: Labels, faint: Rows) -> dict[str, NDArray[np.str_]]:
    """Of images before any was faded: a faint stroke is as thick as it was."""
    stroke = _STROKES[np.digitize(images.mean(axis=(1, 2, 3)), _STROKE_EDGES)]
    light = np.where(faint, "faint", "normal")
    return {"digit": labels.astype(np.str_), "stroke": stroke, "light": light}


def _faint(count: int) -> Rows:
    """Which of the images of a set, whose order is random, are made faint."""
    return np.arange(count) % _FAINT_EVERY == 0


def _faded(images: Images, faint: Rows) -> Images:
    return np.where(faint[:, None, None, None], images * _FAINT, images)


def _traffic(images: Images, labels: Labels) -> DataSet:
    random = np.random.default_rng(_SEED)
    chance = (_TRAFFIC_MIX / np.bincount(labels, minlength=CLASSES))[labels]
    rows = random.choice(len(labels), size=TRAFFIC_REQUESTS, p=chance / chance.sum())
    moves = random.integers(-1, 2, size=(TRAFFIC_REQUESTS, 2))
    moves[random.random(TRAFFIC_REQUESTS) > _MOVED_SHARE] = 0
    contrast = random.uniform(*_CONTRAST, size=(TRAFFIC_REQUESTS, 1, 1, 1)).astype(np.float32)
    seen, faint = (
        np.clip(moved(images[rows], moves) * contrast, 0.0, 1.0),
        _faint(len(images))[rows],
    )
    ids = np.array([f"request-{number:05d}" for number in range(TRAFFIC_REQUESTS)])
    slices = _slices(seen, labels[rows], faint)
    return DataSet("traffic", {INPUT: _faded(seen, faint)}, None, ids, slices)


def moved(images: Images, moves: NDArray[np.int64]) -> Images:
    """Move each image by ``moves`` (shape ``(N, 2)``, -1, 0 or 1 pixel down and right)."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    result = np.empty_like(images)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            rows = (moves == (down, right)).all(axis=1)
            result[rows] = padded[rows, :, 1 - down : 1 + SIDE - down, 1 - right : 1 + SIDE - right]
    return result
