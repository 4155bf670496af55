"""Weights that one ONNX file cannot hold are kept beside it, streamed and digested."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.errors import ModelError
from enginegate.records import sha256_file
from enginegate.sources.external_data import ONE_FILE_BYTES, files_of, onnx_bytes, write_model
from enginegate.sources.onnx_form import check_sound, read_onnx

LARGE = np.arange(1200, dtype=np.float32).reshape(30, 40)
SMALL = np.arange(40, dtype=np.float32)


def model():
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
    made = model() if source is None else read_onnx(source, origin="m", limit=limit)
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
    monkeypatch.setattr("enginegate.sources.external_data.ONE_FILE_BYTES", 1000)

    with pytest.raises(ModelError, match=r"the limit is 2 GiB.*fp32 and tf32"):
        onnx_bytes(model(), origin="m")
