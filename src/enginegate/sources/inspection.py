"""What a model is, found by opening it once: its tensors, layers, size of outputs and speed.

Opens and converts it as an export does, with the same permissions, and keeps nothing.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from zipfile import BadZipFile, ZipFile

import numpy as np
from onnx import ModelProto

from enginegate.candidate import TensorSpec
from enginegate.data import Array, DataSet
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_form
from enginegate.sources.dispatch import open_source
from enginegate.sources.parity import OpenOnnx

_SAMPLES = 64  # enough to see how large outputs are; a request's worth of time for any model
_TIMED_RUNS = 5
_QUANTISED = frozenset({"Conv", "Gemm", "MatMul"})
_DESCRIPTION = "models/model.json"
_MOST_DESCRIPTION = 1 << 26
# As torch.export's own schema numbers them.
_DTYPES = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    12: "bool",
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What one look at a model shows.

    Attributes:
        inputs: dtypes and shapes; the first axis, and others that may vary, are -1.
        axes: inputs and axes of each dynamic size besides the batch, by the size's name.
        largest: the largest absolute value of any output.
        sample_ms: time of one sample in ONNX Runtime at FP32, not optimised, in milliseconds.
        quantisable: layers that int8 can speed up.
        shares: outputs whose values are all from 0 to 1, as probabilities are.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    axes: Mapping[str, tuple[tuple[str, int], ...]]
    largest: float
    sample_ms: float
    quantisable: int
    shares: frozenset[str]


def program_inputs(path: Path) -> tuple[TensorSpec, ...]:
    """The arguments of a program that torch.export.save wrote, by its description alone.

    Returns:
        None of them where the file does not say, or says it in another way.
    """
    try:
        with ZipFile(path) as archive:
            found = [each for each in archive.infolist() if each.filename.endswith(_DESCRIPTION)]
            if len(found) != 1 or found[0].file_size > _MOST_DESCRIPTION:
                return ()
            described = json.loads(archive.read(found[0]))["graph_module"]
        (names,) = (
            each["signature"]["forward_arg_names"]
            for each in described["module_call_graph"]
            if each["fqn"] == ""
        )
        inputs = [each.get("user_input") for each in described["signature"]["input_specs"]]
        tensors = [each["arg"]["as_tensor"]["name"] for each in inputs if each]
        values = [described["graph"]["tensor_values"][name] for name in tensors]
        return tuple(
            TensorSpec(
                name=name,
                dtype=_DTYPES[value["dtype"]],
                shape=(-1, *(size.get("as_int", -1) for size in value["sizes"][1:])),
            )
            for name, value in zip(names, values, strict=True)
        )
    except (OSError, BadZipFile, LookupError, TypeError, AttributeError, ValueError):
        return ()


def inspect_source(
    source: ModelSource, data: DataSet, *, tracking_uri: str, open_onnx: OpenOnnx
) -> ModelFacts:
    """Open a model, convert it, and run some samples.

    Raises:
        ModelError: it is missing, refused, or cannot become ONNX.
        DataError: the samples do not fit it.
        TrackingError: MLflow cannot be reached.
    """
    with (
        open_source(source, data, tracking_uri=tracking_uri) as opened,
        tempfile.TemporaryDirectory(prefix="enginegate-look-") as folder,
    ):
        exported = opened.convert(data, Path(folder))
        model = onnx_form.read_onnx(exported.path, origin=opened.uri)
        onnx_form.check_sound(model, origin=opened.uri, path=exported.path)
        inputs = onnx_form.input_specs(model)
        data.check_fits(inputs)
        samples = data.head(_SAMPLES)
        with open_onnx(exported.path) as running:
            answers = running.run(dict(samples.inputs))
            one = samples.head(1).inputs
            times = []
            for _ in range(_TIMED_RUNS):
                start = time.perf_counter()
                running.run(dict(one))
                times.append(time.perf_counter() - start)
    return ModelFacts(
        inputs=inputs,
        outputs=onnx_form.output_specs(model),
        axes=onnx_form.dynamic_axes(model),
        largest=max((_largest(values) for values in answers.values()), default=0.0),
        sample_ms=median(times) * 1e3,
        quantisable=_quantisable(model),
        shares=frozenset(name for name, each in answers.items() if _are_shares(each)),
    )


def _largest(values: Array) -> float:
    if values.dtype.kind not in "fiu" or not values.size:
        return 0.0
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    return float(np.abs(finite.astype(np.float64)).max(initial=0.0))


def _quantisable(model: ModelProto) -> int:
    nodes = (node for graph in onnx_form.graphs(model.graph) for node in graph.node)
    return sum(node.op_type in _QUANTISED for node in nodes)


def _are_shares(values: Array) -> bool:
    return values.dtype.kind == "f" and bool(((values >= 0.0) & (values <= 1.0)).all())
