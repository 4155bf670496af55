"""Columns become inputs, labels and slices by their names, or as a policy says."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginegate.data_sources import load_data
from enginegate.errors import DataError
from enginegate.policy.data import Data


@pytest.fixture
def flat(tmp_path):
    """A table as a warehouse exports it: one number or text a column."""
    rows = {
        "age": pa.array([30, 40, 50, 60], pa.int32()),
        "bmi": [20.5, 21.5, 22.5, 23.5],
        "site": ["north", "south", "north", "south"],
        "diagnosis": ["ill", "well", "well", "ill"],
        "risk": [0.1, 0.2, 0.3, 0.4],
        "patient": [1001, 1002, 1003, 1004],
        "seen": pa.array([0, 1, 2, 3], pa.timestamp("s")),
    }
    pq.write_table(pa.table(rows), tmp_path / "flat.parquet")
    return "flat.parquet"


def test_flat_columns_make_one_input(source, flat):
    """Put side by side in the order of the policy, in the type that the model takes."""
    columns = {
        "inputs": {"features": {"columns": ["age", "bmi"], "dtype": "float32"}},
        "label": "diagnosis",
        "classes": ["well", "ill"],
        "labels": {"score": "risk"},
        "slices": ["site"],
        "id": "patient",
    }

    found = load_data(source(flat, columns=columns))

    assert found.inputs["features"].dtype == np.float32
    assert found.inputs["features"].tolist() == [[30, 20.5], [40, 21.5], [50, 22.5], [60, 23.5]]
    assert found.labels.tolist() == [1, 0, 0, 1]
    assert found.targets["score"].tolist() == [0.1, 0.2, 0.3, 0.4]
    assert found.slices["site"].tolist() == ["north", "south", "north", "south"]
    assert found.ids.tolist() == ["1001", "1002", "1003", "1004"]


def test_each_column_may_be_an_input(source, flat):
    """Scikit-learn pipelines take one input a column."""
    found = load_data(source(flat, columns={"inputs": {"age": "age", "bmi": "bmi"}}))

    assert found.inputs["age"].tolist() == [30, 40, 50, 60]
    assert found.inputs["bmi"].shape == (4,)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param({}, r"(?s)it has age, bmi, .*\[data\.columns\]", id="none-named"),
        pytest.param({"inputs": {"x": "aeg"}}, "did you mean age", id="misspelt"),
        pytest.param({"inputs": {"x": "seen"}}, r"'seen' holds timestamp", id="no-number"),
        pytest.param({"inputs": {"x": ["age", "site"]}}, "site is no column of", id="text-beside"),
        pytest.param({"inputs": {"x": "age"}, "label": "diagnosis"}, "is text", id="no-classes"),
        pytest.param(
            {"inputs": {"x": "age"}, "label": "diagnosis", "classes": ["ill"]},
            "holds 'well', which is none of",
            id="unknown-class",
        ),
        pytest.param(
            {"inputs": {"x": {"columns": ["bmi"], "dtype": "int64"}}},
            r"holds 20\.5, which is no int64",
            id="no-integer",
        ),
        pytest.param(
            {"inputs": {"x": {"columns": ["patient"], "dtype": "int8"}}},
            "holds 1001, which is no int8",
            id="too-large",
        ),
    ],
)
def test_what_does_not_fit_is_named(source, flat, columns, message):
    """The column, and what to write instead."""
    with pytest.raises(DataError, match=message):
        load_data(source(flat, columns=columns))


def test_rows_of_different_lengths_are_refused(source, tmp_path):
    """Tokens that nobody padded."""
    pq.write_table(pa.table({"input.ids": [[1, 2], [1, 2, 3]]}), tmp_path / "t.parquet")

    with pytest.raises(DataError, match=r"differ in length.*padded"):
        load_data(source("t.parquet"))


def test_lists_are_filled_up(source, tmp_path):
    """Tokens of several lengths, and boxes of which the first sample has none."""
    rows = {
        "tokens": [[1, 2], [], [3]],
        "boxes": [[], [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]],
    }
    columns = {
        "inputs": {"ids": "tokens"},
        "labels": {"found": "boxes"},
        "padded": {"tokens": {"length": 3}, "boxes": {"length": 2, "fill": -1}},
    }
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "hf"))

    found, other = (load_data(source(name, columns=columns)) for name in ("t.parquet", "hf"))

    assert found.inputs["ids"].tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert found.targets["found"][0].tolist() == [[-1, -1], [-1, -1]]
    assert found.targets["found"][2].tolist() == [[5, 6], [-1, -1]]
    assert other.sha256 == found.sha256
    short = columns | {"padded": {"tokens": {"length": 1}, "boxes": {"length": 2}}}
    with pytest.raises(DataError, match=r"has 2 values, and \[data\.columns\] padded says 1"):
        load_data(source("t.parquet", columns=short))


def test_another_row_shape_in_a_later_block_is_refused(source, tmp_path):
    """Each block is even by itself."""
    whole = pa.table({"input.ids": [[1, 2]] * 4096 + [[1, 2, 3]] * 4096})
    pq.write_table(whole, tmp_path / "t.parquet", row_group_size=4096)

    with pytest.raises(DataError, match=r"rows of int64 \(3,\) after rows of int64 \(2,\)"):
        load_data(source("t.parquet"))


def test_texts_grow_without_being_cut(source, tmp_path):
    """A slice's longest value comes last."""
    names = ["a"] * 5000 + ["the longest of them all"]
    rows = {"input.x": [0.0] * 5001, "slice.s": names}
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")

    assert load_data(source("t.parquet")).slices["s"][-1] == "the longest of them all"


def test_other_sets_need_no_labels_and_may_have_arrays_names(tmp_path):
    """Calibration data without the label's column, and traffic that was written as arrays."""
    pq.write_table(pa.table({"age": [1.0, 2.0]}), tmp_path / "calibration.parquet")
    np.savez(tmp_path / "evaluation.npz", **{"input.x": np.zeros(2), "label": np.arange(2)})
    table = {
        "evaluation": "evaluation.npz",
        "calibration": "calibration.parquet",
        "columns": {"inputs": {"x": "age"}, "label": "ill", "slices": ["site"]},
    }
    data = Data.model_validate(table, context={"root": tmp_path})

    assert load_data(data.calibration).inputs["x"].tolist() == [1.0, 2.0]
    with pytest.raises(DataError, match="has no column 'site'"):
        load_data(data.evaluation)
