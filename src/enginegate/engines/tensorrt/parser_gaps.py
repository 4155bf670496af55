"""What TensorRT 8.6's ONNX parser reads wrongly, written so that it reads it right.

It takes no notice of the attributes ``start`` and ``end`` of Shape, which came with opset 15 and
which PyTorch's exporter uses for every dynamic axis: it would return all sizes instead of one.
"""

import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper

from enginegate.sources.onnx_form import graphs

_TO_THE_END = 2**31 - 1  # the parser has no INT64


def without_parser_gaps(model: ModelProto) -> ModelProto:
    """The model with Shape and Slice instead of a Shape of some axes; itself if it has none."""
    if not any(_is_partial(node) for graph in graphs(model.graph) for node in graph.node):
        return model
    found = ModelProto()
    found.CopyFrom(model)
    for graph in graphs(found.graph):
        _rewrite(graph)
    return found


def _is_partial(node: NodeProto) -> bool:
    return node.op_type == "Shape" and not node.domain and _range(node) != (0, _TO_THE_END)


def _range(node: NodeProto) -> tuple[int, int]:
    held = {each.name: int(helper.get_attribute_value(each)) for each in node.attribute}
    return held.get("start", 0), held.get("end", _TO_THE_END)


def _rewrite(graph: GraphProto) -> None:
    nodes = []
    for node in graph.node:
        if not _is_partial(node):
            nodes.append(node)
            continue
        whole, axes = f"{node.output[0]}_whole", f"{node.output[0]}_axes"
        bounds = [f"{node.output[0]}_{side}" for side in ("start", "end")]
        for name, value in zip((*bounds, axes), (*_range(node), 0), strict=True):
            graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]))
        nodes.append(helper.make_node("Shape", [node.input[0]], [whole], name=f"{node.name}_whole"))
        sliced = helper.make_node("Slice", [whole, *bounds, axes], [node.output[0]], name=node.name)
        nodes.append(sliced)
    del graph.node[:]
    graph.node.extend(nodes)
