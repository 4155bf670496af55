"""Names of nodes, and which of them go together."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from onnx import ModelProto, NodeProto

LAYERS = ("Conv", "Gemm", "MatMul")
_JOINS = frozenset({"Add", "Concat"})


def named(model: ModelProto) -> ModelProto:
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
