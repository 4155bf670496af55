"""What a graph really computes in, read from the graph itself."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from enginegate.sources.onnx_form import graphs

WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_WORDS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.DOUBLE: "fp64",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.FLOAT8E4M3FN: "fp8",
}


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of layers that hold weights or multiply matrices.

    Attributes:
        weighted: Conv, ConvTranspose, Gemm and MatMul layers by the type they compute in; a layer
            whose two operands come from DequantizeLinear computes in the quantised type.
        quantised: how many of them are fed by Quantize/Dequantize pairs.
    """

    weighted: dict[str, int]
    quantised: int


def census(model: ModelProto) -> Census:
    """Count the layers of a model, those of its control-flow branches included."""
    inferred = onnx.shape_inference.infer_shapes(model)
    counts: Counter[str] = Counter()
    quantised = 0
    for graph in graphs(inferred.graph):
        types = dict(_types(graph))
        sources = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            if node.op_type not in WEIGHTED:
                continue
            narrow = _quantised_type(node, sources, types)
            quantised += narrow is not None
            kind = types.get(node.input[1], TensorProto.UNDEFINED) if narrow is None else narrow
            counts[_WORDS.get(kind, "unknown")] += 1
    return Census(dict(sorted(counts.items())), quantised)


def _quantised_type(
    node: NodeProto, sources: dict[str, NodeProto], types: dict[str, int]
) -> int | None:
    feeding = [sources.get(name) for name in node.input[:2]]
    if any(source is None or source.op_type != "DequantizeLinear" for source in feeding):
        return None
    return types.get(node.input[1]) if not feeding[1] else types.get(feeding[1].input[0])


def _types(graph: GraphProto) -> Iterator[tuple[str, int]]:
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, value.type.tensor_type.elem_type
    for tensor in graph.initializer:
        yield tensor.name, tensor.data_type
