"""Registered models become ONNX, or are refused with the reason."""

import hashlib
import os

import numpy as np
import onnx
import pytest

from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.errors import DataError, InputError, ModelError, TrackingError
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_from_source

pytestmark = pytest.mark.xdist_group("sources")


def test_torch_export_program_becomes_onnx(cnn, network, samples):
    """A .pt2 version becomes FP32 ONNX with a free batch axis that answers like PyTorch."""
    import torch

    found = cnn.value

    assert [str(spec) for spec in found.inputs] == ["image: float32[batch, 1, 8, 8]"]
    assert [str(spec) for spec in found.outputs] == ["output: float32[batch, 10]"]
    assert (found.opset, found.parity_samples) == (22, 64)
    assert found.proven_batch_sizes == (1, 2, 7)
    assert found.parity_max_abs_error <= 1e-5
    with open_onnx(cnn.folder / "model.onnx") as model, torch.no_grad():
        answer = model.run({"image": samples.inputs["image"]})["output"]
        expected = network(torch.tensor(samples.inputs["image"])).numpy()
    np.testing.assert_allclose(answer, expected, atol=1e-5)


def test_alias_is_resolved_and_reused(export, cnn, store):
    """An alias means one version, whose ONNX is in the store already; nothing is exported."""
    again = export("models:/cnn@candidate", store / "onnx")

    assert again.reused
    assert again.value == cnn.value
    assert again.value.source == "models:/cnn/1"


def test_onnx_names_no_machine_and_no_path(cnn):
    """Stack traces and notes are gone from the file."""
    content = (cnn.folder / "model.onnx").read_bytes()

    assert b"stack_trace" not in content
    assert b"site-packages" not in content
    assert b"/tmp" not in content


def test_damaged_folder_is_made_again(export, tmp_path):
    """An ONNX file that was changed since is not used, and the answer says so."""
    first = export("models:/cnn/1", tmp_path)
    (first.folder / "model.onnx").write_bytes(b"changed")

    again = export("models:/cnn/1", tmp_path)

    assert not again.reused
    assert "was damaged" in again.note
    assert again.value == first.value


def test_onnx_with_weights_beside_it_becomes_one_file(registry, export, fp32_onnx, cnn, tmp_path):
    """An ONNX flavour with external weights gives the bytes that the PyTorch flavour gave."""
    uri = registry.log("onnx", fp32_onnx, name="external", save_as_external_data=True)

    kept = export(uri, tmp_path)

    assert len(list(registry.files(uri).glob("*.data"))) == 1
    assert kept.value.file == cnn.value.file
    assert kept.value.parity_max_abs_error is None


class TestPickle:
    def test_is_refused_unless_the_policy_allows_it(self, registry, export, network, cnn, tmp_path):
        """Opening a pickle runs code, so it needs allow_pickle; then it exports like a .pt2."""
        uri = registry.log("pytorch", network, name="pickled", serialization_format="pickle")

        with pytest.raises(ModelError, match=r"model\.pth is a pickle.*\n.*pt2.*\n.*allow_pickle"):
            export(uri, tmp_path)
        kept = export(uri, tmp_path, allow_pickle=True)

        assert kept.value.file == cnn.value.file

    def test_hidden_in_a_program_is_refused(self, registry, export, tmp_path, samples, network):
        """A .pt2 archive that was given a pickle is not opened."""
        import pickle
        import zipfile

        uri = registry.log(
            "pytorch",
            network,
            name="smuggled",
            input_example=samples.inputs["image"][:4],
            serialization_format="pt2",
        )
        program = registry.files(uri) / "data" / "model.pt2"
        with zipfile.ZipFile(program, "a") as archive:
            archive.writestr("model/data/constants/evil", pickle.dumps(os.getcwd))

        with pytest.raises(ModelError, match=r"cannot be opened.*evil"):
            export(uri, tmp_path)

    def test_leaves_the_environment_as_it_was(self, cnn):
        """MLflow's switch is put back after each model."""
        assert cnn
        assert "MLFLOW_ALLOW_PICKLE_DESERIALIZATION" not in os.environ


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        pytest.param("models:/absent/1", "has no models:/absent/1", id="model"),
        pytest.param("models:/cnn/99", "has no models:/cnn/99", id="version"),
        pytest.param("models:/cnn@nobody", "has no models:/cnn@nobody", id="alias"),
    ],
)
def test_what_is_not_registered_is_named(export, tmp_path, uri, message):
    """A missing model, version or alias is an error with the URI, and leaves nothing."""
    with pytest.raises(ModelError, match=message):
        export(uri, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_mlflow_that_does_not_answer_is_named(samples, tmp_path, monkeypatch):
    """A tracking server that is down is not a missing model: the address is in the error."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(
        TrackingError, match=r"http://127\.0\.0\.1:9 could not be reached: .*refused"
    ):
        onnx_from_source(
            ModelSource(uri="models:/cnn/1"),
            samples,
            onnx_root=tmp_path,
            tracking_uri="http://127.0.0.1:9",
            open_onnx=open_onnx,
        )


def test_flavour_that_cannot_become_onnx_is_named(registry, export, fp32_onnx, tmp_path):
    """A model logged in another form says which forms can be read."""
    uri = registry.log("onnx", fp32_onnx, name="catboost", save_as_external_data=False)
    notes = registry.files(uri) / "MLmodel"
    notes.write_text(notes.read_text().replace("\n  onnx:", "\n  catboost:"))

    with pytest.raises(ModelError, match=r"has the flavour catboost.*onnx, pytorch, sklearn"):
        export(uri, tmp_path)


def test_files_that_are_gone_are_named(registry, export, fp32_onnx, tmp_path):
    """A version whose files were deleted is an error that says so."""
    import shutil

    uri = registry.log("onnx", fp32_onnx, name="gone", save_as_external_data=False)
    shutil.rmtree(registry.files(uri))

    with pytest.raises(InputError, match="models:/gone/1"):
        export(uri, tmp_path)


def test_truncated_onnx_is_refused(registry, export, fp32_onnx, tmp_path):
    """A file cut short is named with its size, and leaves nothing behind."""
    uri = registry.log("onnx", fp32_onnx, name="cut", save_as_external_data=False)
    file = registry.files(uri) / "model.onnx"
    file.write_bytes(file.read_bytes()[:3000])

    with pytest.raises(ModelError, match=r"models:/cut/1: model.onnx \(3000 bytes\)"):
        export(uri, tmp_path)

    assert [path for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_program_for_one_batch_size_is_refused(registry, export, network, samples, tmp_path):
    """A program traced with one sample has a fixed batch; the error says how to log it."""
    uri = registry.log(
        "pytorch",
        network,
        name="fixed",
        input_example=samples.inputs["image"][:1],
        serialization_format="pt2",
    )

    with pytest.raises(ModelError, match=r"logged for one batch size.*two or more samples"):
        export(uri, tmp_path)


def test_difference_from_the_framework_is_an_error(export, tmp_path):
    """Parity over the policy's limit names the number, the limit and the sample."""
    with pytest.raises(
        ModelError, match=r"differ by .*= 1e-12.* of sample image-\d+: .*\n.*rounding"
    ) as caught:
        export("models:/cnn/1", tmp_path, parity_max_abs_error=1e-12)

    assert "eval.npz" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        pytest.param(
            "picture", (8, 1, 8, 8), r"eval\.npz holds inputs .*takes \['image'\]", id="name"
        ),
        pytest.param("image", (8, 3, 8, 8), r"Guard failed: image.size\(\)\[1\] == 1", id="shape"),
    ],
)
def test_data_that_does_not_fit_is_refused(export, tmp_path, name, shape, message):
    """Samples of another name or shape than the model's input never reach it."""
    ids = np.arange(8).astype(str)
    data = DataSet("eval.npz", {name: np.zeros(shape, np.float32)}, None, ids, {})

    with pytest.raises(DataError, match=message):
        export("models:/cnn/1", tmp_path, data=data)


def test_digest_is_of_the_file(cnn):
    """The recorded digest is the file's."""
    content = (cnn.folder / "model.onnx").read_bytes()

    assert cnn.value.file.sha256 == hashlib.sha256(content).hexdigest()
    assert onnx.load_from_string(content).opset_import[0].version == cnn.value.opset
