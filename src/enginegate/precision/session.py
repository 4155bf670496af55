"""ONNX Runtime on the CPU, to measure models that are not engines yet."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from enginegate.data import Array, Tensors
from enginegate.errors import BuildError, InputError, told_by, tool_errors
from enginegate.precision.deadline import limit_opening, run_in_time

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]


class Batches(Protocol):
    """Samples that are read in batches."""

    def batches(self) -> Iterator[Tensors]:
        """Inputs, one batch at a time."""
        ...


def open_cpu_session(
    model: Path | bytes, *, what: str, optimised: bool = True
) -> "InferenceSession":
    """A session at the level that keeps Q/DQ and Cast pairs as they are written.

    Args:
        model: a file, or a serialised model.
        what: the model, for the message.
        optimised: fold and fuse what does not depend on types; off keeps every node.

    Raises:
        BuildError: ONNX Runtime cannot load it.
        TookTooLongError: it took too long.
    """
    import onnxruntime as ort  # noqa: PLC0415

    levels = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = (
        levels.ORT_ENABLE_BASIC if optimised else levels.ORT_DISABLE_ALL
    )
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = str(model) if isinstance(model, Path) else model
    try:
        with limit_opening(options, what=what):
            return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except InputError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no base class of its own
        raise BuildError(
            f"{what} cannot be run by ONNX Runtime {ort.__version__}: {told_by(error)}\n"
            "If it names an operator, export the model at another opset or without it."
        ) from error


def outputs_of(session: "InferenceSession", sample: Batches) -> Tensors:
    """The session's outputs for every row, run in batches."""
    parts = list(batches_of(session, sample))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def batches_of(session: "InferenceSession", sample: Batches) -> Iterator[Tensors]:
    """The session's outputs, one batch at a time."""
    names = [output.name for output in session.get_outputs()]
    for batch in sample.batches():
        with tool_errors("ONNX Runtime cannot run the model on the calibration samples"):
            found = run_in_time(session, names, batch)
        yield dict(zip(names, found, strict=True))


def relative_error(expected: Tensors, given: Tensors) -> float:
    """Root mean square error over the outputs' own spread; infinite where NaN or Inf was given.

    The worst output counts. 0 is equal, 1 is as wrong as answering the mean.
    """
    return max(_relative(expected[name], given[name]) for name in expected)


def _relative(expected: Array, given: Array) -> float:
    if expected.dtype.kind != "f" or expected.size == 0:
        return float(np.mean(expected != given)) if expected.size else 0.0
    exact, answer = expected.astype(np.float64), given.astype(np.float64)
    if not np.isfinite(answer).all():
        return float("inf")
    spread = float(np.square(exact - exact.mean(axis=0)).mean())
    error = float(np.square(exact - answer).mean())
    return float(np.sqrt(error / spread)) if spread else float(np.sqrt(error))
