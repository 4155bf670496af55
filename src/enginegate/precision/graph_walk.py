"""Every node of a graph and of the graphs inside it, with what is known of the tensors it sees.

The body of an If, a Loop or a Scan sees the tensors around it, and its inputs are bound to those of
the node that holds it, so neither can be read from the body alone.
"""

from collections import ChainMap
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

Sizes = tuple[int, ...]
UNKNOWN = -1
_MOST_RUNS = 100_000  # a Loop that may run more often than this ends by its condition


@dataclass(frozen=True, slots=True)
class Scope:
    """What the nodes of one graph see.

    Attributes:
        types: ONNX's element type of a tensor, by name; only those that are known.
        sizes: of a tensor's axes, by name, `UNKNOWN` where one is not known; a tensor of unknown
            rank is not there.
        makers: the node that makes a tensor, by the tensor's name.
        scalars: whole numbers that are constant, by name.
        runs: how often the graph runs for one run of the model; 1 where that is not known.
    """

    types: MutableMapping[str, int]
    sizes: MutableMapping[str, Sizes]
    makers: MutableMapping[str, NodeProto]
    scalars: MutableMapping[str, int]
    runs: int = 1

    @classmethod
    def of(cls, graph: GraphProto, around: "Scope | None" = None, runs: int = 1) -> "Scope":
        """What is stated in the graph, over what is known around it."""
        scope = cls({}, {}, {}, {}, runs)
        if around is not None:
            scope = cls(
                ChainMap({}, around.types),
                ChainMap({}, around.sizes),
                ChainMap({}, around.makers),
                ChainMap({}, around.scalars),
                runs * around.runs,
            )
        for value in (*graph.input, *graph.value_info, *graph.output):
            tensor = value.type.tensor_type
            if tensor.elem_type:
                scope.types[value.name] = tensor.elem_type
            if tensor.HasField("shape"):
                axes = (
                    a.dim_value if a.HasField("dim_value") else UNKNOWN for a in tensor.shape.dim
                )
                scope.sizes[value.name] = tuple(axes)
        for constant in graph.initializer:
            scope.types[constant.name] = constant.data_type
            scope.sizes[constant.name] = tuple(constant.dims)
            scope._note(constant.name, constant)
        scope.makers.update({name: node for node in graph.node for name in node.output if name})
        return scope

    def follow(self, node: NodeProto) -> None:
        """Carry types over a node, in graphs that do not state them."""
        kind = next((a.i for a in node.attribute if a.name == "to"), 0)
        if node.op_type == "Constant":
            value = next((a.t for a in node.attribute if a.name == "value"), None)
            kind = value.data_type if value is not None else 0
            if value is not None:
                self._note(node.output[0], value)
        elif node.op_type in {"Where", "DequantizeLinear"}:
            kind = self.types.get(node.input[1], 0)
        elif not kind and node.input and not bodies(node):
            kind = self.types.get(node.input[0], 0)
        for name in node.output:
            if kind and name:
                self.types.setdefault(name, kind)

    def _note(self, name: str, tensor: TensorProto) -> None:
        whole = tensor.data_type in {TensorProto.INT64, TensorProto.INT32}
        outside = tensor.data_location == TensorProto.EXTERNAL
        if whole and not outside and int(np.prod(tensor.dims)) == 1:
            values = numpy_helper.to_array(tensor)
            if values.size == 1:
                self.scalars[name] = int(values.reshape(()))


def walk(
    graph: GraphProto, around: Scope | None = None, runs: int = 1
) -> Iterator[tuple[NodeProto, Scope]]:
    """Every node with its scope, in order; a node's bodies come after it."""
    scope = Scope.of(graph, around, runs)
    for node in graph.node:
        yield node, scope
        for body in bodies(node):
            bound = _bound(node, body, scope)
            yield from walk(body, bound, _runs(node, scope))
            _give_results(node, body, scope)
        scope.follow(node)


def bodies(node: NodeProto) -> list[GraphProto]:
    """The graphs that a node holds: branches of an If, the body of a Loop or a Scan."""
    held = []
    for attribute in node.attribute:
        held += [attribute.g] if attribute.type == AttributeProto.GRAPH else []
        held += attribute.graphs
    return held


def _bound(node: NodeProto, body: GraphProto, scope: Scope) -> Scope:
    """The scope around a body, with what the node gives to the body's inputs."""
    bound = Scope(
        ChainMap({}, scope.types),
        ChainMap({}, scope.sizes),
        scope.makers,
        scope.scalars,
        scope.runs,
    )
    inner = [value.name for value in body.input]
    given = list(node.input)
    states = len(given)
    if node.op_type == "Loop":
        inner, given = inner[2:], given[2:]  # the iteration's number and the condition come first
        states = 0  # their sizes may change from one iteration to the next
    elif node.op_type == "Scan":
        states -= _number(node, "num_scan_inputs")
    axes = _numbers(node, "scan_input_axes")
    for place, (name, outer) in enumerate(zip(inner, given, strict=False)):
        if outer in scope.types:
            bound.types[name] = scope.types[outer]
        sizes = scope.sizes.get(outer)
        if sizes is None or node.op_type == "Loop":
            continue
        if place >= states and sizes:
            axis = axes[place - states] if place - states < len(axes) else 0
            sizes = tuple(np.delete(np.array(sizes, np.int64), axis).tolist())
        bound.sizes[name] = sizes
    return bound


def _give_results(node: NodeProto, body: GraphProto, scope: Scope) -> None:
    """What the body's outputs are, so are the node's; a Loop's first is its condition."""
    results = [value.type.tensor_type.elem_type for value in body.output]
    for name, kind in zip(node.output, results[node.op_type == "Loop" :], strict=False):
        if kind and name:
            scope.types.setdefault(name, kind)


def _runs(node: NodeProto, scope: Scope) -> int:
    """How often the node's body runs, where that is known; else 1."""
    if node.op_type == "Loop":
        trips = scope.scalars.get(node.input[0], 1) if node.input else 1
        return trips if 0 < trips <= _MOST_RUNS else 1
    if node.op_type == "Scan":
        scanned = node.input[len(node.input) - _number(node, "num_scan_inputs")]
        sizes, axes = scope.sizes.get(scanned, ()), _numbers(node, "scan_input_axes")
        length = sizes[axes[0] if axes else 0] if sizes else 1
        return max(length, 1)
    return 1


def _number(node: NodeProto, name: str) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), 0)


def _numbers(node: NodeProto, name: str) -> list[int]:
    return next((list(a.ints) for a in node.attribute if a.name == name), [])
