from dataclasses import replace

import pytest

from enginegate.errors import ModelError, ServerError
from enginegate.triton import backends
from enginegate.triton.install import TritonInstall
from tests.fakes.answering import ABSENT, DAMAGED, POLLING, AnsweringClient


@pytest.fixture(autouse=True)
def _nothing_known():
    backends._known.clear()


@pytest.mark.parametrize(
    ("says", "has"), [(ABSENT, False), (DAMAGED, True), (None, True)], ids=["no", "yes", "loads"]
)
def test_error_message_of_the_server_decides(says, has):
    """A backend that complains about the file is there; the probe is cleared away, and once."""
    client = AnsweringClient(says)

    assert (
        backends.server_has_backend(client, "tensorrt"),
        backends.server_has_backend(client, "tensorrt"),
    ) == (has, has)

    names = {model for model, _, _ in client.loaded}
    assert [(backend, files) for _, backend, files in client.loaded] == [
        ("tensorrt", ("1/model.plan",)),
        ("python", ("1/model.py",)),
    ]
    assert client.unloaded == list(names)


def test_server_that_takes_no_load_calls_cannot_be_asked():
    """The caller decides then; nothing is remembered as an answer."""
    with pytest.raises(ServerError, match="not allowed"):
        backends.server_has_backend(AnsweringClient(POLLING), "onnxruntime")

    assert backends.server_has_backend(AnsweringClient(DAMAGED), "onnxruntime")


@pytest.mark.parametrize(("version", "has"), [("2.70.0", False), ("2.71.0", True), ("3.0", True)])
def test_server_that_does_not_batch_packages_counts_as_without_their_backend(version, has):
    """Triton's PyTorch backend batches AOTInductor packages from release 26.07 on."""
    client = AnsweringClient(DAMAGED, version=version)

    assert backends.server_has_backend(client, "pytorch") == has


def test_only_backends_of_engines_are_asked_for():
    """A Python model without its file would hang the server's load for ever."""
    with pytest.raises(ModelError, match="none of Triton's own backends"):
        backends.server_has_backend(AnsweringClient(), "python")


@pytest.mark.parametrize(
    ("wanted", "has", "chosen"),
    [
        ("auto", True, "tensorrt"),
        ("auto", False, "python"),
        ("native", True, "tensorrt"),
        ("python", True, "python"),
        ("python", False, "python"),
    ],
)
def test_policy_and_the_server_choose(wanted, has, chosen):
    """Native where it is there and not ruled out."""
    assert backends.choose_backend(wanted, "tensorrt", has=has) == chosen


def test_policy_that_insists_is_refused():
    """It would otherwise be served in a way that it rules out."""
    with pytest.raises(ModelError, match="has no tensorrt backend"):
        backends.choose_backend("native", "tensorrt", has=False)


def test_backends_of_an_installation_are_its_folders(tmp_path):
    """A backend is a folder with its library; a folder without it cannot be loaded from."""
    _backend(tmp_path, "tensorrt")
    (tmp_path / "onnxruntime").mkdir()
    install = TritonInstall(tmp_path / "tritonserver", tmp_path, (), "test")

    assert backends.install_has_backend(install, "tensorrt")
    assert not backends.install_has_backend(install, "onnxruntime")
    assert not backends.install_has_backend(replace(install, backends=None), "tensorrt")


def test_running_server_tells_what_it_has():
    """Each of Triton's own backends for engines is asked for."""
    assert backends.server_backends(AnsweringClient(DAMAGED)) == ("onnxruntime", "tensorrt")
    backends._known.clear()
    assert backends.server_backends(AnsweringClient(ABSENT)) == ()


def _backend(folder, name):
    (folder / name).mkdir(parents=True)
    (folder / name / f"libtriton_{name}.so").touch()


@pytest.mark.parametrize(
    ("says", "chosen"), [(DAMAGED, "tensorrt"), (ABSENT, "python"), (POLLING, "tensorrt")]
)
def test_live_server_must_have_the_backend_too(tmp_path, says, chosen):
    """The live server must have the backend too; one that cannot be asked is believed to."""
    _backend(tmp_path, "tensorrt")
    install = TritonInstall(tmp_path / "tritonserver", tmp_path, (), "test")
    live = AnsweringClient(says)

    assert backends.backend_for("auto", "tensorrt", install=install, live=live) == chosen
    assert backends.backend_for("auto", "tensorrt", install=install, live=None) == "tensorrt"
    assert backends.backend_for("auto", "onnxruntime", install=install, live=live) == "python"
    assert backends.backend_for("python", "tensorrt", install=install, live=live) == "python"
