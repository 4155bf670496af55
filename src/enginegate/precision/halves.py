"""FP32 ONNX -> FP16 or BF16 ONNX, with FP32 inputs and outputs.

ONNX Runtime's converter places the casts. For BF16 every type it wrote is then retargeted, and the
weights are rounded once, from their FP32 values. Operations that neither TensorRT nor ONNX Runtime
has at 16 bits (the converter's block list) stay FP32 between casts.
"""

from collections.abc import Iterator

import ml_dtypes
import onnx
from onnx import AttributeProto, ModelProto, TensorProto

from enginegate.candidate import Precision
from enginegate.errors import BuildError
from enginegate.precision.well_formed import well_formed, with_opset
from enginegate.sources.onnx_form import canonical, graphs

_BF16_OPSET = 22
_TYPED_ATTRIBUTES = {"to", "dtype"}


def to_half(model: ModelProto, precision: Precision, *, origin: str) -> ModelProto:
    """The model with weights and arithmetic at ``fp16`` or ``bf16``.

    Raises:
        BuildError: an operation of the model cannot be typed at this precision.
    """
    what = f"The {precision} form of {origin}"
    if precision is Precision.BF16:
        model = with_opset(model, _BF16_OPSET, what=what)
    converted = _to_fp16(model, what)
    if precision is Precision.BF16:
        _retarget(converted, model)
    return well_formed(converted, what=what)


def _to_fp16(model: ModelProto, what: str) -> ModelProto:
    from onnxruntime.transformers.float16 import (  # type: ignore[import-untyped]  # noqa: PLC0415
        convert_float_to_float16,
    )

    copy = ModelProto()
    copy.CopyFrom(model)
    try:
        converted = convert_float_to_float16(copy, keep_io_types=True)
    except (ValueError, KeyError, AssertionError, RuntimeError) as error:
        raise BuildError(
            f"{what} cannot be made by ONNX Runtime: {type(error).__name__}: {error}"
        ) from error
    return canonical(converted)


def _retarget(converted: ModelProto, original: ModelProto) -> None:
    """Every FLOAT16 in place to BFLOAT16; constants take their value from the FP32 original."""
    exact = dict(_constants(original))
    for key, tensor in _constants(converted):
        if tensor.data_type == TensorProto.FLOAT16:
            values = onnx.numpy_helper.to_array(exact.get(key, tensor))
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(ml_dtypes.bfloat16), name))
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
