"""A small CNN, images for it, and a real MLflow registry that holds it."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from enginegate.data import DataSet
from enginegate.engines import open_onnx
from enginegate.policy.model_source import ModelSource
from enginegate.sources import onnx_from_source
from tests.fakes.tracking import tracked_at


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

        client = mlflow.MlflowClient(self.tracking_uri)
        training = client.get_experiment_by_name("training").experiment_id
        with warnings.catch_warnings(), tracked_at(self.tracking_uri):
            warnings.simplefilter("ignore")
            with mlflow.start_run(experiment_id=training) as run:
                log = getattr(mlflow, flavour).log_model
                return log(model, pip_requirements=[], **options), run.info.run_id

    def files(self, uri):
        """The folder that holds a version's files."""
        import mlflow

        name, version = uri.removeprefix("models:/").split("/")
        found = mlflow.MlflowClient(self.tracking_uri).get_model_version(name, version)
        return self.artifacts / "models" / found.source.removeprefix("models:/") / "artifacts"


def images():
    """64 images of noise."""
    shades = np.random.default_rng(0).random((64, 1, 8, 8), dtype=np.float32)
    ids = np.array([f"image-{index}" for index in range(64)])
    return DataSet("eval.npz", {"image": shades}, None, ids, {})


def cnn_network():
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


def cnn_registry(root):
    """SQLite and a folder; ``cnn`` version 1 is a torch.export program, alias ``candidate``."""
    import mlflow

    registry = Registry(f"sqlite:///{root / 'mlflow.db'}", root / "artifacts")
    client = mlflow.MlflowClient(registry.tracking_uri)
    client.create_experiment("training", artifact_location=str(registry.artifacts))
    registry.log(
        "pytorch",
        cnn_network(),
        name="cnn",
        input_example=images().inputs["image"][:4],
        serialization_format="pt2",
    )
    client.set_registered_model_alias("cnn", "candidate", "1")
    return registry


def exporter(registry):
    """What exports a source into a folder, on the images unless other data is given."""

    def run(uri, onnx_root, *, data=None, one_file_bytes=2**30, **source):
        return onnx_from_source(
            ModelSource(uri=uri, **source),
            data or images(),
            onnx_root=onnx_root,
            tracking_uri=registry.tracking_uri,
            open_onnx=open_onnx,
            one_file_bytes=one_file_bytes,
        )

    return run
