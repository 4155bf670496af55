"""One model, its data and its policy for each task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, helper
from sklearn.datasets import load_digits, make_friedman1

from examples.tasks.graphs import (
    fit,
    model_of,
    perceptron,
    random_layer,
    relu_features,
)

Arrays = dict[str, NDArray[Any]]
_HIDDEN = 128
_TRAINED = 800  # handwritten digits; 741 are left to judge on
_POLICY = """\
name = "{name}"
task = "{task}"
{tables}
[model]
uri = "file:model.onnx"

[data]
evaluation = "evaluation.npz"
calibration = "calibration.npz"

[candidates]
onnxruntime = ["fp32", "int8"]

[gates.default]
tolerances = "standard"
{limits}
[slo]
p99_ms = 50
min_throughput_per_s = 20
"""


@dataclass(frozen=True, slots=True)
class TaskExample:
    """A model with data that it never saw.

    Attributes:
        name: of the example; its task, but for `metric`, which has a metric of its own.
        rows: arrays of a data set, ``input.NAME`` and labels; the first 256 calibrate.
        tables: lines of the policy besides those that all examples have.
        limits: lines of its [gates.default].
    """

    name: str
    task: str
    model: ModelProto
    rows: Arrays
    tables: str = ""
    limits: str = ""
    calibrating: int = field(default=256)

    def write(self, folder: Path) -> Path:
        """Write ``model.onnx``, both data sets and ``policy.toml``; the policy's path."""
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(self.model, folder / "model.onnx")
        first = {name: rows[: self.calibrating] for name, rows in self.rows.items()}
        rest = {name: rows[self.calibrating :] for name, rows in self.rows.items()}
        np.savez(folder / "calibration.npz", **{n: a for n, a in first.items() if "input." in n})
        np.savez(folder / "evaluation.npz", **rest)
        (folder / ".enginegate").mkdir(exist_ok=True)
        path = folder / "policy.toml"
        path.write_text(
            _POLICY.format(name=self.name, task=self.task, tables=self.tables, limits=self.limits)
        )
        return path


def multi_label() -> TaskExample:
    """Three statements about a handwritten digit: is it odd, above four, has it a loop."""
    images, digits = _digits()
    truth = np.isin(digits[:, None] * 10 + [0, 1, 2], _SAID)
    layer = random_layer(np.random.default_rng(0), 64, 2 * _HIDDEN)
    seen = slice(0, _TRAINED)
    head = fit(relu_features(images[seen], layer), np.where(truth[seen], 4.0, -4.0))
    rows = {"input.features": images[_TRAINED:], "label.said": truth[_TRAINED:].astype(np.int64)}
    return TaskExample("multi_label", "multi-label", perceptron(layer, {"said": head}, 64), rows)


def regression() -> TaskExample:
    """Friedman's first function of five features and five that say nothing."""
    features, targets = make_friedman1(4000, random_state=0)
    layer = random_layer(np.random.default_rng(0), 10, 2 * _HIDDEN)
    features, targets = features.astype(np.float32), targets.astype(np.float32)[:, None]
    head = fit(relu_features(features[:2500], layer), targets[:2500])
    rows = {"input.features": features[2500:], "label.value": targets[2500:]}
    return TaskExample("regression", "regression", perceptron(layer, {"value": head}, 10), rows)


def embedding() -> TaskExample:
    """A vector for each handwritten digit, near those of its kind."""
    images, digits = _digits()
    layer = random_layer(np.random.default_rng(0), 64, 2 * _HIDDEN)
    centres = np.random.default_rng(1).normal(size=(10, 16))
    head = fit(relu_features(images[:_TRAINED], layer), centres[digits[:_TRAINED]])
    rows = {"input.features": images[_TRAINED:], "label": digits[_TRAINED:]}
    model = perceptron(layer, {"vector": head}, 64)
    recall = '\n[metrics.recall]\nkind = "recall"\nk = 1\n'
    return TaskExample("embedding", "embedding", model, rows, recall)


def multi_output() -> TaskExample:
    """The digit, and how much ink it has."""
    images, digits = _digits()
    ink = images.mean(axis=1, keepdims=True).astype(np.float32)
    layer = random_layer(np.random.default_rng(0), 64, 2 * _HIDDEN)
    features = relu_features(images[:_TRAINED], layer)
    heads = {
        "digit": fit(features, 6.0 * np.eye(10)[digits[:_TRAINED]]),
        "ink": fit(features, ink[:_TRAINED]),
    }
    rows = {
        "input.features": images[_TRAINED:],
        "label.digit": digits[_TRAINED:],
        "label.ink": ink[_TRAINED:],
    }
    tables = '\n[outputs.digit]\ntask = "classification"\n\n[outputs.ink]\ntask = "regression"\n'
    model = perceptron(layer, heads, 64)
    # The standard's half a per cent would need 765 samples, where nothing differs.
    limits = "max_accuracy_loss = 0.01\n"
    return TaskExample("multi_output", "multi-output", model, rows, tables, limits)


def segmentation() -> TaskExample:
    """Bars and blobs on a dark ground, pixel by pixel."""
    rng = np.random.default_rng(0)
    images, truth = _painted(rng, 1200)
    kernel = rng.normal(0.0, 0.3, (24, 1, 5, 5)).astype(np.float32)
    bias = rng.uniform(-0.3, 0.3, 24).astype(np.float32)
    seen = relu_features(_patches(images[:60]), (kernel.reshape(24, -1).T.copy(), bias))
    weight, shift = fit(seen, 6.0 * np.eye(3)[truth[:60].ravel()])
    nodes = [
        helper.make_node("Conv", ["image", "kernel", "bias"], ["seen"], "seen", pads=[2] * 4),
        helper.make_node("Relu", ["seen"], ["active"], "active"),
        helper.make_node("Conv", ["active", "weight", "shift"], ["classes"], "classes"),
    ]
    weights = {
        "kernel": kernel,
        "bias": bias,
        "weight": weight.T.reshape(3, 24, 1, 1).copy(),
        "shift": shift,
    }
    side = images.shape[-1]
    inputs = {"image": ("float32", [1, side, side])}
    outputs = {"classes": ("float32", [3, side, side])}
    rows = {"input.image": images[100:], "label.classes": truth[100:]}
    model = model_of(nodes, weights, inputs, outputs)
    return TaskExample("segmentation", "segmentation", model, rows)


def detection() -> TaskExample:
    """Squares of two shades: where they are, by comparing every place with a square."""
    images, truth = _squares(np.random.default_rng(0), 720)
    places = _SIDE - _SQUARE + 1
    kernel = np.full((1, 1, _SQUARE + 2, _SQUARE + 2), -1.0 / (4 * _SQUARE + 4), np.float32)
    kernel[:, :, 1:-1, 1:-1] = 1.0 / _SQUARE**2  # the mean inside, less the mean around it
    count = [_MOST_SQUARES]
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["map"], "map", pads=[1] * 4),
        helper.make_node(
            "MaxPool", ["map"], ["highest"], "highest", kernel_shape=[5, 5], pads=[2] * 4
        ),
        helper.make_node("GreaterOrEqual", ["map", "highest"], ["peaks"], "peaks"),
        helper.make_node("Where", ["peaks", "map", "zero"], ["kept"], "kept"),
        helper.make_node("Flatten", ["kept"], ["listed"], "listed"),
        helper.make_node("TopK", ["listed", "most"], ["found", "place"], "best"),
        helper.make_node("Clip", ["found", "zero", "one"], ["scores"], "scores"),
        helper.make_node("Greater", ["found", "shade"], ["bright"], "bright"),
        helper.make_node("Cast", ["bright"], ["classes"], "classes", to=7),
        helper.make_node("Mod", ["place", "width"], ["column"], "column"),
        helper.make_node("Div", ["place", "width"], ["row"], "row"),
        *(
            helper.make_node("Cast", [name], [f"{name}.f"], f"{name}.f", to=1)
            for name in ("column", "row")
        ),
        helper.make_node("Mul", ["found", "nothing"], ["still"], "still"),
        helper.make_node("Add", ["still", "size"], ["extent"], "extent"),
        *(
            helper.make_node("Unsqueeze", [name, "last"], [f"{name}.u"], f"{name}.u")
            for name in ("column.f", "row.f", "extent")
        ),
        helper.make_node(
            "Concat",
            ["column.f.u", "row.f.u", "extent.u", "extent.u"],
            ["boxes"],
            "boxes",
            axis=2,
        ),
    ]
    weights: Arrays = {
        "kernel": kernel,
        "zero": np.float32(0.0).reshape(()),
        "one": np.float32(1.0).reshape(()),
        "most": np.array(count, np.int64),
        "shade": np.float32(0.65).reshape(()),
        "width": np.int64(places).reshape(()),
        "nothing": np.float32(0.0).reshape(()),
        "size": np.float32(_SQUARE).reshape(()),
        "last": np.array([2], np.int64),
    }
    outputs = {
        "boxes": ("float32", [_MOST_SQUARES, 4]),
        "scores": ("float32", [_MOST_SQUARES]),
        "classes": ("int64", [_MOST_SQUARES]),
    }
    model = model_of(nodes, weights, {"image": ("float32", [1, _SIDE, _SIDE])}, outputs)
    tables = (
        '\n[outputs.boxes]\ntask = "detection"\nscores = "scores"\nclasses = "classes"\n'
        'box_format = "xywh"\nthreshold = 0.2\n'
    )
    rows = {"input.image": images, "label.boxes": truth}
    return TaskExample("detection", "detection", model, rows, tables)


def metric() -> TaskExample:
    """The regression, scored by a function of yours: the share of answers within a tenth."""
    made = regression()
    tables = (
        '\n[metrics.within_a_tenth]\nkind = "examples.tasks.models:within_a_tenth"\n'
        "allow_code = true\n"
    )
    limits = "max_metric_loss = { within_a_tenth = 0.05 }\n"
    return TaskExample("metric", "regression", made.model, made.rows, tables, limits)


def within_a_tenth(answers: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """1 for each sample that is within a tenth of its label, else 0; shape ``(N,)``."""
    near = np.abs(answers - labels) <= np.abs(labels) / 10.0
    return near.all(axis=1).astype(np.float64)


EXAMPLES: Mapping[str, Callable[[], TaskExample]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            multi_label,
            regression,
            embedding,
            segmentation,
            detection,
            multi_output,
            metric,
        )
    }
)
_ODD, _ABOVE_FOUR, _WITH_LOOP = (1, 3, 5, 7, 9), (5, 6, 7, 8, 9), (0, 6, 8, 9)
_SAID = [10 * d + place for place, s in enumerate((_ODD, _ABOVE_FOUR, _WITH_LOOP)) for d in s]
_SIDE, _SQUARE, _MOST_SQUARES = 24, 6, 4


def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    known = load_digits()
    order = np.random.default_rng(0).permutation(len(known.target))
    images = (known.data[order] / 16.0).astype(np.float32)
    return images, known.target[order].astype(np.int64)


def _painted(rng: np.random.Generator, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images ``(N, 1, 16, 16)`` and the class of each pixel: ground, bar, blob."""
    truth = np.zeros((count, 16, 16), np.int64)
    for row in range(count):
        x, y = rng.integers(0, 12, 2)
        truth[row, :, x : x + 2] = 1
        truth[row, y : y + 4, (x + 5) % 12 : (x + 5) % 12 + 4] = 2
    shades = np.array([0.0, 0.6, 1.2])[truth]
    images = shades + rng.normal(0.0, 0.1, truth.shape)
    return images[:, None].astype(np.float32), truth


def _patches(images: NDArray[Any]) -> NDArray[Any]:
    """The 5 x 5 pixels around each pixel, shape ``(N * H * W, 25)``."""
    padded = np.pad(images[:, 0], ((0, 0), (2, 2), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(1, 2))
    return np.ascontiguousarray(windows).reshape(-1, 25)


def _squares(rng: np.random.Generator, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images ``(N, 1, 24, 24)``, and up to three squares ``(N, 3, 5)``: x, y, w, h and shade."""
    images = rng.normal(0.0, 0.35, (count, 1, _SIDE, _SIDE))
    truth = np.full((count, 3, 5), -1.0)
    for row in range(count):
        for number, quarter in enumerate(rng.permutation(4)[: rng.integers(1, 4)]):
            x, y = (int(12 * (quarter // step % 2) + rng.integers(0, 6)) for step in (1, 2))
            shade = int(rng.integers(0, 2))
            images[row, 0, y : y + _SQUARE, x : x + _SQUARE] += 0.5 + 0.4 * shade
            truth[row, number] = x, y, _SQUARE, _SQUARE, shade
    return images.astype(np.float32), truth.astype(np.float32)
