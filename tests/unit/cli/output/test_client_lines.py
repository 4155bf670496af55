"""Lines that somebody copies from the terminal into a program or a shell."""

import json
import shlex

import numpy as np
import pytest

from enginegate.cli.output.client_lines import ClientRequest
from enginegate.errors import InputError


def request(folder, **inputs):
    return ClientRequest("digits", inputs, folder, "digits-3")


def test_small_request_needs_no_file(tmp_path):
    """It is copied whole."""
    x = np.arange(4, dtype=np.float32).reshape(1, 4)

    asked = request(tmp_path, x=x)
    python, curl = asked.python("127.0.0.1:8001"), shlex.split(asked.curl("http://h:8000"))

    assert "np.array([[0.0, 1.0, 2.0, 3.0]], 'float32')" in python
    body = json.loads(curl[curl.index("-d") + 1])
    assert body == {
        "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 1.0, 2.0, 3.0]}]
    }
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_as_short_as_their_type_allows(tmp_path):
    """0.1 in float32 is 0.10000000149 as a double, and 0.1 means it."""
    x = np.array([[0.1, -2.5e-7]], np.float32)

    asked = request(tmp_path, x=x)

    assert "np.array([[0.1, -2.5e-07]], 'float32')" in asked.python("127.0.0.1:8001")
    assert '"data": [0.1, -2.5e-07]' in asked.curl("http://h:8000")


def test_large_request_is_in_files_that_the_lines_name(tmp_path):
    """An image is no line of a terminal."""
    image = np.zeros((1, 3, 16, 16), np.float32)

    asked = request(tmp_path / "calls", image=image)
    python, curl = asked.python("127.0.0.1:8001"), shlex.split(asked.curl("http://h:8000"))

    assert f"np.load('{tmp_path}/calls/digits-3.npz')" in python
    assert np.load(tmp_path / "calls" / "digits-3.npz")["image"].shape == image.shape
    assert json.loads((tmp_path / "calls" / "digits-3.json").read_text())["inputs"]
    assert curl[-1] == f"@{tmp_path}/calls/digits-3.json"


def test_names_of_inputs_are_quoted(tmp_path):
    """They come from a model of somebody else's."""
    asked = request(tmp_path, **{"x'); import os  #": np.zeros((1, 1), np.float32)})

    compile(asked.python("127.0.0.1:8001"), "copied", "exec")
    assert 'InferInput("x\'); import os  #"' in asked.python("127.0.0.1:8001")
    assert len(shlex.split(asked.curl("http://h:8000"))) == 7


def test_type_that_json_lacks_has_no_curl_line(tmp_path):
    assert request(tmp_path, x=np.zeros((1, 2), np.float16)).curl("http://h:8000") == ""


def test_folder_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "taken").touch()

    with pytest.raises(InputError, match="cannot be written"):
        request(tmp_path / "taken", x=np.zeros((1, 64), np.float32)).python("127.0.0.1:8001")
