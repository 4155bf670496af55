"""Data of every form is one data set: the same samples have one digest, whatever holds them."""

import os
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginegate.data import read_data
from enginegate.data_sources import load_data, read_source_header
from enginegate.errors import DataError, PolicyError
from enginegate.policy.data import Data


@pytest.fixture
def digest(arrays, tmp_path):
    """Of the samples as an ``.npz``, which is the form that other tests pin."""
    np.savez(tmp_path / "plain.npz", **arrays)
    return read_data(tmp_path / "plain.npz").sha256


def table(arrays):
    """An Arrow table with a tensor column of fixed shape."""
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(arrays["input.x"])
    rest = {name: pa.array(array.tolist()) for name, array in arrays.items() if array.ndim == 1}
    return pa.table({"input.x": tensors, **rest})


def features(arrays):
    """A Hugging Face dataset of these arrays."""
    kinds = datasets.Features(
        {
            "input.x": datasets.Array2D((2, 3), "float32"),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
            "slice.light": datasets.Value("string"),
            "id": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_dict(
        {name: array.tolist() for name, array in arrays.items()}, features=kinds
    )


class TestOneDigest:
    def test_parquet_file(self, arrays, digest, source, tmp_path):
        pq.write_table(table(arrays), tmp_path / "e.parquet", row_group_size=5)

        assert load_data(source("e.parquet")).sha256 == digest

    def test_folder_and_pattern_of_parquet_files(self, arrays, digest, source, tmp_path):
        """Files follow one another in the order of their names."""
        whole, folder = table(arrays), tmp_path / "data"
        folder.mkdir()
        for place in range(3):
            pq.write_table(whole.slice(4 * place, 4), folder / f"test-{place}.parquet")

        assert load_data(source("data")).sha256 == digest
        pq.write_table(whole, folder / "train-0.parquet")
        assert load_data(source("data/test-*.parquet")).sha256 == digest

    def test_hugging_face_folder(self, arrays, digest, source, tmp_path):
        features(arrays).save_to_disk(str(tmp_path / "hf"), num_shards=2)

        assert load_data(source("hf")).sha256 == digest

    def test_arrow_files_of_hugging_face(self, arrays, digest, source, tmp_path):
        """The files alone, without what describes them."""
        features(arrays).save_to_disk(str(tmp_path / "hf"), num_shards=2)
        for name in ("state.json", "dataset_info.json"):
            (tmp_path / "hf" / name).unlink()

        assert load_data(source("hf")).sha256 == digest

    def test_function_that_yields_pieces(self, digest, source, tmp_path, monkeypatch):
        (tmp_path / "pieces_of_data.py").write_text(
            "import numpy as np\n"
            "def samples():\n"
            "    with np.load(__file__.replace('pieces_of_data.py', 'plain.npz')) as whole:\n"
            "        arrays = dict(whole)\n"
            "    for start in (0, 5):\n"
            "        yield {k: v[start:12 if start else 5] for k, v in arrays.items()}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

        found = load_data(source("python:pieces_of_data:samples", allow_code=True))

        assert found.sha256 == digest
        sys.modules.pop("pieces_of_data")

    def test_archive_with_other_names(self, arrays, digest, source, tmp_path):
        """Arrays are columns: the policy says what they are."""
        names = {"input.x": "X", "label": "y", "slice.light": "light", "id": "name"}
        np.savez(tmp_path / "named.npz", **{names[n]: array for n, array in arrays.items()})

        found = load_data(
            source(
                "named.npz",
                columns={"inputs": {"x": "X"}, "label": "y", "slices": ["light"], "id": "name"},
            )
        )

        assert found.sha256 == digest

    def test_one_array_file_is_one_column(self, arrays, source, tmp_path):
        np.save(tmp_path / "X.npy", arrays["input.x"])

        found = load_data(source("X.npy", columns={"inputs": {"x": "X"}}))

        assert np.array_equal(found.inputs["x"], arrays["input.x"])


class TestKept:
    def test_a_set_is_converted_once(self, arrays, source, tmp_path, caplog):
        """A copy under another name is the same content; another content is another set."""
        caplog.set_level("INFO", "enginegate.data")
        pq.write_table(table(arrays), tmp_path / "e.parquet")
        pq.write_table(table(arrays), tmp_path / "copy.parquet")

        for name in ("e.parquet", "e.parquet", "copy.parquet"):
            load_data(source(name))

        assert caplog.text.count("converting") == 1
        pq.write_table(table(arrays | {"label": arrays["label"] + 1}), tmp_path / "e.parquet")
        assert load_data(source("e.parquet")).labels.tolist() == [1, 2, 3] * 4
        assert caplog.text.count("converting") == 2

    def test_converted_data_is_its_owners_and_mapped(self, arrays, source, tmp_path):
        """User data in the workspace; and inputs are not read into memory."""
        pq.write_table(table(arrays), tmp_path / "e.parquet")

        found = load_data(source("e.parquet"))

        (folder,) = (p for p in (tmp_path / ".enginegate/store/data").iterdir() if p.is_dir())
        assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
        assert folder.parent.stat().st_mode & 0o777 == 0o700
        assert isinstance(found.inputs["x"], np.memmap)

    def test_damaged_conversion_is_made_again(self, arrays, digest, source, tmp_path):
        pq.write_table(table(arrays), tmp_path / "e.parquet")
        load_data(source("e.parquet"))
        (file,) = (tmp_path / ".enginegate/store/data").glob("*/0.npy")
        file.write_bytes(b"cut short")

        assert load_data(source("e.parquet")).sha256 == digest

    def test_failed_conversion_leaves_nothing(self, source, tmp_path):
        """A row without a value far from the first."""
        rows = {"input.x": [1.0] * 5000 + [None], "label": [0] * 5001}
        pq.write_table(pa.table(rows), tmp_path / "e.parquet")

        with pytest.raises(DataError, match=r"column input\.x has 1 empty value"):
            load_data(source("e.parquet"))

        assert not [p for p in (tmp_path / ".enginegate/store/data").iterdir() if p.is_dir()]


class TestFunctions:
    def test_code_needs_permission(self, source):
        """Nothing is imported without it."""
        with pytest.raises(PolicyError, match=r"set allow_code = true under \[data\]"):
            load_data(source("python:never_imported:samples"))

        assert "never_imported" not in sys.modules

    def test_failing_function_is_named(self, source, tmp_path, monkeypatch):
        (tmp_path / "failing_data.py").write_text("def samples():\n    raise OSError('no disk')\n")
        monkeypatch.syspath_prepend(tmp_path)

        with pytest.raises(DataError, match="failing_data:samples failed: OSError: no disk"):
            load_data(source("python:failing_data:samples", allow_code=True))

    def test_header_does_not_call_it(self, source):
        assert read_source_header(source("python:never_imported:samples", allow_code=True)) is None


def test_header_of_converted_data_needs_no_conversion(arrays, source, tmp_path):
    """A policy is checked without a copy of its data."""
    pq.write_table(table(arrays), tmp_path / "e.parquet")

    header = read_source_header(source("e.parquet"))

    assert header.samples == 12
    assert header.inputs["x"].shape == (-1, 2, 3)
    assert header.arrays == {"input.x", "label", "slice.light", "id"}
    assert not (tmp_path / ".enginegate").exists()


def test_pipe_is_not_read(source, tmp_path):
    """Nobody may ever write to it."""
    os.mkfifo(tmp_path / "e.parquet")

    with pytest.raises(DataError, match="neither a file nor a folder"):
        load_data(source("e.parquet"))


@pytest.mark.parametrize("written", ["../x.parquet", "mlflow:run", "python:module", ""])
def test_address_that_is_none_is_refused(source, written):
    with pytest.raises(ValueError, match=r"may not contain|must (be|name)"):
        source(written)


def test_folder_of_nothing_lists_the_forms(source, tmp_path):
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match="holds no data of a form that is known"):
        load_data(source("empty"))


def test_policy_holds_a_set_as_a_plain_path(source, tmp_path):
    """Digests of policies written before sets had other forms stay what they were."""
    assert str(source("./data//e.npz")) == "data/e.npz"
    assert source("./data//e.npz").path == tmp_path / "data" / "e.npz"
    assert (
        Data.model_validate({"evaluation": "e.npz"}).canonical_json() == b'{"evaluation":"e.npz"}'
    )
