"""MLflow knows a model's run and its signature besides its files."""

import numpy as np
import pytest
import yaml

from enginegate.errors import ModelError

pytestmark = pytest.mark.xdist_group("sources")


def test_model_of_a_run(registry, export, fp32_onnx, cnn, tmp_path):
    """A model that was logged and never registered is found by run and name."""
    uri = registry.log_in_run("onnx", fp32_onnx, name="unregistered", save_as_external_data=False)

    assert export(uri, tmp_path).value.file == cnn.value.file


@pytest.mark.parametrize("field", ["run", "name"])
def test_absent_run_or_model_is_named(registry, export, fp32_onnx, tmp_path, field):
    """No such run, or nothing of that name in it."""
    uri = registry.log_in_run("onnx", fp32_onnx, name="known", save_as_external_data=False)
    run = uri.split("/")[1] if field == "name" else "0" * 32

    with pytest.raises(ModelError, match=rf"has no runs:/{run}/unknown"):
        export(f"runs:/{run}/unknown", tmp_path)


@pytest.mark.usefixtures("importable")
def test_signature_leaves_axes_open(registry, export, tokens, tmp_path):
    """A pickled module says nothing about its axes; the -1 of its signature do."""
    import toy_models
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    whole, real = np.dtype(np.int64), np.dtype(np.float32)
    signature = ModelSignature(
        inputs=Schema([TensorSpec(whole, (-1, -1), name) for name in tokens.inputs]),
        outputs=Schema([TensorSpec(real, (-1, 3), "ignored")]),
    )
    uri = registry.log(
        "pytorch",
        toy_models.Tokens(),
        name="open-axes",
        serialization_format="pickle",
        signature=signature,
    )

    found = export(uri, tmp_path, data=tokens, allow_pickle=True).value

    assert found.proven_lengths == {"dim1": (1, 6, 11, 12)}
    assert [spec.name for spec in found.outputs] == ["logits"]


def test_signature_names_the_output(registry, export, network, samples, tmp_path):
    """The name that a program's signature gives its output is the ONNX output's name."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    real = np.dtype(np.float32)
    signature = ModelSignature(
        inputs=Schema([TensorSpec(real, (-1, 1, 8, 8), "image")]),
        outputs=Schema([TensorSpec(real, (-1, 10), "logits")]),
    )
    uri = registry.log(
        "pytorch",
        network,
        name="named",
        input_example=(samples.inputs["image"][:4],),
        serialization_format="pt2",
        signature=signature,
    )

    assert [spec.name for spec in export(uri, tmp_path).value.outputs] == ["logits"]


@pytest.mark.parametrize("flavour", ["onnx", "python_function"])
def test_paths_that_lead_out_of_the_model_are_refused(
    registry, export, fp32_onnx, tmp_path, flavour
):
    """An MLmodel file that somebody edited may not make this program read other files."""
    name = f"leading-out-{flavour}"
    uri = registry.log("onnx", fp32_onnx, name=name, save_as_external_data=False)
    file = registry.files(uri) / "MLmodel"
    described = yaml.safe_load(file.read_text())
    described["flavors"][flavour]["data"] = "../.."
    file.write_text(yaml.safe_dump(described))

    with pytest.raises(
        ModelError, match=rf"MLmodel file sets {flavour}\.data to '\.\./\.\.', which leads out"
    ):
        export(uri, tmp_path)
