"""ONNX that was exported for exactly one sample, made to take any number of them.

Its first axis is 1 instead of open. Where the graph computes a batch all the same, the axis is
opened. Where some of its shapes hold the 1 too, the whole graph becomes the body of a Scan, which
runs it for one sample after the other. Either way the file's own answers, one at a time, are what
the result is compared with on real samples.
"""

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from enginegate.sources.onnx_form import graphs, opset

BATCH = "batch"
OPENED = "none: the source is ONNX; its batch axis, fixed at 1, was opened"
IN_TURN = "none: the source is ONNX for one sample, and runs for each of a batch in turn"
# The first version whose Squeeze and Unsqueeze take their axes as an input.
_AXES_AS_INPUT = 13


def takes_one_sample(model: ModelProto) -> bool:
    """Whether the first axis of every input and output is the number 1."""
    firsts = [value.type.tensor_type.shape.dim[:1] for value in (*_inputs(model), *_outputs(model))]
    return bool(firsts) and all(
        axes and axes[0].HasField("dim_value") and axes[0].dim_value == 1 for axes in firsts
    )


def for_any_batch(model: ModelProto) -> tuple[ModelProto, str]:
    """The model for any number of samples, and how that was done, in words.

    Args:
        model: `takes_one_sample`; it is not changed. Its weights may be in other files.
    """
    opened = ModelProto()
    opened.CopyFrom(model)
    for graph in graphs(opened.graph):
        del graph.value_info[:]
    for value in (*_inputs(opened), *_outputs(opened)):
        _open(value)
    if not _holds_the_one(opened):
        return opened, OPENED
    return _in_turn(model), IN_TURN


def _inputs(model: ModelProto) -> list[ValueInfoProto]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def _outputs(model: ModelProto) -> list[ValueInfoProto]:
    return list(model.graph.output)


def _open(value: ValueInfoProto) -> None:
    axis = value.type.tensor_type.shape.dim[0]
    axis.Clear()
    axis.dim_param = BATCH


def _holds_the_one(opened: ModelProto) -> bool:
    """Whether a shape inside of the graph fixes the first axis of an output all the same.

    What inference leaves open, as after a Reshape to (-1, 10), may still mix samples: whoever
    compares the model with the file's own answers finds that.
    """
    asked = ModelProto()
    asked.CopyFrom(opened)
    for value in asked.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        found = onnx.shape_inference.infer_shapes(asked, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return True
    firsts = [value.type.tensor_type.shape.dim[:1] for value in found.graph.output]
    return any(axes and axes[0].HasField("dim_value") for axes in firsts)


def _in_turn(model: ModelProto) -> ModelProto:
    """The graph as the body of a Scan over the first axis; weights stay in the graph around it."""
    made, opset_version = ModelProto(), opset(model)
    made.CopyFrom(model)
    given, answered = _inputs(made), _outputs(made)
    # A name may not mean one thing inside of the body and another one around it.
    inside = {value.name: f"{value.name}.one" for value in (*given, *answered)}
    _rename(made.graph, inside)
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    constants: list[TensorProto] = []
    if opset_version >= _AXES_AS_INPUT:
        constants.append(helper.make_tensor("first_axis.one", TensorProto.INT64, [1], [0]))
    for operator, values, nodes in (("Unsqueeze", given, before), ("Squeeze", answered, after)):
        for value in values:
            row, one = f"{value.name}.row", inside[value.name]
            source, target = (row, one) if operator == "Unsqueeze" else (one, row)
            if constants:
                nodes.append(helper.make_node(operator, [source, "first_axis.one"], [target]))
            else:
                nodes.append(helper.make_node(operator, [source], [target], axes=[0]))
    body = helper.make_graph(
        [*before, *made.graph.node, *after],
        "one_sample",
        [_row_of(value) for value in given],
        [_row_of(value) for value in answered],
    )
    scan = helper.make_node(
        "Scan",
        [value.name for value in given],
        [value.name for value in answered],
        "each_sample",
        body=body,
        num_scan_inputs=len(given),
    )
    for values in (given, answered):
        for value in values:
            _open(value)
    graph = helper.make_graph(
        [scan], "each_sample", given, answered, [*made.graph.initializer, *constants]
    )
    made.graph.CopyFrom(graph)
    return made


def _row_of(value: ValueInfoProto) -> ValueInfoProto:
    tensor = value.type.tensor_type
    shape = [axis.dim_value if axis.HasField("dim_value") else None for axis in tensor.shape.dim]
    return helper.make_tensor_value_info(f"{value.name}.row", tensor.elem_type, shape[1:])


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    for inner in graphs(graph):
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        if inner is not graph:
            for value in inner.output:
                value.name = names.get(value.name, value.name)
