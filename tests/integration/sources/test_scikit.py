"""scikit-learn models become ONNX that gives logits, or are refused."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

from enginegate.candidate import Candidate
from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.errors import DataError, ModelError
from enginegate.policy import CalibrationTable
from enginegate.precision import convert

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
    model = make_pipeline(FunctionTransformer(np.log1p), LogisticRegression())
    model.fit(abs(rows.inputs["features"]), rows.labels)
    uri = registry.log("sklearn", model, name="odd", serialization_format="cloudpickle")

    with pytest.raises(ModelError, match=r"odd/1 cannot become ONNX.*FunctionTransformer"):
        export(uri, tmp_path, data=rows, allow_pickle=True)


def test_int8_of_a_pipeline_quantises_its_layers(registry, classifier, export, rows, tmp_path):
    """Behind a scaler, whose type ONNX's own inference does not know, the layers are found."""
    uri = registry.log(
        "sklearn", classifier("network"), name="scaled", serialization_format="cloudpickle"
    )
    path = export(uri, tmp_path, data=rows, allow_pickle=True).folder / "model.onnx"

    found = convert(
        path, Candidate.parse("onnxruntime-int8"), data=rows, rules=CalibrationTable(method="max")
    )

    assert found.stats().layers == {"int8": 2}
    assert "without symbolic shapes" in found.converter


@pytest.fixture(scope="module")
def tumours():
    """Two classes of 30 features that classifiers are very sure about."""
    features, classes = load_breast_cancer(return_X_y=True)
    ids = np.arange(len(classes)).astype(str)
    return DataSet("tumours.npz", {"x": features.astype(np.float32)}, classes, ids, {})


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: make_pipeline(StandardScaler(), LogisticRegression()), id="logistic"),
        pytest.param(
            lambda: make_pipeline(
                StandardScaler(), MLPClassifier((16,), solver="lbfgs", random_state=0)
            ),
            id="network",
        ),
        pytest.param(
            lambda: HistGradientBoostingClassifier(max_iter=40, learning_rate=0.5), id="boosting"
        ),
    ],
)
def test_sure_classifiers_are_like_their_onnx(registry, export, tumours, tmp_path, request, model):
    """Probabilities of almost 0, whose logarithms differ in float32, pass at the default limit."""
    fitted = model().fit(tumours.inputs["x"], tumours.labels)
    uri = registry.log(
        "sklearn",
        fitted,
        name=f"sure-{request.node.callspec.id}",
        serialization_format="cloudpickle",
    )

    kept = export(uri, tmp_path, data=tumours, allow_pickle=True)

    assert kept.value.parity_max_abs_error < kept.value.parity_tolerance == 1e-3
    rows = tumours.head(256).inputs
    with open_onnx(kept.folder / "model.onnx") as opened:
        logits = opened.run(dict(rows))["logits"]
    exact = np.log(np.maximum(fitted.predict_proba(rows["x"]), 1e-6))
    assert np.abs(logits - exact).max() > 0.01


def test_regression_of_several_targets_keeps_their_shape(registry, export, rows, tmp_path):
    """One row a sample, one number a target."""
    features = rows.inputs["features"]
    model = LinearRegression().fit(features, features[:, :3] * 2.0)
    uri = registry.log("sklearn", model, name="targets")

    kept = export(uri, tmp_path, data=rows)

    with open_onnx(kept.folder / "model.onnx") as opened:
        answers = opened.run(dict(rows.inputs))["prediction"]
    np.testing.assert_allclose(answers, features[:, :3] * 2.0, atol=1e-4)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MLPClassifier((4,), max_iter=5, random_state=0), id="network"),
        pytest.param(RandomForestClassifier(2, max_depth=2, random_state=0), id="forest"),
    ],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_several_labels_at_once_are_refused_with_a_way_out(
    registry, export, rows, tmp_path, request, model
):
    """Their probabilities are not those of one class among others."""
    features = rows.inputs["features"]
    model.fit(features, (features[:, :2] > features[:, :2].mean()).astype(int))
    name = f"labels-{request.node.callspec.id}"
    uri = registry.log("sklearn", model, name=name, serialization_format="cloudpickle")

    with pytest.raises(ModelError, match=r"several labels at once.*multi-label"):
        export(uri, tmp_path, data=rows, allow_pickle=True)
