"""Where a GPU does not run the whole graph, an earlier opset that it runs more of is built."""

import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest

from benchmarks.networks import exported, planned, samples
from enginegate.candidate import Precision
from enginegate.engines import build_engine, open_engine, open_reference
from enginegate.engines.onnxruntime import kind as kinds
from enginegate.engines.onnxruntime import session as sessions
from enginegate.engines.onnxruntime.kind import OnnxRuntimeTable
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes
from enginegate.sources.onnx_form import opset


@pytest.fixture(scope="module")
def images():
    """Images for three channels."""
    return samples({"image": np.random.default_rng(0).random((8, 3, 16, 16), np.float32)}, "images")


@pytest.fixture(scope="module")
def pooled(tmp_path_factory, images):
    """A CNN with MaxPool, as PyTorch exports it."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 4)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = {name: array[:2] for name, array in images.inputs.items()}
        return exported(network, example, tmp_path_factory.mktemp("pooled"))


@pytest.fixture
def copies(monkeypatch):
    """Lets a session on this processor report the copies of one on a GPU, by opset."""
    told = {}
    opened = kinds._opened

    def as_on_a_gpu(plan, path, _device, *, graphs):
        found = opened(plan, path, "cpu", graphs=graphs)
        return replace(found, copies=told[opset(onnx.load(path))])

    monkeypatch.setattr(kinds, "_opened", as_on_a_gpu)
    return told


def _plan(pooled, images):
    tables = {"shapes": Shapes(batch=DimensionRange(min=1, best=8, max=8))}
    return planned(
        pooled,
        "onnxruntime-fp32",
        images,
        tables=tables | {"onnxruntime": OnnxRuntimeTable(device="cpu")},
        calibration=CalibrationTable(),
    )


def _build(pooled, images, folder):
    built = build_engine(_plan(pooled, images), folder)
    return built, opset(onnx.load(built.folder / built.value.filename))


@pytest.mark.parametrize(
    ("by_opset", "expected"),
    [
        ({22: 0}, 22),
        ({22: 2, 20: 0}, 20),
        ({22: 2, 20: 2, 18: 1}, 18),
        ({22: 2, 20: 2, 18: 2}, 22),
        ({22: 3, 20: 1, 18: 2}, 20),
    ],
)
def test_opset_with_the_fewest_copies_is_built(
    pooled, images, copies, tmp_path, by_opset, expected
):
    """The latest of those; nothing is tried once there is none; the answers stay."""
    copies |= by_opset

    built, found = _build(pooled, images, tmp_path)

    assert opset(onnx.load(pooled.folder / "model.onnx")) == 22
    assert found == expected
    assert ("written at" in built.value.converter) == (expected != 22)
    with open_reference(pooled.value, pooled.folder) as reference:
        exact = reference.run(dict(images.inputs))["output"]
    with open_engine(built.value, built.folder) as runner:
        answer = runner.run(dict(images.inputs))["output"]
    assert np.abs(answer - exact).max() <= 1e-5 * np.abs(exact).max()


def test_opset_that_cannot_be_had_is_passed_over(pooled, images, copies, tmp_path, monkeypatch):
    """The engine is built as it was exported."""

    def refuse(*_args, **_given):
        raise kinds.BuildError("it uses what came later")

    copies[22] = 2
    monkeypatch.setattr(kinds, "lowered", refuse)

    assert _build(pooled, images, tmp_path)[1] == 22


def test_opset_that_does_not_open_is_passed_over(pooled, images, copies, tmp_path, monkeypatch):
    """A model that runs as it is does not fail because an earlier opset of it does."""
    opened = kinds._opened

    def refuse(plan, path, device, *, graphs):
        if opset(onnx.load(path)) < 22:
            raise kinds.BuildError("no kernel")
        return opened(plan, path, device, graphs=graphs)

    copies[22] = 2
    monkeypatch.setattr(kinds, "_opened", refuse)

    assert _build(pooled, images, tmp_path)[1] == 22


def test_a_session_names_what_it_left_to_another_provider(pooled):
    """On a processor nothing is left."""
    opened = sessions.open_session(
        pooled.folder / "model.onnx", Precision.FP32, "cpu", inspect=True
    )

    assert opened.on_cpu == ()
    assert opened.elsewhere == 0
