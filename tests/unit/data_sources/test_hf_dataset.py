"""Folders of Hugging Face ``datasets``: only what is in them is read."""

import json

import datasets
import pytest

from enginegate.data_sources import load_data
from enginegate.errors import DataError


@pytest.fixture
def saved(tmp_path):
    """A data set of one split."""
    folder = tmp_path / "hf"
    datasets.Dataset.from_dict({"input.x": [1.0, 2.0]}).save_to_disk(str(folder))
    return folder


def test_selected_rows_are_the_data(tmp_path, source):
    """What was shuffled or filtered is read as it was when it was saved."""
    whole = datasets.Dataset.from_dict({"input.x": [0.0, 1.0, 2.0, 3.0]})
    whole.select([3, 1]).save_to_disk(str(tmp_path / "hf"))

    assert load_data(source("hf")).inputs["x"].tolist() == [3.0, 1.0]


def test_split_has_to_be_named(tmp_path, source):
    """The message lists the splits, each of which is a folder."""
    part = datasets.Dataset.from_dict({"input.x": [1.0]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "dd"))

    with pytest.raises(DataError, match="several splits: test, train"):
        load_data(source("dd"))
    assert len(load_data(source("dd/test"))) == 1


@pytest.mark.parametrize("name", ["../other/data.arrow", "/etc/passwd", "linked.arrow"])
def test_file_outside_of_the_folder_is_not_opened(saved, source, tmp_path, name):
    (tmp_path / "elsewhere.arrow").write_bytes(b"secret")
    (saved / "linked.arrow").symlink_to(tmp_path / "elsewhere.arrow")
    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": name}]
    (saved / "state.json").write_text(json.dumps(state))

    with pytest.raises(DataError, match="which is not in the folder"):
        load_data(source("hf"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_text('{"_data_files": 3}'),
        lambda folder: (folder / "dataset_info.json").unlink(),
        lambda folder: (folder / "dataset_info.json").write_text(
            '{"features": {"a": {"_type": "os"}}}'
        ),
        lambda folder: next(folder.glob("*.arrow")).write_bytes(b"cut"),
    ],
    ids=["no-json", "no-list", "no-description", "unknown-feature", "cut-file"],
)
def test_damaged_folder_is_refused(saved, source, damage):
    """With a message that names it."""
    damage(saved)

    with pytest.raises(DataError, match="hf"):
        load_data(source("hf"))
