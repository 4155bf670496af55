"""An output of a model: its task and metrics, and the arrays that can be compared as that."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import DataError
from enginegate.policy.gates import Metric, Output, OutputTask, Slices, Task
from enginegate.records import canonical_json, sha256_bytes

Trait: TypeAlias = Literal["confidence", "input_norm", "length"]


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How the answers of one output are compared.

    Attributes:
        output: its name; empty for the model's first.
        task: what it means.
        metrics: scores against labels, by name.
        alone: whether other outputs are left out: they are compared by questions of their own.
        traits: what is noted about each sample, to cut the data by.
        max_values: a slice column with more values is not judged.
        declared: the policy's own table of this output; None where it has none.
    """

    output: str = ""
    task: OutputTask = "classification"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    alone: bool = False
    traits: tuple[Trait, ...] = ()
    max_values: int = 200
    declared: Output | None = None

    @property
    def form(self) -> Output:
        """How its numbers are read: the policy's table, or the defaults."""
        return self.declared or Output(task=self.task)

    @property
    def threshold(self) -> float:
        """Above it a label, a pixel or a box counts as found."""
        if self.form.threshold is not None:
            return self.form.threshold
        return _BOX_SCORE if self.task == "detection" else 0.0

    @property
    def digest(self) -> str:
        """Digest of everything that decides what is computed."""
        metrics = {name: metric.model_dump() for name, metric in self.metrics.items()}
        deciding = [self.output, self.task, metrics, self.alone, list(self.traits), self.max_values]
        read_as = self.form.model_dump(mode="json", exclude_defaults=True)
        return sha256_bytes(canonical_json([*deciding, read_as]))

    def scope(self, data: str) -> str:
        """The scope of findings on some data, e.g. ``evaluation``, or ``evaluation:boxes``."""
        return f"{data}:{self.output}" if self.alone else data


CLASSIFY = OutputSpec()


def outputs_to_compare(
    task: Task, outputs: Mapping[str, Output], metrics: Mapping[str, Metric], slices: Slices
) -> tuple[OutputSpec, ...]:
    """One for each declared output of a multi-output model, else one for the model."""
    traits, most = slices.discover, slices.max_values
    if task != "multi-output":
        (name, *_) = (*outputs, "")
        declared = outputs.get(name)
        return (OutputSpec(name, task, metrics, False, traits, most, declared),)  # noqa: FBT003
    first = next(iter(outputs))
    return tuple(
        OutputSpec(
            name,
            output.task,
            {n: m for n, m in metrics.items() if (m.output or first) == name},
            alone=True,
            traits=tuple(t for t in traits if t != "confidence" or output.task == "classification"),
            max_values=most,
            declared=output,
        )
        for name, output in outputs.items()
    )


MOST_MAP_CLASSES = 256  # of a map of class numbers, which does not say how many there are
_BOX_SCORE = 0.5  # that a box counts as found from, unless the policy says otherwise
_SHOWN_IDS = 5
_SLICE_NAME = re.compile(r"[\w][\w .:+-]*")


def check_form(reference: Tensors, candidate: Tensors, data: DataSet, asked: OutputSpec) -> str:
    """Refuse what cannot be compared; the name of the output that is asked about.

    Raises:
        DataError: outputs differ in name, type or shape, or do not have one row a sample; the
            output is not of its task; a label is no class; or the reference gave NaN or Inf.
    """
    _check_same_form(reference, candidate, data)
    name = asked.output or next(iter(reference))
    array = reference.get(name)
    if array is None:
        raise DataError(
            f"The model gives outputs {sorted(reference)}, not {name!r}, which the policy's "
            "[outputs] names."
        )
    if asked.task == "classification":
        _check_logits(array, name)
        check_classes(data, array.shape[1], name, alone=asked.alone)
    if asked.task == "multi-label":
        _check_multi_label(array, data, name, asked)
    if asked.task == "segmentation":
        _check_segmentation(array, data, name, asked)
    if asked.task == "embedding" and (array.ndim != 2 or array.dtype.kind != "f"):  # noqa: PLR2004 - (samples, dimensions)
        raise DataError(
            f"Output {name!r} should hold embeddings, floating point of shape (samples, "
            f"dimensions); it is {array.dtype}{list(array.shape)}. Pool it in the model."
        )
    _check_reference_finite(reference, data)
    _check_slice_names(data)
    return name


def labels_of_output(data: DataSet, output: str, *, alone: bool) -> Array | None:
    """The labels that are one output's own, of any form; None: the data has none.

    Args:
        alone: whether the model has others, so that only labels of that name are its.
    """
    found = data.targets.get(output)
    return found if found is not None or alone else data.targets.get("")


def nonfinite_rows(outputs: Tensors, samples: int) -> NDArray[np.bool_]:
    """Whether a sample has NaN or Inf in any output, shape ``(N,)``."""
    bad = np.zeros(samples, dtype=np.bool_)
    for array in outputs.values():
        if array.dtype.kind == "f":
            bad |= ~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
    return bad


def flat(array: Array) -> NDArray[np.float64]:
    """The values of each sample in one row, shape ``(N, V)``."""
    return np.asarray(array).reshape(len(array), math.prod(array.shape[1:])).astype(np.float64)


def check_classes(data: DataSet, classes: int, name: str, *, alone: bool = False) -> None:
    """Refuse labels that are no class of the output.

    Raises:
        DataError: a label is no whole number, below 0, or not below ``classes``.
    """
    own = labels_of_output(data, name, alone=alone)
    labels = data.labels if own is None else own
    if labels is None or len(labels) == 0:
        return
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(
            f"{data.origin}: label.{name} must be one whole number a sample, for {name!r} has "
            f"classes; it is {labels.dtype} of shape {labels.shape}."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{data.origin}: labels run from {low} to {high}, but output {name!r} has {classes} "
            f"classes (0 to {classes - 1}). The data or the model is of another set of classes."
        )


def _check_same_form(reference: Tensors, candidate: Tensors, data: DataSet) -> None:
    if not reference or set(reference) != set(candidate):
        raise DataError(
            f"The reference gives outputs {sorted(reference)}, the candidate {sorted(candidate)}. "
            "A candidate must keep the model's outputs: build it again from the same ONNX model."
        )
    for name, expected in reference.items():
        given = candidate[name]
        if (expected.dtype, expected.shape) != (given.dtype, given.shape):
            raise DataError(
                f"Output {name!r} is {expected.dtype}{list(expected.shape)} from the reference and "
                f"{given.dtype}{list(given.shape)} from the candidate. They must have one type and "
                "shape: build the candidate again from the same ONNX model, with its output types."
            )
        if expected.ndim == 0 or len(expected) != len(data):
            raise DataError(
                f"Output {name!r} has shape {expected.shape} for {len(data)} samples of "
                f"{data.origin}; its first axis must be the sample."
            )
        if expected.dtype.kind not in "fiub":
            raise DataError(f"Output {name!r} is {expected.dtype}; only numbers can be compared.")


def _check_logits(array: Array, name: str) -> None:
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind != "f":  # noqa: PLR2004 - (samples, classes), two classes at least
        raise DataError(
            f"Output {name!r} should hold class logits, floating point of shape (samples, classes "
            f">= 2); it is {array.dtype}{list(array.shape)}. Make the logits the model's first "
            "output, or declare what its outputs mean under [outputs]."
        )


def _check_multi_label(array: Array, data: DataSet, name: str, asked: OutputSpec) -> None:
    if array.ndim != 2 or array.dtype.kind != "f":  # noqa: PLR2004 - (samples, labels)
        raise DataError(
            f"Output {name!r} should hold one number for each label, floating point of shape "
            f"(samples, labels); it is {array.dtype}{list(array.shape)}."
        )
    truth = labels_of_output(data, name, alone=asked.alone)
    if truth is None:
        return
    if truth.shape != array.shape or not np.isin(truth, (0, 1)).all():
        raise DataError(
            f"{data.origin}: label.{name} must hold 0 or 1 for each label, shape {array.shape}; it "
            f"is {truth.dtype} of shape {truth.shape}."
        )


def _check_segmentation(array: Array, data: DataSet, name: str, asked: OutputSpec) -> None:
    whole = array.dtype.kind in "iub"
    if array.ndim < (2 if whole else 3):
        raise DataError(
            f"Output {name!r} should hold classes of pixels: floating point of shape (samples, "
            "classes, height, width), or whole numbers of shape (samples, height, width); it is "
            f"{array.dtype}{list(array.shape)}."
        )
    truth = labels_of_output(data, name, alone=asked.alone)
    if truth is None:
        return
    axis = asked.form.class_axis
    wanted = array.shape if whole else np.delete(np.array(array.shape), axis)
    if truth.shape != tuple(wanted) or truth.dtype.kind not in "iub":
        raise DataError(
            f"{data.origin}: label.{name} must hold a whole number for each pixel, shape "
            f"{tuple(int(size) for size in wanted)}; it is {truth.dtype} of shape {truth.shape}. "
            f"The classes of the output are its axis {axis} (outputs.{name}.class_axis)."
        )
    scored = truth[truth != asked.form.ignore_label]
    classes = pixel_classes(array, asked)
    if scored.size and (scored.min() < 0 or scored.max() >= classes):
        raise DataError(
            f"{data.origin}: label.{name} runs from {scored.min()} to {scored.max()}, but output "
            f"{name!r} has {classes} classes (0 to {classes - 1}). Name the label of pixels that "
            f"are not to be scored as ignore_label under [outputs.{name}]."
        )


def pixel_classes(array: Array, asked: OutputSpec) -> int:
    """How many classes the pixels of an output may have."""
    if array.dtype.kind in "iub":
        return MOST_MAP_CLASSES
    return max(2, int(array.shape[asked.form.class_axis]))


def _check_reference_finite(reference: Tensors, data: DataSet) -> None:
    bad = np.flatnonzero(nonfinite_rows(reference, len(data)))
    if len(bad):
        shown = ", ".join(str(data.ids[row]) for row in bad[:_SHOWN_IDS])
        raise DataError(
            f"The FP32 reference itself gives NaN or Inf on {len(bad)} of {len(data)} samples of "
            f"{data.origin} (first ids: {shown}), so there is nothing to compare with. Remove "
            "those samples, or repair the model."
        )


def _check_slice_names(data: DataSet) -> None:
    bad = [name for name in data.slices if not _SLICE_NAME.fullmatch(name)]
    if bad:
        raise DataError(
            f"{data.origin}: slice column names may hold letters, digits, space and _ . : + - "
            f"only; rename {', '.join(map(repr, bad))}."
        )
