"""The JSON files of a model folder are read with care: each oddity has its message."""

import json

import pytest

from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.sources.huggingface import open_folder

_DEEP = 100_000


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
def test_malformed_config_is_refused(tmp_path, text, message):
    """The message names the key and its value."""
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ModelError, match=message):
        open_folder(ModelSource(uri=f"hf:{tmp_path}"))


@pytest.mark.parametrize("modules", [{}, [7], [{"type": 3, "path": ""}], [{"type": "a.Pooling"}]])
def test_malformed_modules_are_refused(tmp_path, modules):
    """A list that sentence-transformers would not write is not guessed at."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    (tmp_path / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ModelError, match=r"modules\.json must list modules"):
        open_folder(ModelSource(uri=f"hf:{tmp_path}"))
