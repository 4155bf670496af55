"""Small models in every form that the program reads, in a real MLflow registry and on disk."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.data import DataSet
from tests.fakes.registry import cnn_network, cnn_registry, exporter, images


@pytest.fixture(scope="session")
def samples():
    """The images."""
    return images()


@pytest.fixture(scope="session")
def tokens():
    """Sentences of 3 to 12 tokens, padded to 12, 16 of them."""
    random = np.random.default_rng(0)
    mask = (np.arange(12) < random.integers(3, 13, (16, 1))).astype(np.int64)
    inputs = {"input_ids": random.integers(1, 64, (16, 12)) * mask, "attention_mask": mask}
    return DataSet("tokens.npz", inputs, None, np.arange(16).astype(str), {})


@pytest.fixture(scope="session")
def rows():
    """Three clusters of 5 features, 60 samples with their classes."""
    random = np.random.default_rng(0)
    classes = np.arange(60) % 3
    features = (random.normal(size=(60, 5)) + classes[:, None]).astype(np.float32)
    return DataSet("rows.npz", {"features": features}, classes, np.arange(60).astype(str), {})


@pytest.fixture(scope="session")
def network():
    """The CNN."""
    return cnn_network()


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    """The registry that holds it."""
    return cnn_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="session")
def export(registry):
    """Exports a source into a folder."""
    return exporter(registry)


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store that all tests of a session share, so that a model is exported once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def cnn(export, store):
    """The registered CNN as ONNX in the store."""
    return export("models:/cnn/1", store / "onnx")


@pytest.fixture
def fp32_onnx(cnn):
    """A copy of the CNN's ONNX that a test may change."""
    return onnx.load(cnn.folder / "model.onnx")


@pytest.fixture(scope="session")
def models():
    """The folder of the module ``toy_models``, for ``python:`` sources."""
    return Path(__file__).with_name("models")


@pytest.fixture
def importable(models, monkeypatch):
    """Makes ``toy_models`` importable, as a checkout's own modules are."""
    monkeypatch.syspath_prepend(str(models))


@pytest.fixture
def program(importable, tokens, tmp_path):  # noqa: ARG001
    """Saves a torch.export program with dynamic batch and sequence."""
    import torch
    import toy_models

    def save(*, largest=512):
        batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=largest)
        examples = tuple(torch.from_numpy(a[:3, :largest]) for a in tokens.inputs.values())
        traced = torch.export.export(
            toy_models.Tokens(), examples, dynamic_shapes=({0: batch, 1: sequence},) * 2
        )
        torch.export.save(traced, tmp_path / "model.pt2")
        return tmp_path / "model.pt2"

    return save


@pytest.fixture(scope="session")
def classifier(rows):
    """Fits a scikit-learn model of a kind."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def fit(kind="logistic"):
        made = {
            "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
            "network": make_pipeline(
                StandardScaler(), MLPClassifier((16,), tol=1.0, random_state=0)
            ),
            "forest": RandomForestClassifier(10, random_state=0),
        }[kind]
        return made.fit(rows.inputs["features"], rows.labels)

    return fit


@pytest.fixture
def beside(fp32_onnx, tmp_path):
    """The CNN's ONNX with all its weights in a file beside it."""
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "net.onnx"
    onnx.save(fp32_onnx, path, save_as_external_data=True, size_threshold=0)
    return path


@pytest.fixture
def set_weight(beside):
    """Overwrites the first number of the largest weight in the file beside the model."""

    def overwrite(value):
        graph = onnx.load(beside, load_external_data=False).graph
        tensor = max(graph.initializer, key=lambda tensor: int(np.prod(tensor.dims)))
        place = {entry.key: entry.value for entry in tensor.external_data}
        with (beside.parent / place["location"]).open("r+b") as file:
            file.seek(int(place["offset"]))
            file.write(np.float32(value).tobytes())

    return overwrite


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    """Folders of tiny BERTs with random weights: ``classifier`` and ``encoder``."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("encoders")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        num_labels=3,
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(root / "classifier")
    transformers.BertModel(config).save_pretrained(root / "encoder")
    return root
