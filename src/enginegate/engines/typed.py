"""How much of a graph's arithmetic and weights is of which type, read from the graph itself."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import onnx
from onnx import ModelProto, NodeProto

from enginegate.precision.census import INDICES, RECURRENT, WEIGHTED, WORDS, operand, quantised_type
from enginegate.sources.onnx_form import graphs
from enginegate.sources.scopes import Scope, Sizes, walk

_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
_INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantize", "QAttention")
_FUSED = ("Conv", "Gemm", "MatMul", "Attention", "GRU", "LSTM", "RNN")


@dataclass(frozen=True, slots=True)
class Typed:
    """Sums by type.

    Attributes:
        flops: operations of Conv, Gemm, MatMul and recurrent layers for one sample, a
            multiplication and an addition counting as two; of layers whose shapes are known. What
            is in the body of a Loop or a Scan counts as often as it runs, where that is known.
        weights: numbers in initialisers, without scales, zero points, indices and shapes.
        unsized: layers whose shapes are not known.
        multiplied: weights of layers, once for each time that their graph runs; of layers whose
            second operand has a known shape.
    """

    flops: dict[str, int]
    weights: dict[str, int]
    unsized: int = 0
    multiplied: dict[str, int] = field(default_factory=dict)


def typed_census(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Typed:
    """Count a model's operations at these input shapes, the batch taken as one sample."""
    sized = _at(model, shapes)
    flops: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    multiplied: Counter[str] = Counter()
    unsized = 0
    for node, scope in walk(sized.graph):
        if node.op_type in WEIGHTED and operand(node, scope) not in INDICES:
            made, word = scope.runs * _flops(node, scope.sizes), _word(node, scope)
            flops[word] += made
            multiplied[word] += scope.runs * _held(node, scope.sizes)
            unsized += not made
    for graph in graphs(sized.graph):
        scales = {n for each in graph.node if each.op_type in _PAIR for n in each.input[1:]}
        for tensor in graph.initializer:
            if tensor.data_type in WORDS and tensor.name not in scales:
                weights[WORDS[tensor.data_type]] += prod(tensor.dims)
    return Typed(_sorted(flops), _sorted(weights), unsized, _sorted(multiplied))


def executed_layers(optimised: ModelProto) -> dict[str, int]:
    """Layers that multiply in a graph that ONNX Runtime optimised, by the type they compute in.

    Its fused operators carry their type in their name or in their operands.
    """
    counts: Counter[str] = Counter()
    for node, scope in walk(optimised.graph):
        if any(word in node.op_type for word in _INTEGER):
            counts["int8"] += any(word in node.op_type for word in (*_FUSED, "QGemm"))
        elif any(word in node.op_type for word in _FUSED):
            kind = operand(node, scope)
            if kind not in INDICES:
                counts[WORDS.get(kind, "unknown")] += 1
    return _sorted(counts)


def _word(node: NodeProto, scope: Scope) -> str:
    """What a layer computes in: the quantised type if all its operands are dequantised."""
    narrow = quantised_type(node, scope)
    return WORDS.get(operand(node, scope) if narrow is None else narrow, "unknown")


def _at(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> ModelProto:
    sized = ModelProto()
    sized.CopyFrom(model)
    del sized.graph.value_info[:]
    for value in sized.graph.input:
        axes = value.type.tensor_type.shape.dim
        wanted = shapes.get(value.name, tuple(axis.dim_value or 1 for axis in axes))
        for index, (axis, size) in enumerate(zip(axes, wanted, strict=True)):
            axis.dim_value = 1 if index == 0 else size
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(sized, data_prop=True)


def _flops(node: NodeProto, sizes: Mapping[str, Sizes]) -> int:
    """For one run of the node; 0 if a size is not known."""
    if node.op_type in RECURRENT:
        return _recurrent(node, sizes)
    made, second = sizes.get(node.output[0], ()), sizes.get(node.input[1], ())
    if not made or not second or min(made) <= 0 or min(second) <= 0:
        return 0
    if node.op_type == "Conv":
        return 2 * prod(made) * prod(second[1:])
    if node.op_type == "ConvTranspose":
        given = sizes.get(node.input[0], ())
        return max(2 * prod(given) * prod(second[1:]), 0)
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return 2 * prod(made) * (second[-1] if transposed or len(second) == 1 else second[-2])


def _recurrent(node: NodeProto, sizes: Mapping[str, Sizes]) -> int:
    """Every step of every sample multiplies all weights of the input and of the state once."""
    steps = sizes.get(node.input[0], ())[:2]  # steps and samples, in either order
    return 2 * prod(steps) * _held(node, sizes) if steps and min(steps) > 0 else 0


def _held(node: NodeProto, sizes: Mapping[str, Sizes]) -> int:
    """Numbers that a layer multiplies its input (and its state, if it is recurrent) by."""
    shapes = [sizes.get(name, ()) for name in node.input[1 : 3 if node.op_type in RECURRENT else 2]]
    return sum(prod(shape) for shape in shapes if shape and min(shape) > 0)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted((+counts).items()))
