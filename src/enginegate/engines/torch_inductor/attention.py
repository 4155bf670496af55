"""Attention that a program spells out, softmax(q k * scale + mask) v, as the one operation it is.

PyTorch has kernels for the whole of it that never write the scores to memory. Inductor finds the
pattern in what Dynamo traces from Python, and not in a program that was exported, converted and
traced again. The numbers are those of the written formula up to rounding: it is the definition in
torch.nn.functional.scaled_dot_product_attention's documentation.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, Node

_RANK = 4  # batch, heads, tokens, width: other ranks have no kernel


class _Attention(NamedTuple):
    query: "Node"
    key: "Node"  # (N, H, width, S), as it is multiplied
    value: "Node"
    mask: "Node | None"
    scale: float


def fuse_attention(graph: "Graph") -> int:
    """Replace each attention of an exported graph by one operation; returns how many.

    Only float32 of rank 4 whose intermediate results nobody else reads, with a mask that is added
    and changes no shape; everything else stays as it is.
    """
    import torch  # noqa: PLC0415

    count = 0
    for node in list(graph.nodes):
        found = _attention(node)
        if found is None:
            continue
        weights = node.args[0]
        with graph.inserting_before(node):
            key = graph.call_function(torch.ops.aten.transpose.int, (found.key, -2, -1))
            key.meta["val"] = found.key.meta["val"].transpose(-2, -1)
            fused = graph.call_function(
                torch.ops.aten.scaled_dot_product_attention.default,
                (found.query, key, found.value, found.mask),
                {"scale": found.scale},
            )
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        _erase_dropout(graph, weights)
        count += 1
    if count:
        graph.eliminate_dead_code()
    return count


def _erase_dropout(graph: "Graph", weights: Any) -> None:
    """Dead code that is random is kept by PyTorch, also where it is switched off."""
    while not weights.users:
        given = weights.args[0]
        graph.erase_node(weights)
        weights = given


def _attention(node: "Node") -> _Attention | None:
    """The attention that ends in this product of weights and values, if it is one."""
    import torch  # noqa: PLC0415

    aten = torch.ops.aten
    if not _is(node, aten.matmul.default):
        return None
    value: Any = node.args[1]
    weights: Any = node.args[0]
    dropout = (aten.dropout.default, aten.clone.default, aten.contiguous.default)
    while _is(weights, *dropout) and _is_private(weights) and _does_nothing(weights):
        weights = weights.args[0]
    if not (_is(weights, aten.softmax.int) and _is_private(weights) and _over_last(weights)):
        return None
    scores: Any = weights.args[0]
    mask = None
    if _is(scores, aten.add.Tensor) and _is_private(scores) and not scores.kwargs:
        scores, mask = _masked(scores)
    scale = 1.0
    if _is(scores, aten.mul.Tensor, aten.div.Tensor) and _is_private(scores):
        given, factor = scores.args
        if not isinstance(factor, int | float) or not factor:
            return None
        scale = float(factor) if _is(scores, aten.mul.Tensor) else 1.0 / factor
        scores = given
    if not (_is(scores, aten.matmul.default) and _is_private(scores)):
        return None
    query, key = scores.args
    if not all(_is_float_of_rank_4(each) for each in (query, key, value)):
        return None
    return _Attention(query, key, value, mask, scale)


def _masked(added: Any) -> tuple[Any, "Node | None"]:
    """The scores and the mask of an addition that has the scores' shape; else the node itself."""
    import torch  # noqa: PLC0415

    aten, shape = torch.ops.aten, _tensor(added).shape
    scores_of: Callable[..., bool] = lambda each: _is(  # noqa: E731
        each, aten.matmul.default, aten.mul.Tensor, aten.div.Tensor
    )
    for scores, mask in (added.args, added.args[::-1]):
        if not (scores_of(scores) and isinstance(mask, torch.fx.Node)):
            continue
        tensor = _tensor(mask)
        fits = tensor is not None and tensor.dtype is torch.float32 and 0 < tensor.dim() <= _RANK
        if fits and _tensor(scores).shape == shape:
            return scores, mask
    return added, None


def _is(node: Any, *targets: Any) -> bool:
    return getattr(node, "op", None) == "call_function" and node.target in targets


def _is_private(node: Any) -> bool:
    return len(node.users) == 1


def _over_last(softmax: Any) -> bool:
    tensor, axis = _tensor(softmax.args[0]), softmax.args[1]
    kept = len(softmax.args) == 2 or softmax.args[2] is None  # noqa: PLR2004
    return tensor is not None and kept and axis in {-1, tensor.dim() - 1}


def _does_nothing(node: Any) -> bool:
    """Dropout outside of training, and copies."""
    return "dropout" not in str(node.target) or node.args[2] is False


def _is_float_of_rank_4(node: Any) -> bool:
    import torch  # noqa: PLC0415

    tensor = _tensor(node)
    return tensor is not None and tensor.dim() == _RANK and tensor.dtype is torch.float32


def _tensor(node: Any) -> "torch.Tensor | Any":
    return getattr(node, "meta", {}).get("val")
