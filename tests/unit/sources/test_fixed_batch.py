"""ONNX that was exported for one sample."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.sources.fixed_batch import IN_TURN, OPENED, for_any_batch, takes_one_sample


def value(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def model(batch=1, *, shape=None, opset=17):
    """Rows times weights plus a second input; ``shape`` is one that the graph holds."""
    weight = numpy_helper.from_array(np.eye(3, 2, dtype=np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "shift"], ["sum" if shape else "y"]),
    ]
    constants = [weight]
    if shape:
        constants.append(numpy_helper.from_array(np.array(shape), "shape"))
        nodes.append(helper.make_node("Reshape", ["sum", "shape"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", [batch, 3]), value("shift", [batch, 2])],
        [value("y", [batch, 2])],
        constants,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


def run(made, **inputs):
    onnx.checker.check_model(made, full_check=True)
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)[0]


X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
SHIFT = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.mark.parametrize(
    ("given", "how"),
    [
        pytest.param(model(), OPENED, id="graph-follows"),
        pytest.param(model(shape=(-1, 2)), OPENED, id="open-shape"),
        pytest.param(model(shape=(1, 2)), IN_TURN, id="shape-of-one"),
        pytest.param(model(shape=(1, 2), opset=12), IN_TURN, id="axes-as-attribute"),
    ],
)
def test_any_number_of_samples_is_answered_as_one_at_a_time(given, how):
    """Both ways give the file's own answers, and the file's model is left as it was."""
    before = given.SerializeToString()

    made, told = for_any_batch(given)

    assert told == how
    assert given.SerializeToString() == before
    singly = [run(given, x=X[[row]], shift=SHIFT[[row]]) for row in range(5)]
    np.testing.assert_allclose(run(made, x=X, shift=SHIFT), np.concatenate(singly), rtol=1e-6)
    assert run(made, x=X[:1], shift=SHIFT[:1]).shape == (1, 2)


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, True), (4, False), ("n", False), (None, False)]
)
def test_only_a_batch_of_one_is_opened(batch, expected):
    """A fixed batch of four would have to be filled up; such a file stays refused."""
    assert takes_one_sample(model(batch)) is expected
