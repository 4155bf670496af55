"""Data that nobody has described yet: what is in it, and what its columns probably are."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginegate.candidate import TensorSpec
from enginegate.data_sources import describe_data, load_data, suggest_columns
from enginegate.errors import DataError


def spec(name, *row, dtype="float32"):
    return TensorSpec(name=name, dtype=dtype, shape=(-1, *row))


def test_data_set_is_described_whole(arrays, tmp_path):
    """Nothing has to be said of columns that are called as arrays are."""
    np.savez(tmp_path / "e.npz", **arrays)

    found = describe_data(tmp_path / "e.npz")

    assert (found.form, found.samples, found.problem) == ("NumPy", 12, "")
    assert found.inputs["x"].shape == (-1, 2, 3)
    assert (found.labels, found.slices) == (("label",), ("light",))
    assert suggest_columns(found, (spec("x", 2, 3),)).inputs == {}


def test_flat_table_becomes_an_input_of_vectors(tmp_path, source):
    """Columns of numbers that are left make the input, in the type that the model takes."""
    rng = np.random.default_rng(0)
    rows = {
        "age": rng.integers(20, 90, 40),
        "bmi": rng.random(40),
        "site": ["north", "south"] * 20,
        "note": [f"text {n}" for n in range(40)],
        "target": rng.integers(0, 2, 40),
        "id": [f"p{n}" for n in range(40)],
    }
    pq.write_table(pa.table(rows), tmp_path / "flat.parquet")

    found = describe_data(tmp_path / "flat.parquet")
    guess = suggest_columns(found, (spec("features", 2),))

    assert "has no column that is called input.NAME" in found.problem
    assert guess.inputs["features"].columns == ("age", "bmi")
    assert guess.inputs["features"].dtype == "float32"
    assert (guess.label, guess.slices, guess.id) == ("target", ("site",), "id")
    described = describe_data(source("flat.parquet", columns=guess.model_dump()))
    assert described.inputs["features"] == spec("features", 2)
    assert len(load_data(source("flat.parquet", columns=guess.model_dump()))) == 40


def test_the_only_column_that_fits_is_the_input(tmp_path):
    """Whatever it is called; its type is the model's."""
    np.savez(tmp_path / "e.npz", X=np.zeros((5, 3)), y=np.zeros(5, np.int64))

    guess = suggest_columns(describe_data(tmp_path / "e.npz"), (spec("inputs", 3),))

    assert guess.inputs["inputs"].columns == ("X",)
    assert guess.inputs["inputs"].dtype == "float32"
    assert guess.label == "y"


def test_inputs_go_by_their_names(tmp_path):
    rows = {"input_ids": [[1, 2]] * 3, "attention_mask": [[1, 1]] * 3, "labels": [0, 1, 0]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "hf"))

    specs = tuple(spec(name, -1, dtype="int64") for name in ("attention_mask", "input_ids"))
    guess = suggest_columns(describe_data(tmp_path / "hf"), specs)

    assert {name: each.columns for name, each in guess.inputs.items()} == {
        "attention_mask": ("attention_mask",),
        "input_ids": ("input_ids",),
    }
    assert guess.label == "labels"


def test_missing_data_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no data at"):
        describe_data(tmp_path / "none.npz")


def test_whole_numbers_beside_a_vector_are_its_classes(tmp_path):
    """One column more than the model takes, and only one that can be a class."""
    rows = {"a": [0.1, 0.2], "b": [0.3, 0.4], "digit": [7, 3]}
    pq.write_table(pa.table(rows), tmp_path / "flat.parquet")

    guess = suggest_columns(describe_data(tmp_path / "flat.parquet"), (spec("x", 2),))

    assert guess.inputs["x"].columns == ("a", "b")
    assert guess.label == "digit"
