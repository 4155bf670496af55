"""What names a version of the registry, and what does not."""

import pytest

from enginegate.candidate import RegistryUri, registered_version


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("models:/digits/3", ("digits", 3, "")),
        ("models:/digits@champion", ("digits", None, "champion")),
        ("models:/with space/3", ("with space", 3, "")),
    ],
)
def test_registry_uri_is_read_and_written_alike(uri, named):
    """By number or by alias."""
    found = RegistryUri.parse(uri)

    assert found == named
    assert str(found) == uri


@pytest.mark.parametrize(
    "uri", ["models:/digits", "models:/m-0123", "models:/a/b/3", "models:/a@b/3", "runs:/r/m", "x"]
)
def test_other_uris_name_no_version(uri):
    """A run's model, a logged model and half a name."""
    assert RegistryUri.parse(uri) is None


def test_only_a_number_is_a_version():
    """An alias stands for another one tomorrow."""
    assert registered_version("models:/digits/3") == ("digits", 3)
    assert registered_version("models:/digits@champion") is None
    assert registered_version("file:model.onnx") is None
