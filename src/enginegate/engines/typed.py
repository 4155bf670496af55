"""How much of a graph's arithmetic and weights is of which type, read from the graph itself."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from enginegate.sources.onnx_form import graphs

_WORDS: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.DOUBLE: "fp64",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.FLOAT8E4M3FN: "fp8",
}
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
_INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantize", "QAttention")
_FUSED = ("Conv", "Gemm", "MatMul", "Attention")


@dataclass(frozen=True, slots=True)
class Typed:
    """Sums by type.

    Attributes:
        flops: operations of Conv, Gemm and MatMul for one sample, a multiplication and an addition
            counting as two; of layers whose shapes are known.
        weights: numbers in initialisers, without scales, zero points, indices and shapes.
    """

    flops: dict[str, int]
    weights: dict[str, int]


def typed_census(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> Typed:
    """Count a model's operations at these input shapes, the batch taken as one sample."""
    sized = _at(model, shapes)
    flops: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for graph in graphs(sized.graph):
        known = _Known.of(graph)
        for node in graph.node:
            if node.op_type in _PRODUCTS:
                flops[known.word(node)] += _flops(node, known.dims)
        scales = {n for each in graph.node if each.op_type in _PAIR for n in each.input[1:]}
        for tensor in graph.initializer:
            if tensor.data_type in _WORDS and tensor.name not in scales:
                weights[_WORDS[tensor.data_type]] += prod(tensor.dims)
    return Typed(_sorted(flops), _sorted(weights))


def executed_layers(optimised: ModelProto) -> dict[str, int]:
    """Layers that multiply in a graph that ONNX Runtime optimised, by the type they compute in.

    Its fused operators carry their type in their name or in their operands.
    """
    counts: Counter[str] = Counter()
    for graph in graphs(optimised.graph):
        types = _Known.of(graph)
        for node in graph.node:
            if any(word in node.op_type for word in _INTEGER):
                counts["int8"] += any(word in node.op_type for word in (*_FUSED, "QGemm"))
            elif any(word in node.op_type for word in _FUSED):
                counts[types.operand(node)] += 1
            types.follow(node)
    return _sorted(counts)


@dataclass(frozen=True, slots=True)
class _Known:
    """Types and sizes of a graph's tensors, and which node makes each."""

    types: dict[str, int]
    dims: dict[str, tuple[int, ...]]
    makers: dict[str, NodeProto] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: GraphProto) -> "_Known":
        types: dict[str, int] = {}
        dims: dict[str, tuple[int, ...]] = {}
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            types[value.name] = tensor.elem_type
            dims[value.name] = tuple(axis.dim_value for axis in tensor.shape.dim)
        for constant in graph.initializer:
            types[constant.name], dims[constant.name] = constant.data_type, tuple(constant.dims)
        return cls(types, dims, {name: node for node in graph.node for name in node.output})

    def word(self, node: NodeProto) -> str:
        """What a layer computes in: the quantised type if both operands are dequantised."""
        makers = [self.makers.get(name) for name in node.input[:2]]
        if all(maker is not None and maker.op_type == "DequantizeLinear" for maker in makers):
            narrow = makers[1].input[0] if makers[1] is not None else ""
            return _WORDS.get(self.types.get(narrow, 0), "unknown")
        return self.operand(node)

    def operand(self, node: NodeProto) -> str:
        """The type of a layer's operands, from the first that is known."""
        found = (self.types.get(name, 0) for name in reversed(node.input[:2]))
        return next((_WORDS[kind] for kind in found if kind in _WORDS), "unknown")

    def follow(self, node: NodeProto) -> None:
        """Carry types over a node, in graphs that do not state them."""
        kind = next((a.i for a in node.attribute if a.name == "to"), 0)
        if node.op_type == "DequantizeLinear":
            kind = self.types.get(node.input[1], 0)
        elif not kind and node.input:
            kind = self.types.get(node.input[0], 0)
        for name in node.output:
            self.types.setdefault(name, kind)


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


def _flops(node: NodeProto, dims: Mapping[str, tuple[int, ...]]) -> int:
    made, operand = dims.get(node.output[0], ()), dims.get(node.input[1], ())
    if not made or not operand or 0 in made or 0 in operand:
        return 0
    if node.op_type == "Conv":
        return 2 * prod(made) * prod(operand[1:])
    if node.op_type == "ConvTranspose":
        given = dims.get(node.input[0], ())
        return 2 * prod(given) * prod(operand[1:])
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    return 2 * prod(made) * (operand[-1] if transposed or len(operand) == 1 else operand[-2])


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted((+counts).items()))
