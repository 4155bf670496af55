"""`enginegate init`: a model and its data become a policy that is valid as it stands."""

import io

import numpy as np
import onnx
import pandas as pd
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from enginegate.cli.output.json_output import Printer
from enginegate.cli.policy.first_data import ColumnFlags
from enginegate.cli.policy.init import InitOptions, write_first_policy
from enginegate.cli.policy.model_address import model_uri
from enginegate.data_sources import load_data
from enginegate.errors import DataError, InputError, ModelError
from enginegate.policy import read_policy
from enginegate.preflight import check_policy

SLO = {"p99_ms": 50.0, "min_throughput_per_s": 100.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that is the current one, with a linear model and labelled data."""
    monkeypatch.chdir(tmp_path)
    save_layer("linear.onnx", numpy_helper.from_array(np.eye(4, 3, dtype=np.float32), "w"))
    write_samples("data.npz", 1000)
    return tmp_path


def save_layer(path, weights, output="logits", width=3):
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], [output], "layer")],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", width])],
        [weights],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def write_samples(path, count):
    x = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    np.savez(path, **{"input.x": x, "label": x[:, :3].argmax(1), "slice.half": x[:, 3] > 0})


def init(model="linear.onnx", **changes):
    values = {"model": model, "data": "data.npz", **SLO, **changes}
    written = io.StringIO()
    write_first_policy(InitOptions(**values), Printer(Console(file=written, width=200)))
    return written.getvalue()


def test_policy_is_short_valid_and_followed_by_the_next_command(folder):
    """Nothing has to be added before `qualify`."""
    said = init()

    path = folder / "policies" / "linear.toml"
    policy = read_policy(path)
    assert len(path.read_text().splitlines()) <= 20
    assert not check_policy(policy).problems
    assert (policy.task, policy.model.uri) == ("classification", "file:linear.onnx")
    assert [str(c) for c in policy.candidates.all()][:2] == ["onnxruntime-fp32", "onnxruntime-int8"]
    assert said.rstrip().endswith("Next: enginegate qualify policies/linear.toml")


def test_samples_are_set_aside_for_int8_and_judge_nothing(folder):
    """No sample is in both files, and every class is in each."""
    init()

    policy = read_policy(folder / "policies" / "linear.toml")
    judged, calibrated = load_data(policy.data.evaluation), load_data(policy.data.calibration)
    assert (len(judged), len(calibrated)) == (800, 200)
    assert not {*judged.ids} & {*calibrated.ids}
    assert {*calibrated.labels} == {0, 1, 2}


def test_named_calibration_data_is_used_as_it_is(folder):
    write_samples("other.npz", 64)

    init(calibration="other.npz")

    data = read_policy(folder / "policies" / "linear.toml").data
    assert (str(data.evaluation), str(data.calibration)) == ("data.npz", "other.npz")
    assert not (folder / ".enginegate" / "data").exists()


def test_too_few_samples_leave_int8_out(folder):
    """What could only be inconclusive is not asked for, and that is said."""
    write_samples("data.npz", 420)

    said = init()

    assert "int8 is left out" in said
    assert [str(c) for c in read_policy(folder / "policies" / "linear.toml").candidates.all()] == [
        "onnxruntime-fp32"
    ]


@pytest.mark.usefixtures("folder")
def test_existing_file_is_kept():
    """A policy that somebody edited is not replaced by accident."""
    init()

    with pytest.raises(InputError, match=r"is there already.*--force"):
        init()
    init(force=True)


@pytest.mark.usefixtures("folder")
def test_slo_is_asked_for_by_its_flags():
    """Nothing but a person knows it; the message is the command's missing part."""
    with pytest.raises(InputError, match=r"--p99-ms 100 --min-throughput 100"):
        init(p99_ms=None)


def test_person_is_asked_for_what_neither_shows(folder, monkeypatch):
    """Enter takes a suggestion; an answer that is none is asked for again."""
    np.savez("data.npz", **{"input.x": np.zeros((500, 4), np.float32)})
    answers = iter(["", "classes", "regression", "fast", "-3", "12.5", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda: next(answers))

    said = init(p99_ms=None, min_throughput_per_s=None)

    policy = read_policy(folder / "policies" / "linear.toml")
    assert policy.task == "regression"
    assert (policy.slo.p99_ms, policy.slo.min_throughput_per_s) == (12.5, 50)
    assert said.count("99th percentile") == 3


@pytest.mark.usefixtures("folder")
def test_data_of_other_names_is_refused_with_the_remedy():
    np.savez("data.npz", **{"input.image": np.zeros((500, 4), np.float32)})

    with pytest.raises(DataError, match=r"holds inputs \['image'\], the model takes \['x'\]"):
        init()


def test_flat_columns_become_the_input_and_texts_its_classes(folder):
    """A table as people have it: each feature a column, classes by name."""
    x = np.random.default_rng(0).normal(size=(900, 4))
    table = pd.DataFrame(x, columns=["age", "bmi", "pulse", "height"])
    table["label"] = np.array(["a", "b", "c"])[x[:, :3].argmax(1)]
    table["clinic"] = np.where(x[:, 3] > 0, "north", "south")
    table.to_parquet("data.parquet")

    init(data="data.parquet", set_aside=0)

    policy = read_policy(folder / "policies" / "linear.toml")
    data = load_data(policy.data.evaluation)
    assert policy.data.columns.classes == ("a", "b", "c")
    assert (data.inputs["x"].shape, data.inputs["x"].dtype) == ((900, 4), np.float32)
    assert list(data.slices) == ["clinic"]
    assert np.array_equal(data.labels, x[:, :3].argmax(1))


def test_arrays_of_other_names_are_told_by_their_shapes(folder):
    """X and y, as many people call them."""
    x = np.random.default_rng(0).normal(size=(900, 4)).astype(np.float32)
    np.savez("data.npz", X=x, y=x[:, :3].argmax(1))

    init()

    policy = read_policy(folder / "policies" / "linear.toml")
    assert policy.task == "classification"
    assert load_data(policy.data.evaluation).inputs["x"].shape == (800, 4)


def test_columns_are_named_by_flags_where_they_could_be_any(folder):
    x = np.zeros((900, 4), np.float32)
    np.savez("data.npz", old=x, new=x + 1, truth=np.arange(900) % 3)

    with pytest.raises(DataError, match=r"old \(float32\[4\]\), .*--input NAME=COLUMN"):
        init()
    init(columns=ColumnFlags(inputs=("x=new",), label="truth"))

    data = load_data(read_policy(folder / "policies" / "linear.toml").data.evaluation)
    assert data.inputs["x"].min() == 1
    assert data.labels is not None


def test_numbers_as_labels_make_a_regression(folder):
    """They are labels of the output, whatever their column is called."""
    weights = numpy_helper.from_array(np.ones((4, 1), np.float32), "w")
    save_layer("price.onnx", weights, "price", 1)
    x = np.random.default_rng(0).normal(size=(900, 4)).astype(np.float32)
    np.savez("data.npz", X=x, target=x.sum(1, keepdims=True))

    init("price.onnx")

    policy = read_policy(folder / "policies" / "price.toml")
    assert policy.task == "regression"
    assert list(policy.metrics) == ["r2"]
    assert load_data(policy.data.evaluation).targets["price"].shape == (800, 1)


def test_unlabelled_vectors_need_the_task(folder):
    """It is not guessed: the flag and its values are named."""
    np.savez("data.npz", **{"input.x": np.zeros((500, 4), np.float32)})

    with pytest.raises(InputError, match=r"nothing in the data labels logits.*--task"):
        init()
    init(task="embedding")
    assert read_policy(folder / "policies" / "linear.toml").task == "embedding"


@pytest.mark.parametrize("called_like_arrays", [False, True])
@pytest.mark.usefixtures("folder")
def test_column_of_labels_that_is_empty_is_named(called_like_arrays):
    """pandas writes a column without any value as of no type; nobody should search for why."""
    table = pd.DataFrame(np.zeros((500, 4)), columns=list("abcd")).assign(label=None)
    if called_like_arrays:
        table["input.x"] = list(np.zeros((500, 4), np.float32))
    table.to_parquet("data.parquet")

    with pytest.raises(
        InputError, match=r"labels logits .*; column 'label' of .* is empty in every row.*--task"
    ):
        init(data="data.parquet")

    said = " ".join(init(data="data.parquet", task="embedding").split())
    assert "note column 'label' of" in said
    assert "--label COLUMN" in said


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model.pkl", "serialization_format='skops'"),
        ("model.pt", r"torch\.export\.save"),
        ("model.safetensors", "save_pretrained"),
        ("model.h5", "ONNX"),
        ("model.xyz", "Name one of"),
    ],
)
def test_files_that_run_code_are_refused_with_another_way(tmp_path, name, remedy):
    (tmp_path / name).write_bytes(b"x")

    with pytest.raises(ModelError, match=remedy):
        model_uri(name, tmp_path)


def test_addresses_and_paths_are_understood(tmp_path):
    """A person names a model in the words they have."""
    (tmp_path / "model.onnx").write_bytes(b"x")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")

    assert model_uri("model.onnx", tmp_path) == f"file:{tmp_path}/model.onnx"
    assert model_uri("bert", tmp_path) == f"hf:{tmp_path}/bert"
    assert model_uri("models:/digits/1", tmp_path) == "models:/digits/1"
    assert model_uri("package.module:make", tmp_path) == "python:package.module:make"
    with pytest.raises(ModelError, match=r"There is no model nothing\.onnx"):
        model_uri("nothing.onnx", tmp_path)
