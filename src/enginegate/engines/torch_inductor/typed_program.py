"""A torch.export program -> the same program at another precision, on another device.

Weights and all that is computed from them or from floating inputs take the new type. Arithmetic on
positions and masks, which depends on integers only, stays float32 and is converted where it meets
the rest: 16-bit floats cannot count tokens beyond 2,048. Inputs and outputs stay as exported.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from enginegate.engines.torch_inductor.attention import fuse_attention
from enginegate.errors import BuildError

if TYPE_CHECKING:
    import torch
    from torch.fx import Graph, GraphModule, Node


class AxisSizes(NamedTuple):
    """Sizes of one dynamic axis that a package takes, and its name: equal names, equal sizes."""

    name: str
    smallest: int
    largest: int


def typed_module(
    program: "torch.export.ExportedProgram", *, dtype: "torch.dtype", device: str
) -> "GraphModule":
    """The program's module, computing in ``dtype`` on ``device``; the program is used up.

    Args:
        program: as it was saved: FP32, for the CPU.

    Raises:
        BuildError: the program has control flow, whose branches are programs of their own.
    """
    module = program.module(check_guards=False)
    _convert(module, dtype, device)
    return module


def torch_type(precision: str) -> "torch.dtype":
    """The type that weights have at a precision."""
    import torch  # noqa: PLC0415

    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)


def traced_again(
    module: "GraphModule",
    examples: Sequence["torch.Tensor"],
    axes: Sequence[Mapping[int, AxisSizes]],
) -> "torch.export.ExportedProgram":
    """A program of the module for these sizes; its outputs are a flat tuple.

    Args:
        module: as `typed_module` made it.
        examples: one tensor for each input, on its device; autotuning measures at their sizes.
        axes: dynamic axes of each input; an axis without an entry has the example's size.
    """
    import torch  # noqa: PLC0415

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(torch.utils._pytree.tree_leaves(self.inner(*inputs)))  # noqa: SLF001

    dims = {
        axis: torch.export.Dim(axis.name, min=axis.smallest, max=axis.largest)
        for of in axes
        for axis in of.values()
    }
    shapes = tuple({at: dims[axis] for at, axis in of.items()} for of in axes)
    return torch.export.export(Flat(), tuple(examples), dynamic_shapes=(shapes,), strict=False)


def _convert(module: "GraphModule", dtype: "torch.dtype", device: str) -> None:
    """Rewrite a program's module in place."""
    import torch  # noqa: PLC0415

    if any(isinstance(each, torch.fx.GraphModule) for each in list(module.modules())[1:]):
        raise BuildError(
            "The program has control flow (torch.cond or the like), whose branches this engine "
            "kind does not convert. Export the model without it, or drop torch_inductor from "
            "[candidates]."
        )
    module.to(device)
    for owner in module.modules():
        for name, value in list(vars(owner).items()):
            if isinstance(value, torch.Tensor):
                setattr(owner, name, value.to(device))
    # Its own checks are of the types and bounds that it was exported with.
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # noqa: SLF001
            module.graph.erase_node(node)
    _place(module.graph, torch.device(device))
    fuse_attention(module.graph)
    if dtype is not torch.float32:
        _retype(module, dtype)
    module.graph.lint()
    module.recompile()


def _place(graph: "Graph", device: "torch.device") -> None:
    """Constants that the program makes are made on the device."""
    import torch  # noqa: PLC0415

    def placed(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, placed)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, placed)


def _retype(module: "GraphModule", dtype: "torch.dtype") -> None:
    import torch  # noqa: PLC0415

    for parameter in module.parameters():
        if parameter.dtype is torch.float32:
            parameter.data = parameter.data.to(dtype)
    graph = module.graph
    computed: set[Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if _type_of(node, module) is torch.float32:
                computed.add(_converted(node, dtype))
        elif node.op == "get_attr":
            if isinstance(_attribute(module, str(node.target)), torch.nn.Parameter):
                computed.add(node)
        elif node.op == "output":
            _answer_in_float32(node, computed, module)
        elif computed.intersection(node.all_input_nodes):
            computed.add(node)
            _compute_in(node, dtype, computed, module)


def _compute_in(
    node: "Node", dtype: "torch.dtype", computed: set["Node"], module: "GraphModule"
) -> None:
    """One operation whose inputs have the new type, or come from integers alone."""
    import torch  # noqa: PLC0415

    limits = torch.finfo(dtype)

    def retyped(value: Any) -> Any:
        if value is torch.float32:
            return dtype
        if isinstance(value, float) and abs(value) < float("inf"):
            return min(max(value, limits.min), limits.max)
        return value

    for given in node.all_input_nodes:
        if given not in computed and _type_of(given, module) is torch.float32:
            with node.graph.inserting_before(node):
                within = node.graph.call_function(
                    torch.ops.aten.clamp.default, (given, limits.min, limits.max)
                )
                cast = node.graph.call_function(torch.ops.aten.to.dtype, (within, dtype))
            node.replace_input_with(given, cast)
    if node.op == "call_function" and node.target is not operator.getitem:
        node.args = torch.fx.node.map_aggregate(node.args, retyped)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, retyped)


def _converted(placeholder: "Node", dtype: "torch.dtype") -> "Node":
    """The input at the new type, for all its uses."""
    import torch  # noqa: PLC0415

    with placeholder.graph.inserting_after(placeholder):
        cast = placeholder.graph.call_function(torch.ops.aten.to.dtype, (placeholder, dtype))
    placeholder.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _answer_in_float32(output: "Node", computed: set["Node"], module: "GraphModule") -> None:
    import torch  # noqa: PLC0415

    for given in output.all_input_nodes:
        if given in computed and _type_of(given, module) is torch.float32:
            with output.graph.inserting_before(output):
                cast = output.graph.call_function(torch.ops.aten.to.dtype, (given, torch.float32))
            output.replace_input_with(given, cast)


def _type_of(node: "Node", module: "GraphModule") -> "torch.dtype | None":
    """The type of a node's tensor as it was exported; None for what is no tensor."""
    if node.op == "get_attr":
        return getattr(_attribute(module, str(node.target)), "dtype", None)
    return getattr(node.meta.get("val"), "dtype", None)


def _attribute(module: "GraphModule", path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
