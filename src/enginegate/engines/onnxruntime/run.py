"""Running ONNX Runtime sessions: as they come on a CPU, over warm buckets on a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginegate.candidate import ShapeRange, TensorSpec
from enginegate.data import Array, Tensors
from enginegate.engines.batching import run_rows
from enginegate.engines.onnxruntime.gpu import PROVIDER, Bucketed
from enginegate.engines.onnxruntime.session import OpenSession, specs
from enginegate.precision.deadline import run_in_time

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True)
class SessionRunner:
    """Runs at most ``limit`` rows at a time."""

    session: "InferenceSession"
    specs: tuple[TensorSpec, ...]
    limit: int

    @property
    def device(self) -> str:
        """The provider that runs it."""
        return str(self.session.get_providers()[0])

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of any number of rows."""
        return run_rows(inputs, self.specs, limit=self.limit, run_once=self._once)

    def _once(self, inputs: Tensors) -> Tensors:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, run_in_time(self.session, names, inputs), strict=True))


@dataclass(frozen=True, slots=True)
class GpuRunner:
    """Runs at most the largest bucket at a time."""

    bucketed: Bucketed
    specs: tuple[TensorSpec, ...]
    device: str = PROVIDER

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of any number of rows."""
        limit = self.bucketed.buckets[-1]
        return run_rows(inputs, self.specs, limit=limit, run_once=self.bucketed.run)


def warm(
    opened: OpenSession,
    again: Callable[[], OpenSession],
    sizes: tuple[int, ...],
    shapes: Mapping[str, ShapeRange],
) -> Bucketed:
    """Every bucket settled in a session of its own, and captured where graphs may be.

    Args:
        opened: the first bucket's.
        again: opens one more like it.
        shapes: by input; dynamic axes besides the batch are settled at their best size.
    """
    ready = [opened.session]
    bucketed = Bucketed(
        lambda: ready.pop() if ready else again().session, sizes, graphs=opened.graphs
    )
    examples = {spec.name: _example(spec, shapes.get(spec.name)) for spec in specs(opened.session)}
    bucketed.warm_up(examples)
    return bucketed


def _example(spec: TensorSpec, shape: ShapeRange | None) -> Array:
    """One row of ones: an index that exists, a mask that hides nothing."""
    best = shape.best[1:] if shape else [max(axis, 1) for axis in spec.shape[1:]]
    row: Array = np.ones((1, *best), spec.dtype)
    return row
