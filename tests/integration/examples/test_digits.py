"""The digits example: really trained, really registered."""

import json

import pytest
import torch

from enginegate.data import read_data
from enginegate.errors import ModelError
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace
from examples.digits.data import read_digits
from examples.digits.model import forget_trained, train
from examples.digits.recipe import RECIPES, SMALL, Recipe
from examples.digits.register import prepare


@pytest.fixture(scope="module", autouse=True)
def small():
    """The same weights read one view of an image instead of nine."""
    with pytest.MonkeyPatch.context() as patch:
        for number, recipe in SMALL.items():
            patch.setitem(RECIPES, number, recipe)
        yield


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="module")
def tracker(workspace):
    return Tracker(_uri(workspace), workspace.artifacts)


def _uri(workspace):
    return f"sqlite:///{workspace.root / 'mlflow.db'}"


@pytest.fixture(scope="module")
def registered(workspace):
    """Version 1, and the lines of progress it was made with."""
    lines = []
    return prepare(workspace.root, _uri(workspace), 1, lines.append), lines


def test_accurate_enough(registered):
    """The example is a model worth promoting."""
    made, lines = registered

    assert (made.uri, made.created) == ("models:/digits/1", True)
    assert made.accuracy >= 0.97
    assert len(lines) > RECIPES[1].epochs


def test_program_opens_without_pickle(registered, workspace, tracker, monkeypatch):
    """What the registry gives back names input and output, takes any batch, and is as accurate."""
    import mlflow.artifacts
    import mlflow.pytorch
    from mlflow.models import Model

    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    made, _ = registered
    location = tracker.client.get_model_version_download_uri("digits", "1")
    folder = mlflow.artifacts.download_artifacts(location, tracking_uri=tracker.tracking_uri)
    evaluation = read_data(workspace.root / "data" / "digits" / "evaluation.npz")

    program = mlflow.pytorch.load_model(folder)
    signature = Model.load(folder).signature
    logits = program(torch.from_numpy(evaluation.inputs["image"])).detach().numpy()

    assert json.loads(signature.to_dict()["inputs"])[0]["name"] == "image"
    assert json.loads(signature.to_dict()["outputs"])[0]["name"] == "logits"
    assert [spec.shape for spec in signature.inputs.inputs] == [(-1, 1, 8, 8)]
    assert program(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    assert (logits.argmax(1) == evaluation.labels).mean() == pytest.approx(made.accuracy, abs=1e-5)


def test_registered_once(registered, workspace):
    """The same recipe again trains nothing and says so."""
    first, _ = registered
    lines = []

    again = prepare(workspace.root, _uri(workspace), 1, lines.append)

    assert (again.uri, again.created) == (first.uri, False)
    assert again.accuracy == pytest.approx(first.accuracy, abs=1e-6)
    assert lines == ["models:/digits/1 is registered already; nothing is trained"]


def test_version_of_another_recipe_is_not_taken_for_this_one(registered, workspace, monkeypatch):
    """A changed recipe does not pass for the registered version, nor overwrite it."""
    assert registered
    monkeypatch.setitem(RECIPES, 1, RECIPES[1].model_copy(update={"seed": 77}))

    with pytest.raises(ModelError, match=r"models:/digits/1 .* was made by another recipe"):
        prepare(workspace.root, _uri(workspace), 1, lambda _: None)


def test_unknown_version(workspace):
    """Only versions with a recipe can be made."""
    with pytest.raises(ModelError, match="Add one to RECIPES"):
        prepare(workspace.root, _uri(workspace), 99, lambda _: None)


def test_deleted_version_is_not_replaced(registered, workspace, tracker, monkeypatch):
    """The registry never uses a number again, so the example says what to do instead."""
    assert registered
    monkeypatch.setitem(RECIPES, 2, Recipe(seed=2, epochs=1, views=1))
    assert prepare(workspace.root, _uri(workspace), 2, lambda _: None).created
    tracker.client.delete_model_version("digits", "2")

    with pytest.raises(ModelError, match="The registry issued version 3"):
        prepare(workspace.root, _uri(workspace), 2, lambda _: None)
    assert tracker.version_tags("digits", 3) is None


def test_same_recipe_same_weights():
    """Training is repeatable on one machine, whatever the process did with randomness before."""
    digits, recipe = read_digits(), Recipe(seed=5, epochs=1)
    weights = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        forget_trained()
        network = train(recipe, digits.training_images, digits.training_labels, lambda _: None)
        weights.append(network.head.weight.detach().numpy().copy())

    assert (weights[0] == weights[1]).all()


def test_rewritten_version_answers_alike_in_fp32():
    """Stretching what the first convolution makes is the arithmetic of stretching the image."""
    digits = read_digits()
    images = torch.from_numpy(digits.evaluation.inputs["image"][:64])
    recipe = Recipe(seed=5, epochs=1)
    networks = [
        train(changed, digits.training_images, digits.training_labels, lambda _: None)
        for changed in (recipe, recipe.model_copy(update={"stretch": "features"}))
    ]

    with torch.no_grad():
        ours, theirs = (network(images) for network in networks)

    assert torch.allclose(ours, theirs, atol=1e-4)
    assert ours.shape == (64, 10)
