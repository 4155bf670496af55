"""What a stranger's folder says about its model is read with care: each oddity has its message."""

import json
import zipfile

import pytest

from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.sources.huggingface import open_folder
from enginegate.sources.mlflow_flavors import Flavour, LoggedModel, read_logged, torch_module

_DEEP = 100_000


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
def test_an_odd_mlmodel_file_is_refused(tmp_path, text, message):
    """The message names the model and the file, and what is wrong with it."""
    (tmp_path / "MLmodel").write_text(text)

    with pytest.raises(ModelError, match=message):
        read_logged("models:/m/1", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[1, 2]", "config.json holds a list, and must hold a table", id="list"),
        pytest.param("3", "config.json holds a number", id="number"),
        pytest.param("[" * _DEEP, "config.json is nested too deep", id="deep"),
        pytest.param(" " * (17 << 20), "more than 16,777,216 is no", id="large"),
        pytest.param('{"architectures": 7}', "architectures is 7, and must be", id="architectures"),
        pytest.param(
            '{"architectures": ["BertModel"], "max_position_embeddings": "many"}',
            "max_position_embeddings is 'many', and must be a whole number",
            id="positions",
        ),
        pytest.param(
            '{"architectures": ["BertModel"], "auto_map": ["x"]}',
            r"auto_map is \['x'\], and must be a table",
            id="code",
        ),
    ],
)
def test_an_odd_config_is_refused(tmp_path, text, message):
    """The message names the key and its value."""
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelError, match=message):
        open_folder(ModelSource(uri=f"hf:{tmp_path}"))


@pytest.mark.parametrize("modules", [{}, [7], [{"type": 3, "path": ""}], [{"type": "a.Pooling"}]])
def test_odd_modules_are_refused(tmp_path, modules):
    """What sentence-transformers would not write is not guessed at."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (tmp_path / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelError, match=r"modules\.json must list modules"):
        open_folder(ModelSource(uri=f"hf:{tmp_path}"))


@pytest.mark.slow
def test_a_program_that_unpacks_to_more_than_there_is_is_refused(tmp_path, monkeypatch):
    """Nothing of it is unpacked before."""
    data = tmp_path / "data"
    data.mkdir()
    with zipfile.ZipFile(data / "model.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/weights/0", bytes(1 << 20))
    monkeypatch.setattr("enginegate.data.free_memory", lambda: 1 << 10)
    model = LoggedModel("models:/m/1", Flavour.PYTORCH, tmp_path, data)

    with pytest.raises(ModelError, match=r"m/1 was not opened: model\.pt2: it unpacks to"):
        torch_module(model, allow_pickle=False)
