"""Every precision of a CNN and a transformer compiles for Ada and, but for fp8, for Ampere."""

import warnings

import numpy as np
import pytest

from benchmarks.networks import Layer, exported, samples
from enginegate.candidate import ShapeRange
from enginegate.engines import build_engine, cuda
from enginegate.errors import BuildError

pytestmark = [pytest.mark.rtx, pytest.mark.xdist_group("engines")]
pytest.importorskip("tensorrt_rtx")

RANGES = {
    "batch": {"min": 1, "best": 4, "max": 8},
    "sequence": {"min": 2, "best": 12, "max": 32},
}
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")
CALIBRATION = {"method": "max", "max_samples": 16}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These tests mean the same on a machine that has a GPU."""
    monkeypatch.setattr(cuda, "gpu", lambda: None)


@pytest.fixture(scope="session")
def tokens():
    """Sequences of 12 vectors."""
    values = np.random.default_rng(0).standard_normal((16, 12, 32), dtype=np.float32)
    return samples({"tokens": values}, "tokens")


@pytest.fixture(scope="session")
def transformer(tmp_path_factory, tokens):
    """Two layers of an encoder, dynamic in batch and length."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(32, 4) for _ in range(2))

        def forward(self, tokens):
            nothing_hidden = torch.zeros(1)
            for layer in self.layers:
                tokens = layer(tokens, nothing_hidden)
            return tokens.mean(1)

    torch.manual_seed(0)
    example = {name: array[:2] for name, array in tokens.inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = tmp_path_factory.mktemp("transformer")
        return exported(Transformer(), example, folder, sequence=True)


@pytest.fixture(scope="session")
def transformer_plan(plan, transformer, tokens):
    """Plans an engine of the transformer."""

    def make(name, **tables):
        tables = {"shapes": RANGES, "calibration": CALIBRATION, **tables}
        return plan(name, onnx=transformer, data=tokens, **tables)

    return make


@pytest.mark.parametrize("target", ["sm89", "sm80"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("subject", ["cnn", "transformer"])
def test_every_precision_compiles_or_says_why_not(
    plan, transformer_plan, store, subject, precision, target
):
    """Each plan is what it says; only fp8 on Ampere is refused, naming precision and target."""
    make = {"cnn": plan, "transformer": transformer_plan}[subject]
    planned = make(f"tensorrt-{precision}", tensorrt={"targets": [target]})

    if (precision, target) == ("fp8", "sm80"):
        with pytest.raises(BuildError, match=r"cannot build tensorrt-fp8 for sm80(.|\n)*fp8"):
            build_engine(planned, store / "engines")
        return
    engine = build_engine(planned, store / "engines").value

    assert engine.proof.proven, engine.proof.detail
    assert engine.target == target
    assert engine.proof.executed_layers[precision] == engine.proof.weighted_layers[precision]
    assert engine.proof.flops[precision] == max(engine.proof.flops.values())


def test_profiles_cover_every_dynamic_axis(transformer_plan, store):
    """Batch and length each have their range from the policy, and the manifest records it."""
    engine = build_engine(transformer_plan("tensorrt-fp16"), store / "engines").value

    assert engine.profiles == {
        "tokens": ShapeRange(min=(1, 2, 32), best=(4, 12, 32), max=(8, 32, 32))
    }
    assert engine.max_batch_size == 8


def test_dynamic_axis_without_range_is_named(transformer_plan, tmp_path):
    """A dynamic axis that the policy says nothing about is an error with the setting to add."""
    planned = transformer_plan("tensorrt-fp32", shapes={})

    with pytest.raises(BuildError, match=r'no range for axis 1(.|\n)*"tokens\.1"'):
        build_engine(planned, tmp_path)


@pytest.mark.parametrize(
    ("shapes", "same"),
    [
        pytest.param(RANGES, True, id="same"),
        pytest.param({**RANGES, "sequence": {"min": 2, "best": 12, "max": 64}}, False, id="longer"),
        pytest.param(
            {**RANGES, "axes": {"tokens.1": {"min": 2, "best": 12, "max": 16}}},
            False,
            id="one-axis",
        ),
    ],
)
def test_shapes_decide_the_key(transformer_plan, shapes, same):
    """Another range is another engine."""
    first, second = (
        transformer_plan("tensorrt-fp16"),
        transformer_plan("tensorrt-fp16", shapes=shapes),
    )

    assert (first.key == second.key) is same


def test_the_manifest_says_how_it_was_built(plan, cnn, store):
    """Source, converter, flags and the other files of the folder are recorded."""
    built = build_engine(plan("tensorrt-int8"), store / "engines")
    engine = built.value

    assert engine.source_sha256 == cnn.value.source_sha256
    assert "batches of 32" in engine.converter
    assert engine.flags["builder_flags"] == ""
    assert engine.flags["typing"] == "strong"
    assert set(engine.proof.weights) == {"fp32"}
    engine.beside["build.log"].check(built.folder / "build.log")
    tf32 = build_engine(plan("tensorrt-tf32"), store / "engines").value
    assert tf32.flags["builder_flags"] == "TF32"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"hardware_compatibility": "ampere_plus"},
            "no hardware_compatibility = 'ampere_plus'",
            id="hardware",
        ),
        pytest.param({"version_compatible": True}, "no version_compatible = true", id="version"),
        pytest.param(
            {"library": "tensorrt"}, r"tensorrt \(library in \[tensorrt\]\)", id="library"
        ),
    ],
)
def test_unsupported_library_options_are_refused(plan, tmp_path, settings, message):
    """RTX would ignore or fail at these options, so they are refused before a build."""
    with pytest.raises(BuildError, match=message):
        build_engine(plan("tensorrt-fp16", tensorrt=settings), tmp_path)
