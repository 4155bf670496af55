"""Which addresses of a model a policy may hold."""

import pytest
from pydantic import ValidationError

from enginegate.policy.model_source import ModelSource


@pytest.mark.parametrize(
    ("uri", "scheme", "location"),
    [
        ("models:/digits/1", "models", "/digits/1"),
        ("models:/digits@champion", "models", "/digits@champion"),
        ("runs:/417462e933c4493c/model", "runs", "/417462e933c4493c/model"),
        ("runs:/417462e933c4493c/nested/model", "runs", "/417462e933c4493c/nested/model"),
        ("file:models/net.onnx", "file", "models/net.onnx"),
        ("file:/data/net.pt2", "file", "/data/net.pt2"),
        ("hf:models/minilm", "hf", "models/minilm"),
        ("python:mine.models:make", "python", "mine.models:make"),
    ],
)
def test_every_form_is_taken_apart(uri, scheme, location):
    """Scheme and location are what comes before and after the first colon."""
    source = ModelSource(uri=uri)

    assert (source.scheme, source.location) == (scheme, location)
    assert source.registered == uri.startswith("models:")


@pytest.mark.parametrize(
    "uri",
    [
        "models:/digits",
        "models:/digits/latest",
        "runs:/417462e933c4493c",
        "file:net.bin",
        "hf:",
        "python:mine.models",
        "python:mine.models:make()",
        "net.onnx",
        "https://example.com/net.onnx",
    ],
)
def test_other_forms_are_refused_with_the_list(uri):
    """The message has every form there is."""
    with pytest.raises(ValidationError, match=r"not one of models:/NAME/VERSION.*hf:FOLDER"):
        ModelSource(uri=uri)


@pytest.mark.parametrize("uri", ["file:../net.onnx", "hf:models/../../etc"])
def test_paths_may_not_climb(uri):
    """As everywhere in a policy."""
    with pytest.raises(ValidationError, match=r"may not contain '\.\.'"):
        ModelSource(uri=uri)


def test_code_permissions_are_off_by_default():
    """Both permissions are off until the policy states them."""
    source = ModelSource(uri="python:a:b")

    assert (source.allow_pickle, source.allow_code) == (False, False)
