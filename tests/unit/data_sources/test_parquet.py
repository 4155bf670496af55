"""Rows of Parquet are decoded a few at a time, however small they are in the file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from enginegate.data_sources.hf_dataset import HfDatasetReader
from enginegate.data_sources.parquet import ParquetReader, read_columns
from enginegate.data_sources.reader import BLOCK_BYTES
from enginegate.policy.data import Padding

ROWS, SIDE = 64, 256
ROW_BYTES = 8 * SIDE * SIDE


def column(form):
    """Masks of zeros, half a MiB each; nearly nothing in the file."""
    masks = np.zeros((ROWS, SIDE, SIDE), np.int64)
    if form == "tensor":
        return pa.FixedShapeTensorArray.from_numpy_ndarray(masks)
    flat = pa.array(masks.reshape(-1))
    if form == "fixed lists":
        return pa.FixedSizeListArray.from_arrays(flat, SIDE * SIDE)
    if form == "text":
        return pa.array(["0" * ROW_BYTES] * ROWS)
    if form == "lists after an empty one":
        lengths = np.full(ROWS, SIDE * SIDE)
        lengths[0] = 0
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, flat[: offsets[-1]])
    offsets = np.arange(0, ROWS * SIDE * SIDE + 1, SIDE, np.int32)
    inner = pa.ListArray.from_arrays(offsets, flat)
    return pa.ListArray.from_arrays(np.arange(0, ROWS * SIDE + 1, SIDE, np.int32), inner)


@pytest.fixture(params=["tensor", "fixed lists", "nested lists", "text"])
def masks(request, tmp_path):
    path = tmp_path / "masks.parquet"
    pq.write_table(pa.table({"mask": column(request.param)}), path)
    assert path.stat().st_size < ROW_BYTES
    return path


def test_block_is_bounded_by_its_decoded_bytes(masks):
    """The file's size says nothing of repeated values."""
    blocks = list(read_columns(masks))

    assert sum(len(block["mask"]) for block in blocks) == ROWS
    assert max(len(block["mask"]) for block in blocks) <= BLOCK_BYTES // ROW_BYTES


def test_first_row_may_be_small(tmp_path):
    """Counts of values in the file say how large the others are."""
    path = tmp_path / "masks.parquet"
    pq.write_table(pa.table({"mask": column("lists after an empty one")}), path)

    reader = ParquetReader([path], "masks", {"mask": Padding(length=SIDE * SIDE)})
    rows = [len(block["mask"]) for block in reader.blocks(["mask"])]

    assert sum(rows) == ROWS
    assert max(rows) <= 1 + BLOCK_BYTES // ROW_BYTES


@pytest.mark.parametrize("written", ["Parquet", "Hugging Face"])
def test_lists_that_are_filled_up_count_as_they_will_be(tmp_path, written):
    """A few values a row in the file, millions in memory; rows without any take as much."""
    length, each = 1 << 18, 2
    lists = pa.array([[[1.0, 2.0]], [], [], [[3.0, 4.0]] * 3] * 8, pa.list_(pa.list_(pa.float32())))
    padded = {"boxes": Padding(length=length, fill=-1.0)}
    if written == "Parquet":
        path = tmp_path / "boxes.parquet"
        pq.write_table(pa.table({"boxes": lists}), path)
        reader = ParquetReader([path], "boxes", padded)
    else:
        Dataset.from_dict({"boxes": lists.to_pylist()}).save_to_disk(tmp_path / "boxes")
        reader = HfDatasetReader(tmp_path / "boxes", padded)

    blocks = [block["boxes"] for block in reader.blocks(["boxes"])]

    assert reader.columns["boxes"].shape == (length, each)
    assert max(block.nbytes for block in blocks) <= max(BLOCK_BYTES, blocks[0][:1].nbytes)
    assert sum(len(block) for block in blocks) == len(lists)
    filled = np.concatenate([block[:, :3] for block in blocks])
    assert filled[0].tolist() == [[1, 2], [-1, -1], [-1, -1]]
    assert np.all(filled[1] == -1)
    assert filled[3].tolist() == [[3, 4]] * 3


def test_other_columns_do_not_count(tmp_path):
    """Small numbers beside large masks are read as many at a time as without them."""
    path = tmp_path / "masks.parquet"
    pq.write_table(pa.table({"mask": column("tensor"), "label": np.arange(ROWS)}), path)

    (block,) = ParquetReader([path], "masks").blocks(["label"])

    assert len(block["label"]) == ROWS
