"""What a graph really computes in, read from the graph itself."""

from collections import Counter
from dataclasses import dataclass, field

import onnx
from onnx import ModelProto, NodeProto, TensorProto

from enginegate.sources.scopes import Scope, walk

RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}) | RECURRENT
WORDS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.DOUBLE: "fp64",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.FLOAT8E4M3FN: "fp8",
}
# Products of positions and lengths: no precision names what they compute in.
INDICES = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.UINT64, TensorProto.UINT32})


@dataclass(frozen=True, slots=True)
class Census:
    """Counts of layers that hold weights or multiply matrices.

    Attributes:
        weighted: Conv, ConvTranspose, Gemm, MatMul, GRU, LSTM and RNN layers by the type they
            compute in; a layer whose operands all come from DequantizeLinear computes in the
            quantised type.
        quantised: how many of them are fed by Quantize/Dequantize pairs.
        recurrent: those of them that are GRU, LSTM or RNN.
    """

    weighted: dict[str, int]
    quantised: int
    recurrent: dict[str, int] = field(default_factory=dict)


def census(model: ModelProto) -> Census:
    """Count the layers of a model, those in the bodies of If, Loop and Scan included."""
    inferred = onnx.shape_inference.infer_shapes(model)
    counts: Counter[str] = Counter()
    recurrent: Counter[str] = Counter()
    quantised = 0
    for node, scope in walk(inferred.graph):
        if node.op_type not in WEIGHTED or operand(node, scope) in INDICES:
            continue
        narrow = quantised_type(node, scope)
        quantised += narrow is not None
        word = WORDS.get(operand(node, scope) if narrow is None else narrow, "unknown")
        counts[word] += 1
        recurrent[word] += node.op_type in RECURRENT
    return Census(dict(sorted(counts.items())), quantised, dict(sorted((+recurrent).items())))


def quantised_type(node: NodeProto, scope: Scope) -> int | None:
    """The type of the weights before they were dequantised; None unless all operands were."""
    feeding = [scope.makers.get(name) for name in node.input[: _operands(node)]]
    if any(source is None or source.op_type != "DequantizeLinear" for source in feeding):
        return None
    weight = feeding[1]
    return scope.types.get(weight.input[0], 0) if weight is not None else 0


def operand(node: NodeProto, scope: Scope) -> int:
    """The type of a layer's operands: its weights', else the first that is known; 0 if none is."""
    names = list(node.input[: _operands(node)])
    kinds = (scope.types.get(name, 0) for name in (*names[1:], *names[:1]))
    return next((kind for kind in kinds if kind), 0)


def _operands(node: NodeProto) -> int:
    """A recurrent layer multiplies its input and its state, each by weights of their own."""
    return 3 if node.op_type in RECURRENT else 2
