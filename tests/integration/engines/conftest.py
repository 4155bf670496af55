"""A small CNN in a real MLflow registry, its ONNX, and plans made from it."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.candidate import Candidate
from enginegate.data import DataSet
from enginegate.engines import open_onnx, plan_engine
from enginegate.policy import ModelSource, parse_policy
from enginegate.sources import onnx_from_source

GATES = {
    "confidence": 0.95,
    "min_samples": 1,
    "max_accuracy_loss": 0.1,
    "min_slice_samples": 1,
    "max_slice_accuracy_loss": 0.1,
    "min_top1_agreement": 0.9,
    "max_kl_p99_nats": 0.1,
    "max_abs_error": 1.0,
}
POLICY = {
    "schema_version": 1,
    "name": "cnn",
    "task": "classification",
    "model": {"uri": "models:/cnn/1"},
    "data": {"evaluation": "eval.npz"},
    "candidates": {"onnxruntime": ["fp32"], "tensorrt": []},
    "gates": {"default": GATES},
    "slo": {"p99_ms": 10.0, "min_throughput_per_s": 1.0, "confidence": 0.99},
    "search": {
        "max_batch_sizes": [1, 8],
        "queue_delays_us": [0],
        "instances": [1],
        "rates_per_s": [10.0],
        "measurement_s": 1.0,
        "budget_s": 1.0,
    },
    "target": {"repository": "live"},
    "approval": {"expires_hours": 1.0},
}


@dataclass(frozen=True)
class Registry:
    """A registry with a model logged in every form."""

    tracking_uri: str
    artifacts: Path

    def log(self, flavour, model, **options):
        """Register another model and return the URI of its version."""
        import mlflow

        mlflow.set_tracking_uri(self.tracking_uri)
        name = options.pop("name")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mlflow.set_experiment("training")
            with mlflow.start_run():
                positional = [] if model is None else [model]
                logged = getattr(mlflow, flavour).log_model(
                    *positional,
                    name=name,
                    registered_model_name=name,
                    pip_requirements=[],
                    **options,
                )
        return f"models:/{name}/{logged.registered_model_version}"

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
    """Exports a version of the registry into a folder."""

    def run(uri, onnx_root, *, data=samples, **source):
        return onnx_from_source(
            ModelSource(uri=uri, **source),
            data,
            onnx_root=onnx_root,
            tracking_uri=registry.tracking_uri,
            open_onnx=open_onnx,
        )

    return run


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store that all tests of a session share, so that an engine is built once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def cnn(export, store):
    """The registered CNN as ONNX in the store."""
    return export("models:/cnn/1", store / "onnx")


@pytest.fixture(scope="session")
def plan(cnn, samples):
    """Plans an engine of the CNN by name; ``tensorrt`` and ``calibration`` are policy tables."""

    def make(name, *, onnx=cnn, data=samples, **tables):
        policy = parse_policy({**POLICY, **tables}, "test policy")
        return plan_engine(onnx, Candidate.parse(name), policy=policy, calibration=data)

    return make


@pytest.fixture
def fp32_onnx(cnn):
    """A copy of the CNN's ONNX that a test may change."""
    return onnx.load(cnn.folder / "model.onnx")
