"""A first policy for a model that nobody has promoted yet: what its task is, and its TOML.

Pure: it decides from what was found out about model and data (`sources.inspection`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from enginegate.candidate import EngineKindName, Precision, TensorSpec
from enginegate.data import Array, DataSet
from enginegate.errors import DataError
from enginegate.policy.gates import OutputTask, Task
from enginegate.policy.listing import toml_value
from enginegate.policy.tolerances import EVIDENCE
from enginegate.sources.inspection import ModelFacts

# A program's files are often called so; the folder they are in says more.
_NAMELESS = frozenset({"model", "best", "final", "last", "latest", "checkpoint", "export", "data"})
# Outputs this large are rounded by more than the default limit: 64 units of float32's last place.
_DEFAULT_PARITY = 1e-3
_PARITY_SHARE = 1e-5
_FEWEST_CALIBRATED = 32
_MOST_CALIBRATED = 256
_CALIBRATED_SHARE = 5
# 765 settle the strictest standard limit where nothing differs; a few more where a little does.
_SETTLE_EVERY_LIMIT = 800
_BOXES = _PIXELS = 3  # axes of labels that are boxes, or classes of pixels
_VECTOR = 2  # axes of an output of one vector, or one row of logits, a sample
_MOST_NAME = 100
_MOST_LINES = 20
_TOP = ("name", "task", "outputs", "shapes")


OutputTables: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What one output seems to mean; ``more`` is what else its table must say."""

    task: OutputTask | None
    why: str
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> Mapping[str, Any]:
        return {"task": self.task, **self.more}


@dataclass(frozen=True, slots=True)
class TaskGuess:
    """What the outputs seem to mean.

    Attributes:
        task: None where model and data do not show it.
        outputs: tables of [outputs], where there are several, another than the first counts, or
            one needs more words than its task.
        why: what shows it, or what is missing.
    """

    task: Task | None
    why: str
    outputs: OutputTables = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FirstPolicy:
    """What the file will state; everything else has a default.

    Attributes:
        data: the table [data], as TOML would be read.
        parity: largest difference between framework and ONNX; None: the default.
        sequence: smallest, usual and largest size of dynamic axes besides the batch, where an
            engine kind must know it.
    """

    name: str
    task: Task
    uri: str
    data: Mapping[str, object]
    candidates: Mapping[EngineKindName, Sequence[Precision]]
    p99_ms: float
    min_throughput_per_s: float
    outputs: OutputTables = field(default_factory=dict)
    allow_pickle: bool = False
    allow_code: bool = False
    parity: float | None = None
    sequence: tuple[int, int, int] | None = None

    def tables(self) -> dict[str, Any]:
        """The policy as TOML would be read."""
        model: dict[str, Any] = {"uri": self.uri}
        model |= {key: True for key in ("allow_pickle", "allow_code") if getattr(self, key)}
        if self.parity is not None:
            model["parity_max_abs_error"] = self.parity
        tables: dict[str, Any] = {"name": self.name, "task": self.task}
        if self.outputs:
            tables["outputs"] = {name: dict(table) for name, table in self.outputs.items()}
        if self.sequence is not None:
            tables["shapes"] = {
                "sequence": dict(zip(("min", "best", "max"), self.sequence, strict=True))
            }
        return tables | {
            "model": model,
            "data": dict(self.data),
            "candidates": {
                kind: [each.value for each in precisions]
                for kind, precisions in self.candidates.items()
            },
            "gates": {"default": {"tolerances": "standard"}},
            "slo": {"p99_ms": self.p99_ms, "min_throughput_per_s": self.min_throughput_per_s},
        }

    def toml(self, path: str) -> str:
        """The file's text: twenty lines at most, but for a model of many outputs or columns.

        Args:
            path: where it will be, for the command in its first line.
        """
        lines = [f"# `enginegate policy show {path}` prints every key, its value and its meaning."]
        tables = self.tables()
        top = [key for key in _TOP if key in tables]
        lines += [f"{key} = {toml_value(tables.pop(key))}" for key in top]
        for name, table in tables.items():
            inner = table.get("default") if name == "gates" else table
            lines += [f"[{name}.default]" if name == "gates" else f"[{name}]"]
            lines += [f"{key} = {toml_value(value)}" for key, value in inner.items()]
        if len(lines) > _MOST_LINES:
            lines = [line for line in lines if not line.startswith("#")]
        return "\n".join(_spaced(lines)) + "\n"


def _spaced(lines: list[str]) -> list[str]:
    """A blank line before every table, where twenty lines have room for them."""
    tables = sum(line.startswith("[") for line in lines)
    if len(lines) + tables > _MOST_LINES:
        return lines
    return [part for line in lines for part in (("", line) if line[0] == "[" else (line,))]


def guess_task(model: ModelFacts, data: DataSet) -> TaskGuess:
    """What the outputs mean, as far as their shapes and the data's labels show it.

    Raises:
        DataError: labels are of an output that the model does not have.
    """
    names = [spec.name for spec in model.outputs]
    if unknown := sorted(data.targets.keys() - set(names)):
        raise DataError(
            f"{data.origin}: label.{unknown[0]} is of no output; the model gives "
            f"{', '.join(names)}. Call the array label.{names[0]}."
        )
    outputs = [spec for spec in model.outputs if spec.dtype.startswith("float")]
    if not outputs:
        return TaskGuess(None, f"no output holds floating numbers ({_listed(model.outputs)})")
    meanings = {spec.name: _meaning(spec, model, data) for spec in outputs}
    if len(model.outputs) == 1:
        ((name, found),) = meanings.items()
        table = found.table if len(found.table) > 1 else None
        return TaskGuess(found.task, found.why, {name: table} if table else {})
    classes = [name for name, found in meanings.items() if found.task == "classification"]
    if data.labels is not None and len(classes) == 1 and not data.targets:
        found = meanings[classes[0]]
        return TaskGuess("classification", found.why, {classes[0]: found.table})
    known = {name: found.table for name, found in meanings.items() if found.task is not None}
    if len(known) < 2:  # noqa: PLR2004 - several
        return TaskGuess(None, "; ".join(m.why for m in meanings.values() if m.task is None))
    return TaskGuess("multi-output", "several outputs, each judged alone", known)


def name_for(uri: str) -> str:
    """A name for the live model, from where the model comes from."""
    scheme, _, location = uri.partition(":")
    if scheme == "models":
        location = re.split(r"[@/]", location.lstrip("/"))[0]
    if scheme == "python":
        location = location.rpartition(":")[2]
    parts = [part.rsplit(".", 1)[0] if "." in part[1:] else part for part in location.split("/")]
    wanted = next((part for part in reversed(parts) if part and part not in _NAMELESS), "model")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", wanted).strip("-._")
    return name[:_MOST_NAME] or "model"


def parity_for(largest: float) -> float | None:
    """A limit on the difference between framework and ONNX that suits outputs of this size.

    Returns:
        None where the default suits.
    """
    wanted = largest * _PARITY_SHARE
    if not math.isfinite(wanted) or wanted <= _DEFAULT_PARITY:
        return None
    digits = 10.0 ** math.floor(math.log10(wanted))
    return math.ceil(wanted / digits) * digits


def samples_to_set_aside(samples: int) -> int:
    """How many of the data's samples int8 scales are found on; 0: there are too few to spare."""
    count = min(_MOST_CALIBRATED, samples // _CALIBRATED_SHARE)
    for judged in (_SETTLE_EVERY_LIMIT, int(EVIDENCE["min_samples"])):
        if samples >= judged + _FEWEST_CALIBRATED:
            return min(count, samples - judged)
    return count if count >= _FEWEST_CALIBRATED and samples < EVIDENCE["min_samples"] else 0


def round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, …"""
    if value <= 0:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(value))
    return next(step * decade for step in (1.0, 2.0, 5.0, 10.0) if step * decade >= value * 0.999)


def _meaning(spec: TensorSpec, model: ModelFacts, data: DataSet) -> _Meaning:
    """What one output means, and what shows it; None and what is missing otherwise."""
    only = data.targets.get("") if len(model.outputs) == 1 else None
    target = data.targets.get(spec.name, only)
    labels = data.labels if target is None else target
    if labels is None:
        return _unlabelled(spec)
    if labels.dtype.kind == "f":
        return _labelled_with_numbers(spec, labels)
    if labels.ndim == 1:
        return _labelled_with_classes(spec, labels)
    return _labelled_in_detail(spec, labels, is_share=spec.name in model.shares)


def _labelled_with_numbers(spec: TensorSpec, labels: Array) -> _Meaning:
    rank = len(spec.shape)
    if rank == _BOXES == labels.ndim and (spec.shape[2], labels.shape[2]) == (6, 5):
        return _Meaning("detection", f"{spec.name} and its labels are boxes")
    if rank == _VECTOR == labels.ndim and labels.shape[1] > 1:
        return _Meaning(None, f"{spec.name} and its labels are vectors: regression or embedding")
    return _Meaning("regression", f"{spec.name} is labelled with numbers")


def _labelled_with_classes(spec: TensorSpec, labels: Array) -> _Meaning:
    width = spec.shape[1] if len(spec.shape) == _VECTOR else 1
    smallest, largest = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if width == 1:
        shape = list(spec.shape)
        return _Meaning(None, f"labels are whole numbers, and {spec.name} has the shape {shape}")
    if smallest < 0 or 0 < width <= largest:
        size = f"{width} values" if width > 0 else "values"
        return _Meaning(
            None,
            f"{spec.name} has {size} a sample, and labels run from {smallest} to {largest}, so "
            "they are not its classes, which begin at 0",
        )
    return _Meaning("classification", f"{spec.name} has one value a class, and labels are classes")


def _labelled_in_detail(spec: TensorSpec, labels: Array, *, is_share: bool) -> _Meaning:
    """Several whole numbers a sample: labels that are given or not, or classes of pixels."""
    threshold = {"threshold": 0.5} if is_share else {}
    given_or_not = int(labels.min(initial=0)) >= 0 and int(labels.max(initial=0)) <= 1
    if len(spec.shape) == labels.ndim == _VECTOR and given_or_not:
        return _Meaning(
            "multi-label", f"{spec.name} has one value a label, each given or not", threshold
        )
    if labels.ndim == _PIXELS and len(spec.shape) in {_PIXELS, _PIXELS + 1}:
        last = len(spec.shape) > _PIXELS and spec.shape[1:3] == labels.shape[1:]
        more = {"class_axis": -1} if last else {}
        return _Meaning("segmentation", f"labels of {spec.name} are classes of pixels", more)
    return _Meaning(
        None, f"{spec.name} {list(spec.shape)} is labelled with whole numbers {labels.shape[1:]}"
    )


def _unlabelled(spec: TensorSpec) -> _Meaning:
    if len(spec.shape) == 1 or spec.shape[1:] == (1,):
        return _Meaning("regression", f"{spec.name} is one number a sample; nothing labels it")
    if len(spec.shape) == _VECTOR and "embed" in spec.name.lower():
        return _Meaning("embedding", f"{spec.name} is one vector a sample")
    return _Meaning(None, f"nothing in the data labels {spec.name} {list(spec.shape)}")


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))
