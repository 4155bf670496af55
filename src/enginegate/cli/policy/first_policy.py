"""A first policy for a model that nobody has promoted yet: what its task is, and its TOML.

Pure: it decides from what was found out about model and data (`sources.inspection`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginegate.candidate import EngineKindName, Precision, TensorSpec
from enginegate.data import Array, DataSet
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
_VECTOR = 2  # axes of an output of one vector, or one row of logits, a sample
_MOST_NAME = 100
_MOST_LINES = 20
_TOP = ("name", "task", "outputs", "shapes")


@dataclass(frozen=True, slots=True)
class TaskGuess:
    """What the outputs seem to mean.

    Attributes:
        task: None where model and data do not show it.
        outputs: what each output means, where there are several or another than the first counts.
        why: what shows it, or what is missing.
    """

    task: Task | None
    why: str
    outputs: Mapping[str, OutputTask] = field(default_factory=dict)


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
    outputs: Mapping[str, OutputTask] = field(default_factory=dict)
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
            tables["outputs"] = {name: {"task": task} for name, task in self.outputs.items()}
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
        """The file's text, twenty lines at most.

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
        return "\n".join(_spaced(lines[-_MOST_LINES:])) + "\n"


def _spaced(lines: list[str]) -> list[str]:
    """A blank line before every table, where twenty lines have room for them."""
    tables = sum(line.startswith("[") for line in lines)
    if len(lines) + tables > _MOST_LINES:
        return lines
    return [part for line in lines for part in (("", line) if line[0] == "[" else (line,))]


def guess_task(model: ModelFacts, data: DataSet) -> TaskGuess:
    """What the outputs mean, as far as their shapes and the data's labels show it."""
    outputs = {spec.name: spec for spec in model.outputs if spec.dtype.startswith("float")}
    if not outputs:
        return TaskGuess(
            None, f"no output holds numbers of a floating type ({_listed(model.outputs)})"
        )
    only = len(model.outputs) == 1
    meanings = {name: _meaning(spec, data, only=only) for name, spec in outputs.items()}
    if only:
        (name,) = outputs
        task, why = meanings[name]
        return TaskGuess(task, why)
    classes = [name for name, (task, _) in meanings.items() if task == "classification"]
    if data.labels is not None and len(classes) == 1 and not data.targets:
        (name,) = classes
        return TaskGuess("classification", meanings[name][1], {name: "classification"})
    known = {name: task for name, (task, _) in meanings.items() if task is not None}
    if len(known) < 2:  # noqa: PLR2004 - several
        why = "; ".join(why for task, why in meanings.values() if task is None)
        return TaskGuess(None, why)
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


def _meaning(spec: TensorSpec, data: DataSet, *, only: bool) -> tuple[OutputTask | None, str]:
    """What one output means, and what shows it; None and what is missing otherwise."""
    target = data.targets.get(spec.name)
    if target is None and only and len(data.targets) == 1:
        target = next(iter(data.targets.values()))
    labels = data.labels if target is None else target
    if labels is None:
        return _unlabelled(spec)
    if labels.dtype.kind == "f":
        if len(spec.shape) == _VECTOR and labels.ndim == _VECTOR and labels.shape[1] > 1:
            return None, f"{spec.name} and its labels are vectors: regression or embedding"
        return "regression", f"{spec.name} is labelled with numbers"
    return _labelled_with_classes(spec, labels)


def _labelled_with_classes(spec: TensorSpec, labels: Array) -> tuple[OutputTask | None, str]:
    width = spec.shape[1] if len(spec.shape) == _VECTOR else 1
    largest = int(labels.max(initial=0))
    if width == 1:
        return None, f"labels are whole numbers, and {spec.name} has the shape {list(spec.shape)}"
    if 0 < width <= largest:
        return None, (
            f"{spec.name} has {width} values a sample, and labels go up to {largest}, so they are "
            "not its classes"
        )
    return "classification", f"{spec.name} has one value a class, and labels are classes"


def _unlabelled(spec: TensorSpec) -> tuple[OutputTask | None, str]:
    if len(spec.shape) == 1 or spec.shape[1:] == (1,):
        return "regression", f"{spec.name} is one number a sample; nothing labels it"
    return None, f"nothing in the data labels {spec.name} {list(spec.shape)}"


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))
