"""What must hold of an FP32 model before it is converted, and of every converted model.

Also names of nodes, by which conversions are told what to keep at FP32.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NoReturn

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from enginegate.errors import BuildError, ModelError, tool_errors
from enginegate.messages import counted
from enginegate.sources.onnx_form import canonical, graphs, opset, tensors

_REAL = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})
_OF_ONNXRUNTIME = frozenset({"com.microsoft"})  # ONNX has no schemas of these
LAYERS = ("Conv", "Gemm", "MatMul")
_JOINS = frozenset({"Add", "Concat"})


def check_source(model: ModelProto, *, origin: str) -> None:
    """Refuse what no converter can handle, by name.

    Raises:
        ModelError: an operator is not in the model's operator set, or a weight is NaN.
    """
    _check_operators(model, origin)
    _check_weights(model, origin)


def _check_operators(model: ModelProto, origin: str) -> None:
    versions = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    own = {(function.domain, function.name) for function in model.functions}
    for graph in graphs(model.graph):
        for node in graph.node:
            known = node.domain in _OF_ONNXRUNTIME or (node.domain, node.op_type) in own
            version = versions.get(node.domain or "ai.onnx", 0)
            domain = "" if node.domain == "ai.onnx" else node.domain
            if not known and not onnx.defs.has(node.op_type, version, domain):
                _refuse(node, version, origin)


def _refuse(node: NodeProto, version: int, origin: str) -> NoReturn:
    domain = node.domain or "ai.onnx"
    place = f"node {node.name!r}" if node.name else f"the node that makes {node.output[0]!r}"
    raise ModelError(
        f"{origin}: {place} is {node.op_type} of {domain} opset {version}, which has no such "
        "operator. Export the model at another opset, or write that part of it with standard "
        "operators: runtimes here have no kernel for it."
    )


def _check_weights(model: ModelProto, origin: str) -> None:
    """No precision can hold NaN. Infinity is let through: an attention mask may hold it."""
    for tensor in tensors(model.graph):
        if tensor.data_type not in _REAL:
            continue
        bad = np.isnan(numpy_helper.to_array(tensor))
        if bad.any():
            first = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(bad)))
            raise ModelError(
                f"{origin}: weight {tensor.name!r} holds "
                f"{counted(int(bad.sum()), 'NaN value')}, first at "
                f"{first}. Training diverged or the file is damaged; register a sound version."
            )


def clean_converted(model: ModelProto, *, what: str) -> ModelProto:
    """The model with its nodes in order, without notes, and valid by ONNX's own checker.

    Args:
        what: the model and precision, for the message.

    Raises:
        BuildError: the tool made a graph that contradicts its own types.
    """
    from onnxruntime.quantization.onnx_model import (  # type: ignore[import-untyped]  # noqa: PLC0415
        ONNXModel,
    )

    sortable = ONNXModel(model)
    sortable.topological_sort()
    clean = canonical(sortable.model)
    try:
        onnx.checker.check_model(clean, full_check=True)
        onnx.shape_inference.infer_shapes(clean, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise BuildError(
            f"{what} is not valid ONNX: {str(error).strip()}\n"
            "Drop that precision from [candidates], or keep that operation out of the model."
        ) from error
    return clean


def with_opset(model: ModelProto, version: int, *, what: str) -> ModelProto:
    """The model at this operator set or a later one.

    Raises:
        ToolError: ONNX cannot raise it.
    """
    if opset(model) >= version:
        return model
    with tool_errors(
        f"{what} needs opset {version}, the model uses {opset(model)}, and ONNX cannot raise it",
        remedy=f"Export the model at opset {version}.",
    ):
        return onnx.version_converter.convert_version(model, version)


def name_nodes(model: ModelProto) -> ModelProto:
    """The model with a name of its own for every node; the same names every time."""
    given = ModelProto()
    given.CopyFrom(model)
    taken = Counter(node.name for node in given.graph.node)
    for index, node in enumerate(given.graph.node):
        if not node.name or taken[node.name] > 1:
            node.name = f"{node.op_type}_{index}"
    return given


def layers(model: ModelProto) -> tuple[str, ...]:
    """Names of the Conv, Gemm and MatMul nodes, in order."""
    return tuple(node.name for node in model.graph.node if node.op_type in LAYERS)


def regions(model: ModelProto, names: Iterable[str], between: Iterable[str]) -> frozenset[str]:
    """The nodes, and those of the types ``between`` that follow them, up to the next layer.

    A layer at full precision gains nothing if the ReLU behind it rounds its result twice. What
    comes before it belongs to the layer before: a pair after a ReLU wastes no level on values below
    zero. Where branches meet the walk ends, or a residual chain would drag the whole network along.
    """
    kinds, wanted = frozenset(between), frozenset(names)
    takers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            takers[name].append(node)
    found = {node.name: node for node in model.graph.node if node.name in wanted}
    waiting = list(found.values())
    while waiting:
        node = waiting.pop()
        for other in (taker for name in node.output for taker in takers[name]):
            if other.op_type in kinds and other.name not in found:
                found[other.name] = other
                if other.op_type not in _JOINS:
                    waiting.append(other)
    return frozenset(found)


def behind_no_layer(
    model: ModelProto, between: Iterable[str], keep: Iterable[str] = ()
) -> frozenset[str]:
    """Nodes of the types ``between`` that follow no layer, but those that are kept, by others.

    Quantising them would round what stays in FP32 before and behind them, and save nothing.
    """
    kinds, kept = frozenset(between), frozenset(keep)
    layer_names = (name for name in layers(model) if name not in kept)
    takers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for name in node.input:
            takers[name].append(node)
    starts = frozenset(layer_names)
    waiting = [node for node in model.graph.node if node.name in starts]
    behind: set[str] = set()
    while waiting:
        node = waiting.pop()
        for taker in (other for name in node.output for other in takers[name]):
            if taker.op_type in kinds and taker.name not in behind:
                behind.add(taker.name)
                waiting.append(taker)
    return frozenset(
        node.name for node in model.graph.node if node.op_type in kinds and node.name not in behind
    )
