"""How much arithmetic and memory traffic one batch of a graph is, counted on the graph itself.

Traffic is what layers that multiply, normalise, pool or move data must read and write if nothing
stays in a cache between them. Element-wise layers are taken as fused into the layer before them, as
the engines here do: they cost traffic only for a second operand. A multiplication and an addition
count as two operations; other layers by the size of what they make.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, TensorProto
from onnx.inliner import inline_local_functions

from enginegate.candidate import Precision
from enginegate.engines.operators import ELEMENTWISE, FOLDING, FREE, MOVING, NORMALISING
from enginegate.sources.scopes import Scope, walk

Shapes = Mapping[str, tuple[int, ...]]

_BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT64), 64),
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT32), 32),
    **dict.fromkeys((TensorProto.FLOAT16, TensorProto.BFLOAT16), 16),
    **dict.fromkeys((TensorProto.INT16, TensorProto.UINT16), 16),
}
_NARROW = 8  # bool, int8, uint8, FP8
_FLOAT_BITS = {
    Precision.FP32: 32,
    Precision.TF32: 32,
    Precision.FP16: 16,
    Precision.BF16: 16,
    Precision.INT8: 8,
    Precision.FP8: 8,
}
_LARGE = 1024  # numbers; smaller constants may be shapes, which inference needs


@dataclass(frozen=True, slots=True)
class Work:
    """One batch of a graph.

    Attributes:
        flops: operations.
        bytes_moved: read and written.
        layers: nodes of the graph.
        uncounted: operators whose arithmetic or shapes are not known -> nodes.
    """

    batch_size: int
    flops: float
    bytes_moved: float
    layers: int
    uncounted: dict[str, int]

    @property
    def covered(self) -> float:
        """Share of the nodes that were counted, 0 to 1."""
        return 1.0 - sum(self.uncounted.values()) / self.layers if self.layers else 0.0


def work_of(
    model: ModelProto | Path,
    precision: Precision,
    *,
    batch_size: int,
    shapes: Shapes | None = None,
) -> Work:
    """Count one batch.

    Args:
        model: a graph or its file; weights in files beside it are not needed.
        precision: sets the size of what the graph calls float32.
        batch_size: samples, along the first axis of every input.
        shapes: of inputs, e.g. those of a typical request, for axes of no fixed size; the first
            axis is ignored. Without them such axes are 1.

    The branches of an If are each counted once; the body of a Loop or a Scan as often as it runs,
    where that is known, else once.
    """
    if isinstance(model, Path):
        model = onnx.load(model, load_external_data=False)
    sized = _inferred(model, batch_size, shapes or {})
    flops, moved, layers = 0.0, 0.0, 0
    uncounted: dict[str, int] = {}
    for node, scope in walk(sized.graph):
        layers += 1
        tensors = _Tensors(scope, precision)
        try:
            cost = _flops(node, tensors), _moved(node, tensors)
        except (_UnknownError, ValueError, IndexError, StopIteration):
            uncounted[node.op_type] = uncounted.get(node.op_type, 0) + 1
        else:
            flops, moved = flops + scope.runs * cost[0], moved + scope.runs * cost[1]
    return Work(batch_size, flops, moved, layers, dict(sorted(uncounted.items())))


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
        bits = _FLOAT_BITS[self.precision] if as_float else _BITS.get(kind, _NARROW)
        return self.size(name) * bits / 8.0


def _inferred(model: ModelProto, batch_size: int, shapes: Shapes) -> ModelProto:
    """A copy without large weights whose inputs have these sizes, with every shape that follows."""
    sized = ModelProto()
    sized.CopyFrom(model)
    if sized.functions:
        sized = inline_local_functions(sized)
    for tensor in sized.graph.initializer:
        if prod(tensor.dims) > _LARGE:
            for field in ("raw_data", "float_data", "int64_data"):
                tensor.ClearField(field)
    weights = {tensor.name for tensor in sized.graph.initializer}
    del sized.graph.value_info[:]
    for value in sized.graph.input:
        if value.name not in weights:
            _fix(value, batch_size, shapes.get(value.name, ()))
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(sized, data_prop=True)


def _fix(value: onnx.ValueInfoProto, batch_size: int, wanted: tuple[int, ...]) -> None:
    for index, axis in enumerate(value.type.tensor_type.shape.dim):
        if index == 0:
            axis.dim_value = batch_size
        elif not axis.HasField("dim_value") or axis.dim_value <= 0:
            axis.dim_value = wanted[index] if index < len(wanted) else 1


def _flops(node: NodeProto, tensors: _Tensors) -> float:
    kind = node.op_type
    if kind in FREE or kind in MOVING:
        return 0.0
    if kind in ELEMENTWISE:
        return tensors.size(node.output[0])
    if kind in NORMALISING:
        return NORMALISING[kind] * tensors.size(node.output[0])
    if kind.startswith(FOLDING):
        return tensors.size(node.input[0])
    count = _MULTIPLYING.get(f"{node.domain}.{kind}" if node.domain else kind)
    count = count or _MULTIPLYING.get(kind)
    if count is None:
        raise _UnknownError(kind)
    return count(node, tensors)


def _moved(node: NodeProto, tensors: _Tensors) -> float:
    """Bytes read and written; an element-wise layer reads only what its neighbour did not make."""
    kind = node.op_type
    if kind in FREE:
        return 0.0
    # Further outputs are optional, and described only where something reads them.
    first, *others = [name for name in node.output if name]
    made = tensors.bytes_of(first) + sum(
        tensors.bytes_of(name) for name in others if name in tensors.scope.sizes
    )
    if kind in {"Gather", "GatherND", "GatherElements", "Slice", "Split"}:
        return 2.0 * made  # only what is taken is read
    read = [tensors.bytes_of(name) for name in node.input if name]
    if kind in ELEMENTWISE:
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


def _recurrent(node: NodeProto, tensors: _Tensors) -> float:
    length, batch = tensors.shape(node.input[0])[:2]
    return 2.0 * length * batch * (tensors.size(node.input[1]) + tensors.size(node.input[2]))


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
    "Conv": _convolution,
    "FusedConv": _convolution,
    "NhwcFusedConv": _convolution,
    "ConvInteger": _convolution,
    "QLinearConv": partial(_convolution, weight=3),
    "ConvTranspose": _transposed,
    "Gemm": _product,
    "FusedGemm": _product,
    "MatMul": _product,
    "FusedMatMul": _product,
    "MatMulInteger": _product,
    "QLinearMatMul": _product,
    "Attention": _attention,
    "MultiHeadAttention": _attention,
    "com.microsoft.Attention": _fused_attention,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
    "Einsum": _einsum,
}
