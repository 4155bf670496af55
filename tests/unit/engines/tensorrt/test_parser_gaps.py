"""TensorRT 8.6's parser takes no notice of Shape's start and end."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from enginegate.engines.tensorrt.parser_gaps import without_parser_gaps


def shape_of(**attributes):
    """A model that gives the sizes of some axes of its input."""
    graph = helper.make_graph(
        [helper.make_node("Shape", ["x"], ["y"], name="sizes", **attributes)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, "s"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def answer(model):
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": np.zeros((2, 4, 7), np.float32)})[0].tolist()


@pytest.mark.parametrize(
    ("attributes", "sizes"),
    [
        pytest.param({"start": 0, "end": 1}, [2], id="first"),
        pytest.param({"start": 1, "end": 2}, [4], id="middle"),
        pytest.param({"start": 2}, [7], id="to-the-end"),
        pytest.param({"start": -2, "end": -1}, [4], id="from-behind"),
    ],
)
def test_some_axes_are_sliced_from_all(attributes, sizes):
    """Shape without attributes, and a Slice, say the same."""
    given = shape_of(**attributes)

    found = without_parser_gaps(given)

    assert [node.op_type for node in found.graph.node] == ["Shape", "Slice"]
    assert not found.graph.node[0].attribute
    assert answer(found) == answer(given) == sizes


@pytest.mark.parametrize("attributes", [{}, {"start": 0}])
def test_whole_shapes_stay(attributes):
    """What the parser reads rightly is the very model that was given."""
    given = shape_of(**attributes)

    assert without_parser_gaps(given) is given
