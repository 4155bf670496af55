"""Train the digits classifier and register it: ``python -m examples.digits.register``.

The model goes into MLflow as a ``torch.export`` program (``model.pt2``), which opens without
pickle. Its signature names the input and the output, and leaves the batch axis open.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from enginegate.errors import ModelError
from enginegate.records import canonical_json, sha256_bytes
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace
from examples.digits.data import CLASSES, INPUT, Digits, read_digits
from examples.digits.recipe import RECIPES, Recipe

if TYPE_CHECKING:
    from examples.digits.model import DigitsNet

MODEL = "digits"
OUTPUT = "logits"
_EXPERIMENT = "training/digits"


@dataclass(frozen=True, slots=True)
class Registered:
    """A version in the registry, and whether this call made it."""

    uri: str
    created: bool
    accuracy: float


def prepare(
    workspace_root: Path, tracking_uri: str, version: int, progress: Callable[[str], None]
) -> Registered:
    """Write the data, and register the version unless it is there; ``progress`` gets lines.

    Data goes to ``data/digits/`` and MLflow files to ``mlartifacts/`` below ``workspace_root``. The
    registry issues versions in order, so earlier ones that are missing are made first.

    Raises:
        ModelError: there is no recipe for that version, or the registry's version of that number
            was made by another recipe.
        TrackingError: MLflow cannot be reached, or refuses.
    """
    if version not in RECIPES:
        raise ModelError(
            f"The digits example has recipes for versions {sorted(RECIPES)}, not for {version}. "
            "Add one to RECIPES in examples/digits/recipe.py."
        )
    digits = read_digits()
    digits.write(workspace_root / "data" / "digits")
    tracker = Tracker(tracking_uri, Workspace(workspace_root).artifacts)
    made = [_ensure(tracker, digits, number, progress) for number in range(1, version + 1)]
    return made[-1]


def _ensure(
    tracker: Tracker, digits: Digits, version: int, progress: Callable[[str], None]
) -> Registered:
    uri = f"models:/{MODEL}/{version}"
    digest = _recipe_digest(RECIPES[version], digits)
    tags = tracker.version_tags(MODEL, version)
    if tags is not None:
        _check_recipe(uri, tags, digest, tracker)
        progress(f"{uri} is registered already; nothing is trained")
        return Registered(uri, created=False, accuracy=float(tags["accuracy"]))
    from examples.digits.model import accuracy, train  # noqa: PLC0415

    network = train(
        RECIPES[version],
        digits.training_images,
        digits.training_labels,
        lambda line: progress(f"training {uri}: {line}"),
    )
    measured = accuracy(network, digits.evaluation)
    progress(f"registering {uri}")
    issued = _register(tracker, network, RECIPES[version], {"recipe": digest}, measured)
    if issued != version:
        tracker.client.delete_model_version(MODEL, str(issued))
        raise ModelError(
            f"The registry issued version {issued} of {MODEL!r} where {version} was to be made: "
            "a version was deleted, and numbers are never used again. Use another workspace "
            "(ENGINEGATE_HOME) or tracking URI for the example."
        )
    return Registered(uri, created=True, accuracy=measured)


def _check_recipe(uri: str, tags: dict[str, str], digest: str, tracker: Tracker) -> None:
    if tags.get("recipe") != digest:
        raise ModelError(
            f"{uri} at {tracker.connection.shown_uri} was made by another recipe "
            f"({tags.get('recipe', 'no tag')[:12]}, this one is {digest[:12]}). Versions do not "
            "change: use another workspace (ENGINEGATE_HOME) or tracking URI for the example."
        )


def _recipe_digest(recipe: Recipe, digits: Digits) -> str:
    images = sha256_bytes(digits.training_images.tobytes() + digits.training_labels.tobytes())
    return sha256_bytes(canonical_json({"recipe": recipe.digest, "images": images}))


def _register(
    tracker: Tracker, network: "DigitsNet", recipe: Recipe, tags: dict[str, str], accuracy: float
) -> int:
    """Log the program in a training run of its own and register it; the version's number."""
    experiment = tracker.connection.experiment(_EXPERIMENT)
    with tempfile.TemporaryDirectory() as folder, tracker.connection.explained("register digits"):
        _save(network, Path(folder, "model"))
        with tracker.connection.run(experiment, f"seed {recipe.seed}", tags) as run:
            client = tracker.client
            for name, value in recipe.model_dump().items():
                client.log_param(run, name, value)
            client.log_metric(run, "acc/evaluation_accuracy_pct", 100 * accuracy)
            model = client.create_logged_model(experiment, name=MODEL, source_run_id=run)
            client.log_model_artifacts(model.model_id, str(Path(folder, "model")))
            client.finalize_logged_model(model.model_id, "READY")
        tags = {**tags, "accuracy": f"{accuracy:.6f}"}
        return tracker.register(MODEL, model.model_id, run_id=run, tags=tags)


def _save(network: "DigitsNet", folder: Path) -> None:
    """An example of two rows: from one, ``torch.export`` would conclude that there is only one."""
    import mlflow.pytorch  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from mlflow.models import ModelSignature  # noqa: PLC0415
    from mlflow.types import Schema, TensorSpec  # noqa: PLC0415

    real = np.dtype(np.float32)
    mlflow.pytorch.save_model(
        network,
        folder,
        serialization_format="pt2",
        input_example=(torch.zeros(2, 1, 8, 8),),
        signature=ModelSignature(
            inputs=Schema([TensorSpec(real, (-1, 1, 8, 8), INPUT)]),
            outputs=Schema([TensorSpec(real, (-1, CLASSES), OUTPUT)]),
        ),
        pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
    )


def main() -> None:
    """Register one version and say what was done and what to do next."""
    workspace = Workspace.here()
    parser = argparse.ArgumentParser(description="Train and register the digits classifier.")
    parser.add_argument("--version", type=int, default=1, choices=sorted(RECIPES))
    parser.add_argument("--tracking-uri", default=workspace.tracking_uri)
    wanted = parser.parse_args()
    console = Console(highlight=False)
    with console.status("reading the digits") as status:
        made = prepare(workspace.root, wanted.tracking_uri, wanted.version, status.update)
    done = "registered" if made.created else "was registered already (same recipe)"
    console.print(f"{made.uri} {done}: {made.accuracy:.2%} of the evaluation images are right")
    console.print(f"data in {workspace.root / 'data' / 'digits'}")
    console.print("next: enginegate qualify policies/digits.toml")


if __name__ == "__main__":
    main()
