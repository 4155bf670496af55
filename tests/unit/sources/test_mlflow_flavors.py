"""An MLmodel file is read with care: each oddity has its message."""

import zipfile

import pytest

from enginegate.errors import ModelError
from enginegate.sources.mlflow_flavors import Flavour, LoggedModel, read_logged, torch_module


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [1, ", "MLmodel file is damaged: ParserError", id="not-yaml"),
        pytest.param("- 1\n- 2\n", "MLmodel file is damaged: ", id="list"),
        pytest.param("", "MLmodel file is damaged: ", id="empty"),
        pytest.param("flavors: 7\n", "flavors is 7, which is no table", id="flavors"),
        pytest.param("flavors:\n  onnx: [1]\n", r"flavors\.onnx\.data: None", id="settings"),
        pytest.param("flavors:\n  onnx:\n    data: [1]\n", r"onnx\.data: \[1\]", id="data"),
        pytest.param("flavors: " + "[" * 5000, "MLmodel file is damaged: ", id="deep"),
        pytest.param("a: " + "x" * (17 << 20), "more than 16,777,216 is no", id="large"),
    ],
)
def test_malformed_mlmodel_file_is_refused(tmp_path, text, message):
    """The message names the model and the file, and what is wrong with it."""
    (tmp_path / "MLmodel").write_text(text)

    with pytest.raises(ModelError, match=message):
        read_logged("models:/m/1", tmp_path)


@pytest.mark.slow
def test_archive_that_unpacks_to_more_than_memory_is_refused(tmp_path, monkeypatch):
    """Nothing of it is unpacked before."""
    data = tmp_path / "data"
    data.mkdir()
    with zipfile.ZipFile(data / "model.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/weights/0", bytes(1 << 20))
    monkeypatch.setattr("enginegate.data.free_memory", lambda: 1 << 10)
    model = LoggedModel("models:/m/1", Flavour.PYTORCH, tmp_path, data)

    with pytest.raises(ModelError, match=r"m/1 was not opened: model\.pt2: it unpacks to"):
        torch_module(model, allow_pickle=False)
