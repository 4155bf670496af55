"""Histograms of a model's activations on real samples: one pass serves every method."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from enginegate.errors import BuildError
from enginegate.messages import counted
from enginegate.precision.calibration.methods import Histogram
from enginegate.precision.calibration.sample import CalibrationSample
from enginegate.precision.session import batches_of, open_measuring_session

# Counting is about half NumPy's arithmetic, which runs side by side, and half what does not.
_MOST_WORKERS = 3


def histograms(
    model: ModelProto,
    scratch: Path,
    *,
    operators: Iterable[str],
    sample: CalibrationSample,
    provider: str,
) -> dict[str, Histogram]:
    """What flows in and out of the operators, by tensor name. Memory does not grow with the data.

    Args:
        model: with inferred shapes.
        scratch: a folder for the model with more outputs.
        operators: types of the nodes whose float tensors are measured.
        provider: what runs the model.

    Raises:
        BuildError: ONNX Runtime cannot run the model, or an activation is NaN or Inf on a sample.
    """
    watched = ModelProto()
    watched.CopyFrom(model)
    names = _float_tensors(watched, frozenset(operators))
    already = {value.name for value in watched.graph.output}
    known = {v.name: v for v in (*watched.graph.input, *watched.graph.value_info)}
    watched.graph.output.extend(known[name] for name in names if name not in already)
    path = scratch / "watched.onnx"
    onnx.save(watched, path)
    session = open_measuring_session(
        path, what="The model, with activations as outputs", optimised=False, provider=provider
    )
    found = {name: Histogram.empty() for name in names}
    with ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1)) as workers:
        for batch in batches_of(session, sample):
            arrays = (np.asarray(batch[name]) for name in names)
            added = workers.map(Histogram.add, found.values(), arrays)
            found = dict(zip(names, added, strict=True))
    _check_finite(found)
    return found


def _float_tensors(model: ModelProto, operators: frozenset[str]) -> list[str]:
    constants = {tensor.name for tensor in model.graph.initializer}
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)
    }
    touched = (
        name
        for node in model.graph.node
        if node.op_type in operators
        for name in (*node.input, *node.output)
    )
    floats = (n for n in touched if kinds.get(n) == TensorProto.FLOAT and n not in constants)
    return list(dict.fromkeys(floats))


def _check_finite(found: dict[str, Histogram]) -> None:
    for name, histogram in found.items():
        if histogram.nonfinite:
            raise BuildError(
                f"The activation {name!r} is NaN or Inf "
                f"{counted(histogram.nonfinite, 'time')} in FP32 on "
                "the calibration samples, so it has no scale. Look for the samples or the layer "
                "that cause it, or drop int8 and fp8 from [candidates]."
            )
