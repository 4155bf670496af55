"""Registered models become ONNX, or are refused with the reason; digests and large models."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.candidate import Candidate
from enginegate.data import DataSet, write_data
from enginegate.engines import build_engine, open_engine, open_onnx, plan_engine, serving
from enginegate.errors import DataError, InputError, ModelError, TamperedError, TrackingError
from enginegate.policy import read_policy
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_from_source
from enginegate.sources.export import read_onnx_model

pytestmark = pytest.mark.xdist_group("sources")
ROOT = Path(__file__).parents[3]


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
def test_absent_version_is_named(export, tmp_path, uri, message):
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


def test_weights_go_beside_the_file(cnn, export, beside, samples, tmp_path):
    """The store keeps them in a second file, and the model answers as before."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)

    assert set(large.value.external) == {"model.onnx.data"}
    assert (large.folder / "model.onnx").stat().st_size < cnn.value.file.size_bytes
    with (
        open_onnx(cnn.folder / "model.onnx") as small,
        open_onnx(large.folder / "model.onnx") as model,
    ):
        np.testing.assert_array_equal(
            model.run(dict(samples.inputs))["output"], small.run(dict(samples.inputs))["output"]
        )


def test_digest_of_the_file_stands_for_the_weights(export, beside, tmp_path):
    """The .onnx file names the sha256 of its data, so other weights are another digest."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)
    notes = onnx.load(large.folder / "model.onnx", load_external_data=False).metadata_props

    assert {note.value for note in notes} == {large.value.external["model.onnx.data"].sha256}


def test_changed_weights_are_noticed(export, beside, tmp_path):
    """The data file is checked wherever the model is opened."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)
    data = large.folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1] + b"x")

    with pytest.raises(TamperedError, match=r"model\.onnx\.data is not the file"):
        read_onnx_model(large.folder)


def test_nan_in_them_is_found(export, beside, set_weight, tmp_path):
    """Weights that stay outside are checked like the others."""
    set_weight(np.nan)

    with pytest.raises(ModelError, match=r"holds 1 NaN or Inf"):
        export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)


def test_engine_keeps_them_beside_it(export, beside, samples, tmp_path):
    """An FP32 engine has its own copy, serves it, and notices a change; int8 holds its own."""
    large = export(f"file:{beside}", tmp_path / "onnx", one_file_bytes=500)
    policy = read_policy(ROOT / "policies" / "digits.toml")
    plans = [
        plan_engine(large, Candidate.parse(name), tables=policy.engine_tables, calibration=samples)
        for name in ("onnxruntime-fp32", "onnxruntime-int8")
    ]

    exact, quantised = (build_engine(plan, tmp_path / "engines") for plan in plans)

    assert set(serving(exact.value, exact.folder).files) >= {"model.onnx", "model.onnx.data"}
    assert (set(exact.value.external), quantised.value.external) == ({"model.onnx.data"}, {})
    with open_engine(exact.value, exact.folder) as engine:
        assert engine.run(dict(samples.inputs))["output"].shape == (64, 10)
    (exact.folder / "model.onnx.data").write_bytes(b"other")
    with pytest.raises(TamperedError, match=r"model\.onnx\.data"):
        serving(exact.value, exact.folder)


EXPORT_ALL = """
import json, sys
from pathlib import Path
from enginegate.data import read_data
from enginegate.engines import open_onnx
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_from_source

root, tracking_uri, jobs = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, sys.argv[4])
for uri, data in jobs:
    kept = onnx_from_source(
        ModelSource(uri=uri, allow_code=True), read_data(root / data),
        onnx_root=root / "onnx", tracking_uri=tracking_uri, open_onnx=open_onnx,
        one_file_bytes=2**30,
    )
    print(kept.reused, kept.value.file.sha256)
"""


@pytest.mark.long
@pytest.mark.usefixtures("importable")
def test_every_form_has_the_same_digest_in_another_process(  # noqa: PLR0913
    registry, export, encoders, models, program, classifier, samples, tokens, rows, store, tmp_path
):
    """Hash seed, process and folder decide nothing, whatever the form; and nothing is printed."""
    jobs = [
        ("models:/cnn/1", samples),
        (f"file:{program()}", tokens),
        (f"hf:{encoders}/classifier", tokens),
        ("python:toy_models:tokens", tokens),
        (registry.log("sklearn", classifier(), name="again"), rows),
    ]
    here = [export(uri, store / "onnx", data=data, allow_code=True).value for uri, data in jobs]
    for data in (samples, tokens, rows):
        write_data(data, tmp_path / data.origin)
    named = json.dumps([(uri, data.origin) for uri, data in jobs])

    said = subprocess.run(
        [sys.executable, "-c", EXPORT_ALL, tmp_path, registry.tracking_uri, named, models],
        env=os.environ | {"PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout.split() == [word for onnx in here for word in ("False", onnx.file.sha256)]
    assert said.stderr == ""
