"""ONNX Runtime, to measure models that are not engines yet: on the CPU, or where calibration runs.

The CUDA provider computes FP32 with TF32 off, so what it finds differs from the CPU's by rounding
only; ranges and everything made with them may differ in their last digits all the same.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from onnx import TensorProto, helper

from enginegate.data import Array, Tensors
from enginegate.errors import BuildError, InputError, told_by, tool_errors
from enginegate.machine import gpus
from enginegate.precision.deadline import limit_opening, run_in_time

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]


CalibrationDevice = Literal["auto", "cpu", "cuda"]
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_FP32 = {"use_tf32": "0"}
_OPSET, _IR = 17, 8


class CalibrationProvider(NamedTuple):
    """What calibration runs on, found out by opening a session.

    Attributes:
        name: the execution provider.
        fell_back: why it is not a GPU's although there is a GPU; empty where nothing fell back.
    """

    name: str = _CPU
    fell_back: str = ""

    @property
    def identity(self) -> str:
        """What a calibrated engine says of it; nothing of a processor, as it always was."""
        if self.name != _CPU:
            return f" on {self.name}"
        return f" on the CPU ({self.fell_back})" if self.fell_back else ""


ON_CPU = CalibrationProvider()


@cache
def calibration_provider(device: CalibrationDevice) -> CalibrationProvider:
    """Where calibration runs on this machine; the CUDA libraries must have been loaded.

    Raises:
        BuildError: a GPU is insisted on, and ONNX Runtime does not get one.
    """
    if device == "cpu" or (device == "auto" and not gpus()):
        return ON_CPU
    why = _no_cuda()
    if not why:
        return CalibrationProvider(_CUDA)
    if device == "cuda":
        raise BuildError(
            f'[calibration] device is "cuda", and {why}. Install onnxruntime-gpu with the CUDA '
            'libraries that it names, or set device = "auto".'
        )
    return CalibrationProvider(fell_back=why)


def _no_cuda() -> str:
    """Why ONNX Runtime gets no GPU here; empty if it does. It falls back without an error."""
    import onnxruntime as ort  # noqa: PLC0415

    if _CUDA not in ort.get_available_providers():
        return f"ONNX Runtime {ort.__version__} has no CUDA provider here"
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [value], [out])
    opsets = [helper.make_opsetid("", _OPSET)]
    tiny = helper.make_model(graph, opset_imports=opsets, ir_version=_IR)
    try:
        session = open_measuring_session(tiny.SerializeToString(), what="a sum", provider=_CUDA)
    except BuildError as error:
        return str(error)
    used = str(session.get_providers()[0])
    return "" if used == _CUDA else f"the CUDA provider fell back to {used}"


class Batches(Protocol):
    """Samples that are read in batches."""

    def batches(self) -> Iterator[Tensors]:
        """Inputs, one batch at a time."""
        ...


def open_cpu_session(
    model: Path | bytes, *, what: str, optimised: bool = True
) -> "InferenceSession":
    """A session on the CPU; see `open_measuring_session`."""
    return open_measuring_session(model, what=what, optimised=optimised)


def open_measuring_session(
    model: Path | bytes, *, what: str, optimised: bool = True, provider: str = _CPU
) -> "InferenceSession":
    """A session at the level that keeps Q/DQ and Cast pairs as they are written.

    Args:
        model: a file, or a serialised model.
        what: the model, for the message.
        optimised: fold and fuse what does not depend on types; off keeps every node.
        provider: what runs it, as `calibration_provider` found it.

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
    wanted = provider if provider == _CPU else (provider, _FP32)
    try:
        with limit_opening(options, what=what):
            return ort.InferenceSession(source, options, providers=[wanted])
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
