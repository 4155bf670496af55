"""A first policy: what the task is, what the file says, and how long it is."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from enginegate.candidate import Precision, TensorSpec
from enginegate.cli.policy.first_policy import (
    FirstPolicy,
    guess_task,
    name_for,
    parity_for,
    round_up,
    samples_to_set_aside,
)
from enginegate.data import DataSet
from enginegate.errors import DataError
from enginegate.policy import parse_policy
from enginegate.sources.inspection import ModelFacts

FLOATS = np.zeros(8, np.float32)
DATA = {"evaluation": "evaluation.npz", "calibration": "calibration.npz"}
CLASSES = np.arange(8) % 3


def model(**outputs):
    specs = tuple(TensorSpec(name=n, dtype="float32", shape=shape) for n, shape in outputs.items())
    x = (TensorSpec(name="x", dtype="float32", shape=(-1, 4)),)
    return ModelFacts(x, specs, {}, 10.0, 1.0, 1, frozenset())


def data(labels=None, **targets):
    ids = np.arange(8).astype(str)
    return DataSet("data", {"x": np.zeros((8, 4), np.float32)}, labels, ids, {}, targets)


@pytest.mark.parametrize(
    ("outputs", "samples", "task"),
    [
        ({"logits": (-1, 3)}, data(CLASSES), "classification"),
        ({"logits": (-1, -1)}, data(CLASSES), "classification"),
        ({"logits": (-1, 3)}, data(logits=CLASSES), "classification"),
        ({"price": (-1, 1)}, data(price=FLOATS), "regression"),
        ({"price": (-1,)}, data(price=FLOATS), "regression"),
        ({"tags": (-1, 3)}, data(tags=np.eye(8, 3, dtype=np.int64)), "multi-label"),
        ({"mask": (-1, 3, 5, 5)}, data(mask=np.zeros((8, 5, 5), np.int64)), "segmentation"),
        ({"mask": (-1, 5, 5)}, data(mask=np.zeros((8, 5, 5), np.int64)), "segmentation"),
        ({"boxes": (-1, 9, 6)}, data(boxes=np.zeros((8, 4, 5), np.float32)), "detection"),
        ({"price": (-1, 1)}, data(), "regression"),
        ({"vector": (-1, 64)}, data(), None),
        ({"embedding": (-1, 64)}, data(), "embedding"),
        ({"vector": (-1, 2)}, data(CLASSES), None),
        ({"price": (-1, 1)}, data(CLASSES), None),
        ({"logits": (-1, 3)}, data(CLASSES - 1), None),
        ({"logits": (-1, -1)}, data(CLASSES - 1), None),
        ({"tags": (-1, 3)}, data(tags=np.eye(8, 3, dtype=np.int64) - 1), None),
        ({"vector": (-1, 64)}, data(vector=np.zeros((8, 64), np.float32)), None),
        ({"a": (-1, 3), "b": (-1, 1)}, data(a=CLASSES, b=FLOATS), "multi-output"),
        ({"a": (-1, 3), "b": (-1, 64)}, data(), None),
    ],
)
def test_task_follows_from_outputs_and_labels(outputs, samples, task):
    """Where both do not show it, nothing is guessed, and the reason names the output."""
    guess = guess_task(model(**outputs), samples)

    assert guess.task == task
    assert any(name in guess.why for name in (*outputs, "several"))


def test_labels_choose_the_output_that_holds_classes():
    """A model may give a vector beside its logits."""
    guess = guess_task(model(vector=(-1, 2), logits=(-1, 3)), data(CLASSES))

    assert (guess.task, guess.outputs) == ("classification", {"logits": {"task": "classification"}})


def test_shares_and_axes_are_stated_with_the_output():
    """A threshold of logits would find no label among probabilities, nor another axis a class."""
    tags = replace(model(tags=(-1, 3)), shares=frozenset({"tags"}))
    mask = model(mask=(-1, 5, 5, 3))

    assert guess_task(tags, data(tags=np.eye(8, 3, dtype=np.int64))).outputs == {
        "tags": {"task": "multi-label", "threshold": 0.5}
    }
    assert guess_task(mask, data(mask=np.zeros((8, 5, 5), np.int64))).outputs == {
        "mask": {"task": "segmentation", "class_axis": -1}
    }


def test_labels_of_no_output_are_refused():
    """They would label nothing, and the score would be inconclusive."""
    with pytest.raises(DataError, match=r"label\.cost is of no output.*label\.price"):
        guess_task(model(price=(-1, 1)), data(cost=FLOATS))


def draft(**changes):
    values = {
        "name": "mine",
        "task": "classification",
        "uri": "file:model.onnx",
        "data": {"evaluation": "evaluation.npz"},
        "candidates": {"onnxruntime": (Precision.FP32, Precision.INT8)},
        "p99_ms": 50.0,
        "min_throughput_per_s": 100.0,
    }
    return FirstPolicy(**(values | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"data": DATA},
        {
            "data": DATA,
            "allow_code": True,
            "allow_pickle": True,
            "parity": 0.02,
            "task": "multi-output",
            "outputs": {"a": {"task": "classification"}, "the prices": {"task": "regression"}},
            "sequence": (1, 128, 128),
            "candidates": {"onnxruntime": (Precision.FP32,), "tensorrt": (Precision.FP16,)},
        },
    ],
)
def test_file_has_twenty_lines_at_most_and_is_valid(changes):
    """Also where everything has to be said; and it says what it was made of."""
    written = draft(**changes)
    text = written.toml("policies/mine.toml")

    assert len(text.splitlines()) <= 20
    assert tomllib.loads(text) == written.tables()
    assert parse_policy(tomllib.loads(text), "mine").slo.p99_ms == 50


def test_long_file_is_whole():
    """More than twenty lines lose the comment, never the name or a key."""
    written = draft(
        data=DATA | {f"key{n}": n for n in range(8)},
        allow_code=True,
        allow_pickle=True,
        parity=0.02,
        sequence=(1, 128, 128),
    )
    text = written.toml("mine.toml")

    assert len(text.splitlines()) > 20
    assert tomllib.loads(text) == written.tables()


def test_text_from_a_model_stays_text():
    """A name with quotes or line breaks opens no table of its own."""
    text = draft(uri='file:a"\n[target]\n".onnx').toml("mine.toml")

    assert tomllib.loads(text)["model"]["uri"] == 'file:a"\n[target]\n".onnx'
    assert "target" not in tomllib.loads(text)


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("file:spirals/model.pt2", "spirals"),
        ("file:/srv/detector-v2.onnx", "detector-v2"),
        ("models:/credit scoring/3", "credit-scoring"),
        ("models:/digits@champion", "digits"),
        ("runs:/0a1b/model", "0a1b"),
        ("hf:models/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"),
        ("python:package.module:make", "make"),
        ("file:/model.onnx", "model"),
    ],
)
def test_name_says_what_the_model_is(uri, name):
    assert name_for(uri) == name


@pytest.mark.parametrize(
    ("largest", "limit"), [(10, None), (100, None), (200_000, 2.0), (3e5, 4.0), (np.inf, None)]
)
def test_parity_limit_suits_large_outputs(largest, limit):
    """Float32 rounds an output of 200,000 by more than the default allows."""
    found = parity_for(largest)

    assert found == limit or found == pytest.approx(limit)


@pytest.mark.parametrize(
    ("samples", "count"),
    [(100, 0), (200, 40), (420, 0), (440, 40), (897, 97), (2000, 256), (10**6, 256)],
)
def test_calibration_leaves_enough_to_judge(samples, count):
    """400 samples are the standard's least, and 765 settle its strictest limit."""
    assert samples_to_set_aside(samples) == count


@pytest.mark.parametrize(("value", "rounded"), [(0.3, 0.5), (1, 1), (21, 50), (51, 100), (0, 1)])
def test_suggestions_are_round(value, rounded):
    assert round_up(value) == pytest.approx(rounded)
