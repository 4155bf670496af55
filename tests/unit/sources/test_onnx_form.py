"""ONNX files are read whole, cleaned and checked."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.errors import ModelError
from enginegate.sources.onnx_form import canonical, check_sound, input_specs, onnx_bytes, read_onnx

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
CONTENT = WEIGHT.tobytes()


def model(weight=WEIGHT, *, batch="batch", nodes=None):
    nodes = nodes or [helper.make_node("MatMul", ["x", "w"], ["y"], name="multiply")]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def external(tmp_path, location, *, content=CONTENT):
    """A model whose weight is said to be in ``location``."""
    made = model()
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path = tmp_path / "model" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(made.SerializeToString())
    if content is not None:
        (path.parent / location).write_bytes(content)
    return path


class TestCanonical:
    def test_notes_do_not_change_the_bytes(self):
        """Doc strings, metadata, derived shapes and unused operator sets are no part of a model."""
        noisy = model()
        noisy.doc_string = noisy.graph.doc_string = noisy.graph.node[0].doc_string = "at 12:00"
        noisy.metadata_props.add(key="stack_trace", value="/home/me/train.py")
        noisy.graph.node[0].metadata_props.add(key="stack_trace", value="/home/me/train.py")
        noisy.graph.value_info.add(name="somewhere")
        noisy.opset_import.add(domain="com.example", version=1)

        assert onnx_bytes(canonical(noisy), origin="m") == onnx_bytes(
            canonical(model()), origin="m"
        )

    def test_original_is_left_alone(self):
        """Cleaning works on a copy."""
        noisy = model()
        noisy.doc_string = "mine"

        canonical(noisy)

        assert noisy.doc_string == "mine"

    def test_weights_do_change_the_bytes(self):
        """Two models that compute differently never share a digest."""
        other = model(WEIGHT + 1)

        assert onnx_bytes(canonical(other), origin="m") != onnx_bytes(
            canonical(model()), origin="m"
        )


class TestExternalData:
    def test_is_read_into_the_model(self, tmp_path):
        """Weights beside the file become part of it, as if they always had been."""
        path = external(tmp_path, "weights.bin")

        assert read_onnx(path, origin="m") == model()

    @pytest.mark.parametrize("location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin"])
    def test_may_not_leave_the_folder(self, tmp_path, location):
        """A model cannot make this program read files that are not its own."""
        (tmp_path / "secret.bin").write_bytes(WEIGHT.tobytes())
        path = external(tmp_path, location, content=None)

        with pytest.raises(ModelError, match="outside the model's folder"):
            read_onnx(path, origin="m")

    def test_may_not_leave_through_a_link(self, tmp_path):
        """A symbolic link out of the folder is refused like the path it points to."""
        (tmp_path / "secret.bin").write_bytes(WEIGHT.tobytes())
        path = external(tmp_path, "weights.bin", content=None)
        (path.parent / "weights.bin").symlink_to(tmp_path / "secret.bin")

        with pytest.raises(ModelError, match="outside the model's folder"):
            read_onnx(path, origin="m")

    @pytest.mark.parametrize("content", [None, b"short"])
    def test_must_be_there_in_full(self, tmp_path, content):
        """A missing or short data file is named."""
        path = external(tmp_path, "weights.bin", content=content)

        with pytest.raises(ModelError, match=r"'weights\.bin', which is missing or too short"):
            read_onnx(path, origin="m")


def test_file_that_is_not_onnx_is_named(tmp_path):
    """The message has the file, its size and what to do."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"this is not a protobuf message")

    with pytest.raises(ModelError, match=r"m: model\.onnx \(30 bytes\).*again"):
        read_onnx(path, origin="m")


def quantised():
    scale = numpy_helper.from_array(np.float32(1.0), "scale")
    made = model(nodes=[helper.make_node("QuantizeLinear", ["x", "scale"], ["q"], name="quantise")])
    made.graph.initializer.append(scale)
    made.graph.output[0].name = "q"
    made.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8
    made.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    return made


def training():
    made = model(
        nodes=[helper.make_node("Dropout", ["x", "", "yes"], ["y"], name="drop")],
    )
    made.graph.initializer.append(numpy_helper.from_array(np.array([True]).reshape(()), "yes"))
    made.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    return made


def with_value(value):
    weight = WEIGHT.copy()
    weight[1, 2] = value
    return model(weight)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(with_value(np.nan), r"weight 'w' holds 1 NaN or Inf.*\(1, 2\)", id="nan"),
        pytest.param(with_value(np.inf), r"weight 'w' holds 1 NaN or Inf.*\(1, 2\)", id="inf"),
        pytest.param(model(batch=4), "x: float32.*fixed batch axis", id="fixed-batch"),
        pytest.param(quantised(), "quantised already: node 'quantise'", id="quantised"),
        pytest.param(training(), "training mode .node 'drop'", id="training"),
        pytest.param(
            model(nodes=[helper.make_node("NoSuch", ["x", "w"], ["y"])]),
            "operator NoSuch, which ONNX opset 22 does not have",
            id="unknown-operator",
        ),
        pytest.param(
            model(WEIGHT.astype(np.float16), nodes=None), "not valid|'w' is fp16", id="fp16"
        ),
    ],
)
def test_unsound_model_is_refused(broken, message):
    """Every reason to refuse a model names the tensor or node."""
    with pytest.raises(ModelError, match=message):
        check_sound(broken, origin="m")


def test_masks_may_hold_infinities():
    """Minus infinity beside zeros is an attention mask, not a diverged weight."""
    mask = np.where(np.eye(2, 3, dtype=bool), np.float32(-np.inf), np.float32(0))

    check_sound(model(mask), origin="m")


def test_initialisers_listed_as_inputs_are_not_inputs():
    """Old exporters list weights as inputs; callers do not give those."""
    made = model()
    made.graph.input.add().CopyFrom(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2, 3]))

    assert [spec.name for spec in input_specs(made)] == ["x"]


def test_sound_model_passes():
    """The model all others here are broken forms of is fine."""
    check_sound(model(), origin="m")
    assert onnx.load_from_string(onnx_bytes(model(), origin="m")) == model()


def test_a_graph_of_too_many_nodes_is_refused(monkeypatch):
    """It is said how many there are, before anything that takes long is done with them."""
    monkeypatch.setattr("enginegate.sources.onnx_form.MOST_NODES", 0)

    with pytest.raises(ModelError, match="has 1 nodes; 0 at most"):
        check_sound(model(), origin="models:/m/1")
