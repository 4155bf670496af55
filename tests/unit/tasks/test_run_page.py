"""Keys of artifacts, and names of versions, on Prefect's pages."""

import pytest

from tasks.run_page import artifact_key, model_version


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("models:/digits/3", "digits v3"),
        ("models:/digits@candidate", "digits @candidate"),
        ("file:models/net.onnx", "digits net.onnx"),
        ("hf:org/model", "digits model"),
    ],
)
def test_version_is_named_as_people_say_it(uri, words):
    """The registry's number, an alias, or the last part of any other address."""
    assert model_version("digits", uri) == words


def test_keys_are_what_prefect_allows_and_stay_apart():
    """Lower case, digits and dashes; two models never share a history."""
    assert artifact_key("live", "digits") == "live-digits"
    others = {artifact_key("live", name) for name in ("digits.a", "digits_a", "Digits-a")}
    assert len(others | {artifact_key("live", "digits-a")}) == 4
    assert all(key.replace("-", "").isalnum() and key == key.lower() for key in others)
