import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginegate.errors import DataError
from enginegate.policy.recording import Shadow
from enginegate.shadow import import_sample, read_traffic_sample

PLAIN = Shadow()


@pytest.fixture
def wrote(tmp_path):
    """Write a Parquet file of another system."""

    def write(**columns):
        path = tmp_path / "theirs.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    return write


def test_parquet_of_another_system(wrote, home):
    """Lists, tensors, times, versions, labels and parameters are taken over; the rest is not."""
    images = np.arange(24, dtype=np.float32).reshape(3, 2, 2, 2)
    source = wrote(
        **{
            "input.image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "input.tokens": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64())),
            "output.score": pa.array([0.5, 0.25, 0.125], pa.float32()),
            "arrival": pa.array([10_000, 10_500, 12_000], pa.timestamp("ms")),
            "model_version": pa.array([7, 7, 8], pa.int32()),
            "label": pa.array([1, 0, 1], pa.int8()),
            "stage.queue_us": pa.array([1.0, 2.0, 3.0]),
            "parameter.tier": pa.array(["gold", "gold", "tin"]),
            "parameter.email": pa.array(["a@b", "c@d", "e@f"]),
            "email": pa.array(["a@b", "c@d", "e@f"]),
        }
    )

    path, info = import_sample(source, "m", Shadow(slice_parameters=("tier",)), home=home)
    sample = read_traffic_sample(path)

    assert info.left_out == ("email",)
    np.testing.assert_array_equal(sample.data.inputs["image"], images)
    assert sample.data.inputs["tokens"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert sample.outputs["score"].tolist() == [0.5, 0.25, 0.125]
    np.testing.assert_allclose(sample.arrivals_s, [0.0, 0.5, 2.0])
    assert info.model_versions == {7: 2, 8: 1}
    assert sample.data.labels.tolist() == [1, 0, 1]
    assert sample.stages_us["queue"].tolist() == [1.0, 2.0, 3.0]
    assert np.isnan(sample.stages_us["infer"]).all()
    assert set(sample.data.slices) == {"tier"}
    assert all(b"a@b" not in file.read_bytes() for file in path.iterdir())


def test_nested_lists_and_told_shapes(wrote, home):
    """A tensor may be nested lists, or flat with its shape told."""
    rows = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    source = wrote(
        **{
            "input.a": pa.array(rows),
            "input.b": pa.array([list(range(6))] * 2, pa.list_(pa.int8())),
        }
    )

    path, _ = import_sample(source, "m", PLAIN, home=home, shapes={"input.b": (2, 3)})
    sample = read_traffic_sample(path)

    assert sample.data.inputs["a"].tolist() == rows
    assert sample.data.inputs["b"].tolist() == [[[0, 1, 2], [3, 4, 5]]] * 2
    assert sample.arrivals_s.size == 0
    assert sample.info.model_versions == {0: 2}


def test_many_rows_are_taken_in_pieces(wrote, home):
    """More rows than are read at once come over whole and in order."""
    source = wrote(**{"input.x": pa.array(range(5000), pa.int64())})

    path, info = import_sample(source, "m", PLAIN, home=home)

    assert info.requests == info.rows == 5000
    assert read_traffic_sample(path).data.inputs["x"].tolist() == list(range(5000))


def test_npz(tmp_path, home):
    """The form that evaluation data has is taken over, with ids, labels and slices."""
    source = tmp_path / "theirs.npz"
    np.savez(
        source,
        **{
            "input.x": np.ones((3, 2), np.float32),
            "label": np.array([2, 1, 0]),
            "slice.day": np.array(["mon", "tue", "mon"]),
            "id": np.array(["a", "b", "c"]),
        },
    )

    path, _ = import_sample(source, "m", Shadow(drop=("request_id",)), home=home)
    sample = read_traffic_sample(path)

    assert sample.data.labels.tolist() == [2, 1, 0]
    assert sample.data.slices["day"].tolist() == ["mon", "tue", "mon"]
    assert set(sample.request_ids) == {""}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        pytest.param({"x": [1.0]}, "none is called input.NAME", id="columns-missing"),
        pytest.param({"input.x": [[1], [1, 2]]}, "differ in length", id="ragged"),
        pytest.param({"input.x": [1.0, None]}, "1 empty value", id="null"),
        pytest.param({"input.x": [[1.0, None]]}, "1 empty value", id="null-inside"),
        pytest.param({"input.x": [{"a": 1}]}, "columns hold numbers", id="struct"),
        pytest.param({"input.x": [1], "arrival": [5]}, "must hold timestamps", id="arrival"),
        pytest.param({"input.x": [1], "label": [0.5]}, "whole numbers", id="label"),
        pytest.param({"input.x": pa.array([], pa.int64())}, "no request was recorded", id="empty"),
    ],
)
def test_files_that_do_not_fit(wrote, home, columns, said):
    """Each names the column and what it should hold, and leaves nothing behind."""
    source = wrote(**columns)

    with pytest.raises(DataError, match=said):
        import_sample(source, "m", PLAIN, home=home)

    assert not home.exists() or list(home.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not parquet", "cut"])
def test_damaged_parquet_is_refused(wrote, home, content):
    """A cut or foreign file is named, not half read."""
    source = wrote(**{"input.x": list(range(1000))})
    source.write_bytes(source.read_bytes()[:-100] if content == "cut" else content)

    with pytest.raises(DataError, match=r"theirs.parquet cannot be read as Parquet"):
        import_sample(source, "m", PLAIN, home=home)


def test_missing_file_is_refused(tmp_path, home):
    """A path without a file is said as such."""
    with pytest.raises(DataError, match="no data at"):
        import_sample(tmp_path / "none.parquet", "m", PLAIN, home=home)


def test_unfit_shape_is_refused(wrote, home):
    """A told shape must hold as many values as a row has."""
    source = wrote(**{"input.x": [[1, 2, 3]]})

    with pytest.raises(DataError, match=r"has 3 values, shape \(2, 2\) needs 4"):
        import_sample(source, "m", PLAIN, home=home, shapes={"input.x": (2, 2)})
