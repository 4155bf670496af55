"""What a graph computes in, and how much: layers, operations, weights and traffic, by one walk.

Layers are Conv, ConvTranspose, Gemm, MatMul, GRU, LSTM and RNN; a layer whose operands all come
from DequantizeLinear computes in the quantised type. A multiplication and an addition count as two
operations; other nodes by the size of what they make. Traffic is what layers that multiply,
normalise, pool or move data must read and write if nothing stays in a cache between them.
Element-wise nodes are taken as fused into the node before them, as the engines here do: they cost
traffic only for a second operand.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto
from onnx.inliner import inline_local_functions

from enginegate.candidate import Precision
from enginegate.precision.graph_walk import Scope, walk
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
_BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64), 64),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 32),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16), 16),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), 16),
}
_NARROW_BITS = 8  # bool, int8, uint8, FP8
_FLOAT_BITS = {
    **dict.fromkeys((Precision.FP32, Precision.TF32), 32),
    **dict.fromkeys((Precision.FP16, Precision.BF16), 16),
    **dict.fromkeys((Precision.INT8, Precision.FP8), 8),
}
# Products of positions and lengths: no precision names what they compute in.
_INDICES = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.UINT64, TensorProto.UINT32})
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"}) | _RECURRENT
# Inference needs the values of small constants, which may be shapes; weights only cost memory.
_LARGE = 1024
_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
# How operators are named that ONNX Runtime fuses layers into.
_INTEGER = ("QLinear", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantize", "QAttention")
_FUSED = ("Conv", "Gemm", "MatMul", "Attention", "GRU", "LSTM", "RNN")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Cost nothing: names for the same bytes, done together with a neighbour, or all in their bodies.
_FREE = _names(
    "Constant ConstantOfShape Shape Size Reshape Flatten Squeeze Unsqueeze Identity Dropout Cast "
    "Range DequantizeLinear QuantizeLinear DynamicQuantizeLinear If Loop Scan"
)
# Cost bytes only.
_MOVING = _names(
    "Transpose Concat Split Slice Gather GatherND GatherElements ScatterND ScatterElements Pad "
    "Expand Tile Resize Upsample DepthToSpace SpaceToDepth TopK NonZero OneHot EyeLike Trilu "
    "ReverseSequence Compress"
)
_TAKING = _names("Gather GatherND GatherElements Slice Split")  # read only what they make
# One operation a number that is made.
_ELEMENTWISE = _names(
    "Add Sub Mul Div Pow Sqrt Exp Log Erf Tanh Sigmoid HardSigmoid HardSwish Swish Relu LeakyRelu "
    "PRelu Elu Selu Celu Gelu FastGelu QuickGelu BiasGelu Mish Softplus Softsign ThresholdedRelu "
    "Clip Abs Neg Reciprocal Floor Ceil Round Sign Sin Cos Tan Mod Min Max Mean Sum Where Equal "
    "Greater GreaterOrEqual Less LessOrEqual And Or Not Xor IsNaN IsInf BitShift "
    "QLinearAdd QLinearMul"
)
# So many operations a number that is made.
_NORMALISING = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "QLinearSoftmax"), 5),
    **dict.fromkeys(("LayerNormalization", "SkipLayerNormalization", "GroupNormalization"), 8),
    **dict.fromkeys(("InstanceNormalization", "MeanVarianceNormalization", "LRN"), 8),
    **dict.fromkeys(("SimplifiedLayerNormalization", "RMSNormalization", "LpNormalization"), 6),
    **dict.fromkeys(("SkipSimplifiedLayerNormalization", "BatchNormalization"), 6),
}
# One operation a number that is read; how their names begin.
_FOLDING = ("Reduce", "Global", "ArgMax", "ArgMin", "CumSum")


@dataclass(frozen=True, slots=True)
class GraphStats:
    """What one batch of a graph computes. Sums "by type" have words such as fp16 as keys.

    The branches of an If are each counted once; the body of a Loop or a Scan as often as it runs,
    where that is known, else once.

    Attributes:
        layers: layers by the type they compute in.
        quantised: how many of them are fed by Quantize/Dequantize pairs.
        recurrent: those of them that are GRU, LSTM or RNN, by type.
        layer_flops: their operations by type, of layers whose shapes are known.
        layer_weights: numbers that they multiply their inputs by, once for each time that their
            graph runs, by type; of layers whose second operand has a known shape.
        unsized: layers whose operations are not known.
        weights: numbers in initialisers by type, without scales, zero points, indices and shapes.
        batch_size: samples.
        flops: operations of all nodes.
        bytes_moved: read and written by all nodes.
        nodes: of the graph.
        uncounted: operators whose operations or traffic are not known -> nodes.
    """

    layers: dict[str, int]
    quantised: int = 0
    recurrent: dict[str, int] = field(default_factory=dict)
    layer_flops: dict[str, int] = field(default_factory=dict)
    layer_weights: dict[str, int] = field(default_factory=dict)
    unsized: int = 0
    weights: dict[str, int] = field(default_factory=dict)
    batch_size: int = 1
    flops: float = 0.0
    bytes_moved: float = 0.0
    nodes: int = 0
    uncounted: dict[str, int] = field(default_factory=dict)

    @property
    def covered(self) -> float:
        """Share of the nodes whose operations and traffic were counted, 0 to 1."""
        return 1.0 - sum(self.uncounted.values()) / self.nodes if self.nodes else 0.0


def graph_stats(
    model: ModelProto | Path,
    *,
    batch_size: int = 1,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    precision: Precision = Precision.FP32,
    types: Mapping[str, str] | None = None,
) -> GraphStats:
    """Count one batch of a graph.

    Args:
        model: a graph or its file; weights in files beside it are not needed.
        batch_size: samples, along the first axis of every input.
        shapes: of inputs, e.g. those of a typical request, for axes of no fixed size; the first
            axis is ignored. Without them such axes are 1.
        precision: what numbers that the graph calls float32 are moved in.
        types: node -> the type that a runtime computes it in, where that differs from the graph's.
    """
    if isinstance(model, Path):
        model = onnx.load(model, load_external_data=False)
    sized = _inferred(model, batch_size, shapes or {})
    layers, recurrent, layer_flops, layer_weights, uncounted = (Counter[str]() for _ in range(5))
    quantised, unsized, nodes, flops, moved = 0, 0, 0, 0.0, 0.0
    for node, scope in walk(sized.graph):
        nodes += 1
        tensors = _Tensors(scope, precision)
        made, traffic = _known(_flops, node, tensors), _known(_moved, node, tensors)
        if made is None or traffic is None:
            uncounted[node.op_type] += 1
        else:
            flops, moved = flops + scope.runs * made, moved + scope.runs * traffic
        if node.op_type not in _LAYERS or _operand_type(node, scope) in _INDICES:
            continue
        narrow = _quantised_type(node, scope)
        word = _WORDS.get(_operand_type(node, scope) if narrow is None else narrow, "unknown")
        word = (types or {}).get(node.name, word)
        layers[word] += 1
        quantised += narrow is not None
        recurrent[word] += node.op_type in _RECURRENT
        layer_flops[word] += scope.runs * int(made or 0)
        layer_weights[word] += scope.runs * _held(node, scope)
        unsized += not made
    return GraphStats(
        _sorted(layers),
        quantised,
        _sorted(recurrent),
        _sorted(layer_flops),
        _sorted(layer_weights),
        unsized,
        _weights(sized),
        batch_size,
        flops,
        moved,
        nodes,
        _sorted(uncounted),
    )


def count_convolutions(model: ModelProto) -> int:
    """Convolution nodes of a graph, in bodies too, whatever their type or direction."""
    return sum("Conv" in node.op_type for node, _ in walk(model.graph))


def executed_layers(optimised: ModelProto) -> dict[str, int]:
    """Layers of a graph that ONNX Runtime optimised, by the type they compute in.

    Its fused operators carry their type in their name or in their operands.
    """
    counts: Counter[str] = Counter()
    for node, scope in walk(optimised.graph):
        if any(word in node.op_type for word in _INTEGER):
            counts["int8"] += any(word in node.op_type for word in (*_FUSED, "QGemm"))
        elif any(word in node.op_type for word in _FUSED):
            kind = _operand_type(node, scope)
            if kind not in _INDICES:
                counts[_WORDS.get(kind, "unknown")] += 1
    return _sorted(counts)


class _UnknownError(Exception):
    """A node whose arithmetic or shapes are not known."""


@dataclass(frozen=True, slots=True)
class _Tensors:
    scope: Scope
    precision: Precision

    def shape(self, name: str) -> tuple[int, ...]:
        """Sizes of a tensor's axes, all of them known."""
        found = self.scope.sizes.get(name)
        if found is None or min(found, default=0) < 0:
            raise _UnknownError(name)
        return found

    def size(self, name: str) -> int:
        """Numbers in a tensor."""
        return prod(self.shape(name))

    def bytes_of(self, name: str) -> float:
        """What moving a tensor once costs."""
        kind = self.scope.types.get(name)
        if kind is None:
            raise _UnknownError(name)
        as_float = kind == TensorProto.FLOAT
        bits = _FLOAT_BITS[self.precision] if as_float else _BITS.get(kind, _NARROW_BITS)
        return self.size(name) * bits / 8.0


def _inferred(
    model: ModelProto, batch_size: int, shapes: Mapping[str, tuple[int, ...]]
) -> ModelProto:
    """A copy without large weights whose inputs have these sizes, with every shape that follows."""
    sized = ModelProto()
    sized.CopyFrom(model)
    if sized.functions:
        sized = inline_local_functions(sized)
    for tensor in sized.graph.initializer:
        if prod(tensor.dims) > _LARGE:
            for each in ("raw_data", "float_data", "int64_data"):
                tensor.ClearField(each)
    weights = {tensor.name for tensor in sized.graph.initializer}
    del sized.graph.value_info[:]
    for value in sized.graph.input:
        if value.name not in weights:
            _fix_axes(value, batch_size, shapes.get(value.name, ()))
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(sized, data_prop=True)


def _fix_axes(value: onnx.ValueInfoProto, batch_size: int, wanted: tuple[int, ...]) -> None:
    for index, axis in enumerate(value.type.tensor_type.shape.dim):
        if index == 0:
            axis.dim_value = batch_size
        elif not axis.HasField("dim_value") or axis.dim_value <= 0:
            axis.dim_value = wanted[index] if index < len(wanted) else 1


def _quantised_type(node: NodeProto, scope: Scope) -> int | None:
    """The type of the weights before they were dequantised; None unless all operands were."""
    feeding = [scope.makers.get(name) for name in node.input[: _operands(node)]]
    if any(source is None or source.op_type != "DequantizeLinear" for source in feeding):
        return None
    weight = feeding[1]
    return scope.types.get(weight.input[0], 0) if weight is not None else 0


def _operand_type(node: NodeProto, scope: Scope) -> int:
    """The type of a layer's operands: its weights', else the first that is known; 0 if none is."""
    names = list(node.input[: _operands(node)])
    kinds = (scope.types.get(name, 0) for name in (*names[1:], *names[:1]))
    return next((kind for kind in kinds if kind), 0)


def _operands(node: NodeProto) -> int:
    """A recurrent layer multiplies its input and its state, each by weights of their own."""
    return 3 if node.op_type in _RECURRENT else 2


def _held(node: NodeProto, scope: Scope) -> int:
    """Numbers that a layer multiplies its input (and its state, if it is recurrent) by."""
    shapes = [scope.sizes.get(name, ()) for name in node.input[1 : _operands(node)]]
    return sum(prod(shape) for shape in shapes if shape and min(shape) > 0)


def _weights(model: ModelProto) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for graph in graphs(model.graph):
        scales = {n for each in graph.node if each.op_type in _PAIR for n in each.input[1:]}
        for tensor in graph.initializer:
            if tensor.data_type in _WORDS and tensor.name not in scales:
                counts[_WORDS[tensor.data_type]] += prod(tensor.dims)
    return _sorted(counts)


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted((+counts).items()))


def _known(
    count: Callable[[NodeProto, _Tensors], float], node: NodeProto, tensors: _Tensors
) -> float | None:
    try:
        return count(node, tensors)
    except (_UnknownError, ValueError, IndexError, StopIteration):
        return None


def _flops(node: NodeProto, tensors: _Tensors) -> float:
    """Operations of one run of a node."""
    kind = node.op_type
    if kind in _FREE or kind in _MOVING:
        return 0.0
    if kind in _ELEMENTWISE:
        return tensors.size(node.output[0])
    if kind in _NORMALISING:
        return _NORMALISING[kind] * tensors.size(node.output[0])
    if kind.startswith(_FOLDING):
        return tensors.size(node.input[0])
    count = _MULTIPLYING.get(f"{node.domain}.{kind}" if node.domain else kind)
    count = count or _MULTIPLYING.get(kind)
    if count is None:
        raise _UnknownError(kind)
    return count(node, tensors)


def _moved(node: NodeProto, tensors: _Tensors) -> float:
    """Bytes read and written; an element-wise node reads only what its neighbour did not make."""
    kind = node.op_type
    if kind in _FREE:
        return 0.0
    # Further outputs are optional, and described only where something reads them.
    first, *others = [name for name in node.output if name]
    made = tensors.bytes_of(first) + sum(
        tensors.bytes_of(name) for name in others if name in tensors.scope.sizes
    )
    if kind in _TAKING:
        return 2.0 * made
    read = [tensors.bytes_of(name) for name in node.input if name]
    if kind in _ELEMENTWISE:
        return sum(read) - max(read, default=0.0)
    return made + sum(read)


def _attribute(node: NodeProto, name: str) -> list[int]:
    found = next((attribute for attribute in node.attribute if attribute.name == name), None)
    return [] if found is None else list(found.ints) or [found.i]


def _convolution(node: NodeProto, tensors: _Tensors, *, weight: int = 1) -> float:
    return 2.0 * tensors.size(node.output[0]) * prod(tensors.shape(node.input[weight])[1:])


def _transposed(node: NodeProto, tensors: _Tensors) -> float:
    return 2.0 * tensors.size(node.input[0]) * prod(tensors.shape(node.input[1])[1:])


def _product(node: NodeProto, tensors: _Tensors) -> float:
    first = tensors.shape(node.input[0])
    inner = first[0] if _attribute(node, "transA") == [1] else first[-1]
    return 2.0 * tensors.size(node.output[0]) * inner


def _attention(node: NodeProto, tensors: _Tensors) -> float:
    """Queries by keys, then scores by values; of heads apart (4 axes) or side by side (3)."""
    query, key = tensors.shape(node.input[0]), tensors.shape(node.input[1])
    return 4.0 * prod(query) * key[-2]


def _fused_attention(node: NodeProto, tensors: _Tensors) -> float:
    """The projection of the input to queries, keys and values, then attention."""
    batch, length, hidden = tensors.shape(node.input[0])
    projected = 2.0 * batch * length * prod(tensors.shape(node.input[1]))
    return projected + 4.0 * batch * length * length * hidden


def _recurrence(node: NodeProto, tensors: _Tensors) -> float:
    """Every step of every sample multiplies all weights of the input and of the state once."""
    steps, samples = tensors.shape(node.input[0])[:2]  # in either order
    return 2.0 * steps * samples * (tensors.size(node.input[1]) + tensors.size(node.input[2]))


def _pool(node: NodeProto, tensors: _Tensors) -> float:
    return tensors.size(node.output[0]) * prod(_attribute(node, "kernel_shape"))


def _einsum(node: NodeProto, tensors: _Tensors) -> float:
    equation = next(a.s.decode() for a in node.attribute if a.name == "equation").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation:
        raise _UnknownError(equation)
    sizes: dict[str, int] = {}
    for term, name in zip(terms, node.input, strict=True):
        sizes |= dict(zip(term, tensors.shape(name), strict=True))
    return 2.0 * prod(sizes.values())


_MULTIPLYING: dict[str, Callable[[NodeProto, _Tensors], float]] = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcFusedConv", "ConvInteger"), _convolution),
    "QLinearConv": partial(_convolution, weight=3),
    "ConvTranspose": _transposed,
    **dict.fromkeys(("Gemm", "FusedGemm", "MatMul", "FusedMatMul"), _product),
    **dict.fromkeys(("MatMulInteger", "QLinearMatMul"), _product),
    **dict.fromkeys(("Attention", "MultiHeadAttention"), _attention),
    "com.microsoft.Attention": _fused_attention,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrence),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    "Einsum": _einsum,
}
