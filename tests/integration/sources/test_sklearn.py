"""scikit-learn models become ONNX that gives logits, or are refused."""

import numpy as np
import pytest

from enginegate.engines import open_onnx
from enginegate.errors import DataError, ModelError

pytestmark = pytest.mark.xdist_group("sources")

# Trees hold indices that are used unchecked, so skops does not trust them by itself.
TREES = {"skops_trusted_types": ["sklearn.tree._tree.Tree"]}


@pytest.mark.parametrize(
    ("kind", "logged", "allowed"),
    [
        pytest.param("logistic", {}, {}, id="safe"),
        pytest.param("forest", TREES, {"allow_pickle": True}, id="trees"),
    ],
)
def test_classifier_gives_logits(  # noqa: PLR0913
    registry, classifier, export, rows, tmp_path, kind, logged, allowed
):
    """The softmax of the ONNX output is scikit-learn's predict_proba."""
    model = classifier(kind)
    uri = registry.log("sklearn", model, name=kind, **logged)

    kept = export(uri, tmp_path, data=rows, **allowed)

    assert [str(spec) for spec in kept.value.inputs] == ["features: float32[batch, 5]"]
    assert [str(spec) for spec in kept.value.outputs] == ["logits: float32[batch, 3]"]
    assert kept.value.parity_samples == 60
    with open_onnx(kept.folder / "model.onnx") as opened:
        logits = opened.run(dict(rows.inputs))["logits"]
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(softmax, model.predict_proba(rows.inputs["features"]), atol=1e-5)


def test_pickle_needs_permission(registry, classifier, export, rows, tmp_path):
    """cloudpickle runs code; with allow_pickle it exports like skops."""
    model = classifier()
    pickled = registry.log("sklearn", model, name="pickled-sk", serialization_format="cloudpickle")
    safe = registry.log("sklearn", model, name="safe-sk")

    with pytest.raises(ModelError, match=r"model\.pkl is a pickle.*\n.*skops.*\n.*allow_pickle"):
        export(pickled, tmp_path, data=rows)

    allowed = export(pickled, tmp_path, data=rows, allow_pickle=True)
    assert allowed.value.file == export(safe, tmp_path, data=rows).value.file


def test_types_that_the_model_asks_to_trust_are_not_trusted(
    registry, classifier, export, rows, tmp_path
):
    """A skops file may name its own trusted types in MLflow's notes; they are not believed."""
    uri = registry.log("sklearn", classifier("forest"), name="smuggler", **TREES)

    with pytest.raises(
        ModelError, match=r"cannot be opened.*_tree\.Tree(?s:.*)allow_pickle = true"
    ):
        export(uri, tmp_path, data=rows)


def test_data_that_does_not_fit_is_refused(registry, classifier, export, samples, tmp_path):
    """The message has the number of features."""
    uri = registry.log("sklearn", classifier(), name="misfit")

    with pytest.raises(DataError, match=r"eval\.npz holds .*takes one input, float32\(5,\)"):
        export(uri, tmp_path, data=samples)


def test_step_without_onnx_form_is_named(registry, export, rows, tmp_path):
    """A step that skl2onnx does not know is an error with its name."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    model = make_pipeline(FunctionTransformer(np.log1p), LogisticRegression())
    model.fit(abs(rows.inputs["features"]), rows.labels)
    uri = registry.log("sklearn", model, name="odd", serialization_format="cloudpickle")

    with pytest.raises(ModelError, match=r"odd/1 cannot become ONNX.*FunctionTransformer"):
        export(uri, tmp_path, data=rows, allow_pickle=True)
