"""ONNX files are read whole, cleaned and checked; large weights go into a second file."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.errors import ModelError
from enginegate.records import sha256_file
from enginegate.sources.onnx_form import (
    ONE_FILE_BYTES,
    canonical,
    check_sound,
    files_of,
    input_specs,
    onnx_bytes,
    read_onnx,
    write_model,
)

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

    @pytest.mark.parametrize(
        "location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "a\0b"]
    )
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


def test_graph_of_too_many_nodes_is_refused(monkeypatch):
    """The message counts them, before anything that takes long is done with them."""
    monkeypatch.setattr("enginegate.sources.onnx_form.MOST_NODES", 0)

    with pytest.raises(ModelError, match="has 1 nodes; 0 at most"):
        check_sound(model(), origin="models:/m/1")


LARGE = np.arange(1200, dtype=np.float32).reshape(30, 40)
SMALL = np.arange(40, dtype=np.float32)


def large_model():
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["product"]),
        helper.make_node("Add", ["product", "small"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 30])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 40])],
        [numpy_helper.from_array(LARGE, "large"), numpy_helper.from_array(SMALL, "small")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def written(folder, *, limit, source=None):
    folder.mkdir()
    made = large_model() if source is None else read_onnx(source, origin="m", limit=limit)
    weights = folder if source is None else source.parent
    return write_model(made, folder, weights=weights, origin="m", limit=limit)


def test_model_that_fits_is_one_file(tmp_path):
    """Nothing is put beside it."""
    assert written(tmp_path / "out", limit=ONE_FILE_BYTES) == {}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.onnx"]


def test_large_weights_go_beside_and_small_ones_stay(tmp_path):
    """Only what is worth a file of its own moves; the values are the same."""
    external = written(tmp_path / "out", limit=1000)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph

    assert [t.data_location == TensorProto.EXTERNAL for t in graph.initializer] == [True, False]
    assert external["model.onnx.data"].size_bytes == LARGE.nbytes
    whole = onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(whole[0]), LARGE)


def test_file_names_the_digest_of_its_weights(tmp_path):
    """So the digest of model.onnx stands for both files."""
    external = written(tmp_path / "out", limit=1000)
    noted = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).metadata_props

    assert noted[0].value == external["model.onnx.data"].sha256
    assert noted[0].value == sha256_file(tmp_path / "out" / "model.onnx.data")


def test_weights_of_another_file_are_copied_without_being_loaded(tmp_path):
    """Reading leaves them outside, and writing gives the same two files again."""
    first = written(tmp_path / "first", limit=1000)
    source = tmp_path / "first" / "model.onnx"
    left = read_onnx(source, origin="m", limit=1000)

    second = written(tmp_path / "second", limit=1000, source=source)

    assert left.graph.initializer[0].data_location == TensorProto.EXTERNAL
    assert second == first


def test_source_is_the_file_and_its_weights(tmp_path):
    """Both belong to the source's digest, other files in the folder do not."""
    written(tmp_path / "out", limit=1000)
    (tmp_path / "out" / "README").write_text("nothing")

    found = files_of(tmp_path / "out" / "model.onnx", origin="m")

    assert [path.name for path in found] == ["model.onnx", "model.onnx.data"]


def test_link_to_a_model_is_the_model(tmp_path):
    """Caches of hubs link to files of other names; the linked file is read and digested."""
    written(tmp_path / "out", limit=1000)
    (tmp_path / "linked.onnx").symlink_to(tmp_path / "out" / "model.onnx")

    files = files_of(tmp_path / "linked.onnx", origin="m")

    assert files == files_of(tmp_path / "out" / "model.onnx", origin="m")


def test_weights_cut_short_are_noticed(tmp_path):
    """A data file that ends too early is named, with what there is of it."""
    written(tmp_path / "out", limit=1000)
    data = tmp_path / "out" / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])

    with pytest.raises(ModelError, match=r"'large' is kept in 'model\.onnx\.data'.*4799 bytes"):
        read_onnx(tmp_path / "out" / "model.onnx", origin="m", limit=1000)


def test_model_with_weights_beside_it_is_checked(tmp_path):
    """The checks of a whole model work on one in two files."""
    written(tmp_path / "out", limit=1000)
    path = tmp_path / "out" / "model.onnx"

    check_sound(read_onnx(path, origin="m", limit=1000), origin="m", path=path)


def test_form_that_needs_one_file_is_refused(monkeypatch):
    """Converted models have no second file yet; the message says what there is instead."""
    monkeypatch.setattr("enginegate.sources.onnx_form.ONE_FILE_BYTES", 1000)

    with pytest.raises(ModelError, match=r"the limit is 2 GiB.*fp32 and tf32"):
        onnx_bytes(large_model(), origin="m")
