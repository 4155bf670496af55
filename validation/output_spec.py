"""What is asked of one output of a model: its task, and the scores its answers get."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

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
    """

    output: str = ""
    task: OutputTask = "classification"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    alone: bool = False
    traits: tuple[Trait, ...] = ()
    max_values: int = 200

    @property
    def digest(self) -> str:
        """Digest of everything that decides what is computed."""
        metrics = {name: metric.model_dump() for name, metric in self.metrics.items()}
        deciding = [self.output, self.task, metrics, self.alone, list(self.traits), self.max_values]
        return sha256_bytes(canonical_json(deciding))

    def scope(self, data: str) -> str:
        """The scope of findings on some data, e.g. ``evaluation``, or ``evaluation:boxes``."""
        return f"{data}:{self.output}" if self.alone else data


CLASSIFY = OutputSpec()


def output_specs(
    task: Task, outputs: Mapping[str, Output], metrics: Mapping[str, Metric], slices: Slices
) -> tuple[OutputSpec, ...]:
    """One for each declared output of a multi-output model, else one for the model."""
    traits, most = slices.discover, slices.max_values
    if task != "multi-output":
        (name, *_) = (*outputs, "")
        return (OutputSpec(name, task, metrics, traits=traits, max_values=most),)
    first = next(iter(outputs))
    return tuple(
        OutputSpec(
            name,
            output.task,
            {n: m for n, m in metrics.items() if (m.output or first) == name},
            alone=True,
            traits=tuple(t for t in traits if t != "confidence" or output.task == "classification"),
            max_values=most,
        )
        for name, output in outputs.items()
    )
