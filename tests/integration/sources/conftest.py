"""Small models in every form that the program reads, in a real MLflow registry and on disk."""

import textwrap
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

CALLABLES = """
import torch


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        states = self.embed(input_ids) * attention_mask.unsqueeze(-1)
        return {"logits": self.head(states.sum(1))}


def tokens():
    names = ("input_ids", "attention_mask")
    examples = {name: torch.ones(2, 5, dtype=torch.long) for name in names}
    return Tokens(), examples, {name: {1: "sequence"} for name in examples}


def nonsense():
    return "a module"


def broken():
    raise OSError("no weights here")


class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Conv2d(1, 3, 5)

    def forward(self, image):
        return self.body(image).mean((2, 3))


def bounded():
    return Convolution(), {}, {"image": {2: torch.export.Dim("height", min=6)}}


def unbounded():
    return Convolution(), {}, {"image": {2: "height"}}


class Values(torch.nn.Module):
    def forward(self, image):
        return torch.linalg.svdvals(image.flatten(2))


def unsupported():
    return Values()


class Branching(torch.nn.Module):
    def forward(self, image):
        return image if image.sum() > 0 else -image


def branching():
    return Branching()
"""


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
def callables(tmp_path_factory):
    """A folder with the module ``toy_models``, for ``python:`` sources."""
    folder = tmp_path_factory.mktemp("callables")
    (folder / "toy_models.py").write_text(textwrap.dedent(CALLABLES))
    return folder


@pytest.fixture
def importable(callables, monkeypatch):
    """Makes ``toy_models`` importable, as a checkout's own modules are."""
    monkeypatch.syspath_prepend(str(callables))


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
