"""Small models in every form that the program reads, in a real MLflow registry and on disk."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.model_source import ModelSource
from enginegate.sources import onnx_from_source


@dataclass(frozen=True)
class Registry:
    """A registry with a model logged in every form."""

    tracking_uri: str
    artifacts: Path

    def log(self, flavour, model, **options):
        """Register another model and return the URI of its version."""
        name = options.pop("name")
        logged, _ = self._log(flavour, model, name=name, registered_model_name=name, **options)
        return f"models:/{name}/{logged.registered_model_version}"

    def log_in_run(self, flavour, model, **options):
        """Log a model without registering it, and return the URI of it in its run."""
        logged, run = self._log(flavour, model, **options)
        return f"runs:/{run}/{logged.name}"

    def _log(self, flavour, model, **options):
        import mlflow

        mlflow.set_tracking_uri(self.tracking_uri)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mlflow.set_experiment("training")
            with mlflow.start_run() as run:
                log = getattr(mlflow, flavour).log_model
                return log(model, pip_requirements=[], **options), run.info.run_id

    def files(self, uri):
        """The folder that holds a version's files."""
        import mlflow

        name, version = uri.removeprefix("models:/").split("/")
        found = mlflow.MlflowClient(self.tracking_uri).get_model_version(name, version)
        return self.artifacts / "models" / found.source.removeprefix("models:/") / "artifacts"


@pytest.fixture(scope="session")
def samples():
    """Images in 3 shades, 64 of them."""
    images = np.random.default_rng(0).random((64, 1, 8, 8), dtype=np.float32)
    ids = np.array([f"image-{index}" for index in range(64)])
    return DataSet("eval.npz", {"image": images}, None, ids, {})


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
    """A CNN with random weights and the layers of a real one, in evaluation mode."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 10),
    )

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, image):
            return self.layers(image)

    return Network().eval()


@pytest.fixture(scope="session")
def registry(tmp_path_factory, network, samples):
    """SQLite and a folder; ``cnn`` version 1 is a torch.export program, alias ``candidate``."""
    import mlflow

    root = tmp_path_factory.mktemp("registry")
    registry = Registry(f"sqlite:///{root / 'mlflow.db'}", root / "artifacts")
    client = mlflow.MlflowClient(registry.tracking_uri)
    client.create_experiment("training", artifact_location=str(registry.artifacts))
    registry.log(
        "pytorch",
        network,
        name="cnn",
        input_example=samples.inputs["image"][:4],
        serialization_format="pt2",
    )
    client.set_registered_model_alias("cnn", "candidate", "1")
    return registry


@pytest.fixture(scope="session")
def export(registry, samples):
    """Exports a source into a folder."""

    def run(uri, onnx_root, *, data=samples, one_file_bytes=2**30, **source):
        return onnx_from_source(
            ModelSource(uri=uri, **source),
            data,
            onnx_root=onnx_root,
            tracking_uri=registry.tracking_uri,
            open_onnx=open_onnx,
            one_file_bytes=one_file_bytes,
        )

    return run


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
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def fit(kind="logistic"):
        made = {
            "logistic": make_pipeline(StandardScaler(), LogisticRegression()),
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
