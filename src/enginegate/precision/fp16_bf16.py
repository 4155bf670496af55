"""FP32 ONNX -> FP16 or BF16 ONNX, with FP32 inputs and outputs.

ONNX Runtime's converter places the casts. For BF16 every type it wrote is then retargeted, and the
weights are rounded once, from their FP32 values. Operations that neither TensorRT nor ONNX Runtime
has at 16 bits (the converter's block list) stay FP32 between casts.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from enginegate.candidate import Precision
from enginegate.data import Array
from enginegate.errors import tool_errors
from enginegate.precision.onnx_checks import clean_converted, name_nodes, with_opset
from enginegate.sources.onnx_form import canonical, graphs

_BF16_OPSET = 22
_LARGEST = {Precision.FP16: 65504.0, Precision.BF16: (2 - 2**-7) * 2.0**127}
_TYPED_ATTRIBUTES = {"to", "dtype"}


def to_half(
    model: ModelProto, precision: Precision, *, origin: str, keep: tuple[str, ...] = ()
) -> ModelProto:
    """The model with weights and arithmetic at ``fp16`` or ``bf16``.

    Args:
        origin: the file, for messages.
        keep: nodes that stay FP32, by the names that `name_nodes` gives.

    Raises:
        BuildError: an operation of the model cannot be typed at this precision; a ToolError where
            ONNX Runtime's converter broke.
    """
    what = f"The {precision} form of {origin}"
    if precision is Precision.BF16:
        model = with_opset(model, _BF16_OPSET, what=what)
    model = name_nodes(model)
    converted = _to_fp16(model, what, keep)
    if precision is Precision.BF16:
        _retarget(converted, model)
    return clean_converted(converted, what=what)


def _to_fp16(model: ModelProto, what: str, keep: tuple[str, ...]) -> ModelProto:
    from onnxruntime.transformers.float16 import (  # type: ignore[import-untyped]  # noqa: PLC0415
        convert_float_to_float16,
    )

    copy = ModelProto()
    copy.CopyFrom(model)
    with tool_errors(f"{what} cannot be made by ONNX Runtime"):
        converted = convert_float_to_float16(copy, keep_io_types=True, node_block_list=list(keep))
    _drop_repeated_casts(converted)
    _join_kept(converted)
    return canonical(converted)


def _join_kept(model: ModelProto) -> None:
    """Between two FP32 nodes the converter goes through FP16, which would overflow there."""
    casts = [node for node in model.graph.node if node.op_type == "Cast"]
    down = {n.output[0]: n.input[0] for n in casts if _target(n) == TensorProto.FLOAT16}
    up = {n.output[0]: down.get(n.input[0]) for n in casts if _target(n) == TensorProto.FLOAT}
    shown = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = up.get(name) or name
    # Casts up first: while one is there, the cast down that feeds it is used.
    for node in sorted(casts, key=lambda cast: _target(cast) != TensorProto.FLOAT):
        used = {name for graph in graphs(model.graph) for n in graph.node for name in n.input}
        if node.output[0] not in used | shown:
            model.graph.node.remove(node)


def _target(cast: NodeProto) -> int:
    return next((int(a.i) for a in cast.attribute if a.name == "to"), TensorProto.UNDEFINED)


def _drop_repeated_casts(model: ModelProto) -> None:
    """The converter casts once for each use, under one name: x * x at FP32 becomes two casts."""
    made: set[tuple[str, str]] = set()
    for node in list(model.graph.node):
        cast = (node.input[0], node.output[0]) if node.op_type == "Cast" else None
        if cast in made:
            model.graph.node.remove(node)
        elif cast:
            made.add(cast)


def round_to_16_bit(values: Array, precision: Precision) -> Array:
    """Constants at 16 bits. Finite ones stay finite: a mask's -3.4e38 times 0 must not be NaN."""
    kind = np.dtype(np.float16 if precision is Precision.FP16 else ml_dtypes.bfloat16)
    most = _LARGEST[precision]
    clipped = np.where(np.isfinite(values), np.clip(values, -most, most), values)
    return np.asarray(clipped.astype(kind))


def _retarget(converted: ModelProto, original: ModelProto) -> None:
    """Every FLOAT16 in place to BFLOAT16; constants take their value from the FP32 original."""
    exact = dict(_constants(original))
    for key, tensor in _constants(converted):
        if tensor.data_type == TensorProto.FLOAT16:
            values = round_to_16_bit(
                onnx.numpy_helper.to_array(exact.get(key, tensor)), Precision.BF16
            )
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for graph in graphs(converted.graph):
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
                value.type.tensor_type.elem_type = TensorProto.BFLOAT16
        for attribute in (a for node in graph.node for a in node.attribute):
            if attribute.name in _TYPED_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.BFLOAT16


def _constants(model: ModelProto) -> Iterator[tuple[tuple[int, str, str], TensorProto]]:
    """Each constant under a key that survives conversion: depth of graph, owner, attribute."""
    for depth, graph in enumerate(graphs(model.graph)):
        for tensor in graph.initializer:
            yield (depth, tensor.name, ""), tensor
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TENSOR:
                    yield (depth, node.name or node.output[0], attribute.name), attribute.t
