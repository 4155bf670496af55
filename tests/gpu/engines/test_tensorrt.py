"""TensorRT on this GPU: built, proven layer by layer, run through graphs, and killed half-way."""

import json
import os
import signal
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.networks import exported, planned, samples
from enginegate.engines import build_engine, open_engine, open_reference, runnable_here, serving
from enginegate.engines.tensorrt import process
from enginegate.engines.tensorrt.library import find_library
from enginegate.engines.tensorrt.table import TensorRtTable
from enginegate.errors import BuildError, DataError
from enginegate.policy import CalibrationTable
from enginegate.policy.building import DimensionRange, Shapes

pytestmark = pytest.mark.gpu
library = find_library("tensorrt")
if library is None:
    pytest.skip("no TensorRT here; ENGINEGATE_TENSORRT may name one", allow_module_level=True)

QUICK = 1  # INT8 takes minutes at the library's own level, 3, and nothing here is about speed
SHAPES = Shapes(batch=DimensionRange(min=1, best=8, max=8))


@pytest.fixture(scope="module")
def images():
    """Images for three channels."""
    values = np.random.default_rng(0).random((24, 3, 32, 32), dtype=np.float32)
    return samples({"image": values}, "images")


@pytest.fixture(scope="module")
def cnn(tmp_path_factory, images):
    """A CNN with random weights, wide enough that 8 and 16 bits are faster."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU()]
    layers += [nn.Conv2d(128, 128, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(128, 16))
    example = {name: array[:2] for name, array in images.inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exported(network, example, tmp_path_factory.mktemp("cnn"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A store that the tests share, so that an engine is built once."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def build(cnn, images, root):
    """Builds a plan for this GPU."""

    def make(name, folder=root, **table):
        settings = {"library": "tensorrt", "builder_optimization_level": QUICK} | table
        tables = {"shapes": SHAPES, "tensorrt": TensorRtTable(**settings)}
        rules = CalibrationTable(method="max", max_samples=16, tool="onnxruntime")
        return build_engine(planned(cnn, name, images, tables=tables, calibration=rules), folder)

    return make


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 5e-3), ("fp16", 5e-3), ("int8", 1e-1)]
)
def test_it_computes_in_its_precision_and_agrees(build, cnn, images, precision, tolerance):
    """The inspector proves the type of every layer; answers are those of the reference."""
    built = build(f"tensorrt-{precision}")
    engine = built.value

    with open_reference(cnn.value, cnn.folder) as reference:
        exact = reference.run(dict(images.inputs))["output"]
    with open_engine(engine, built.folder) as runner:
        answer = runner.run(dict(images.inputs))["output"]
        assert "without CUDA graphs" not in runner.device

    assert engine.proof.proven, engine.proof.detail
    assert engine.proof.executed_layers.get(precision), engine.proof
    assert np.abs(answer - exact).max() <= tolerance * np.abs(exact).max()


def test_padding_and_order_change_no_answer(build, images):
    """Rows one by one, in odd numbers and all at once are the same rows."""
    built = build("tensorrt-fp32")
    with open_engine(built.value, built.folder) as runner:
        whole = runner.run(dict(images.inputs))["output"]
        few = [
            runner.run({"image": images.inputs["image"][start : start + 5]})["output"]
            for start in range(0, 24, 5)
        ]

    np.testing.assert_allclose(np.concatenate(few), whole, rtol=1e-4, atol=1e-5)


def test_graphs_of_several_sizes_keep_their_own_answers(build, images):
    """Sizes that alternate answer as launches without graphs do, and share one profile."""
    built, plain = build("tensorrt-fp16"), build("tensorrt-fp16", cuda_graphs=False)
    assert built.value.flags["shares_profile"] == "true"
    with (
        open_engine(built.value, built.folder) as runner,
        open_engine(plain.value, plain.folder) as launched,
    ):
        for count in (8, 1, 2, 4, 1, 8, 3, 24, 2, 1, 17):
            batch = {"image": images.inputs["image"][:count]}
            answer, expected = runner.run(batch)["output"], launched.run(batch)["output"]
            np.testing.assert_allclose(answer, expected, rtol=1e-2, atol=1e-3)


def test_bound_runs_are_timed(build, images):
    """Runs back to back on device memory take time that grows with their number."""
    built = build("tensorrt-fp16")
    batch = {"image": images.inputs["image"][:8]}
    with open_engine(built.value, built.folder) as runner, runner.bound(batch) as repeat:
        repeat(20)
        few, many = repeat(20), repeat(2000)

    assert 0.0 < few < many


def test_the_inspector_and_times_are_kept(build):
    """Layers, their times, the memory and the flags are beside the plan and in its manifest."""
    built = build("tensorrt-fp16")

    told = json.loads((built.folder / "layers.json").read_text(), strict=False)
    times = json.loads((built.folder / "layer_times.json").read_text())
    flags = built.value.flags
    assert told["Layers"]
    assert sum(times.values()) > 0.0
    assert {"layers.json", "layer_times.json", "build.log"} <= set(built.value.beside)
    assert int(flags["device_mib"]) >= 1
    assert "fp16" in flags["time_by_type"] or not library.is_weakly_typed


def test_kernel_timings_are_reused(build, tmp_path):
    """A second build reads what the first one measured; TensorRT 8.6 without cuBLAS may not."""
    first = build("tensorrt-fp16", folder=tmp_path / "a" / "engines")
    (tmp_path / "b" / "engines").mkdir(parents=True)
    for kept in (tmp_path / "a" / "engines").glob(".timing-*"):
        (tmp_path / "b" / "engines" / kept.name).write_bytes(kept.read_bytes())
    second = build("tensorrt-fp16", folder=tmp_path / "b" / "engines")

    assert first.value.flags["timings"] == "measured"
    refused = library.lacks_kernels and "the library refused" in second.value.flags["timings"]
    assert refused or second.value.flags["timings"] == "reused"


def test_killed_builder_leaves_nothing(build, tmp_path, monkeypatch):
    """A builder that is killed at its first sign of progress leaves no plan, and no half of one."""
    killed = []

    def kill(_plan):
        def tell(_step):
            if not killed:
                killed.extend(children())
                os.kill(killed[-1], signal.SIGKILL)

        return tell

    monkeypatch.setattr(process, "log_progress", kill)

    with pytest.raises(BuildError, match="killed by SIGKILL"):
        build("tensorrt-fp16", folder=tmp_path, timing_cache=False, workspace_mib=512)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def children():
    """Processes that this one started."""
    return [
        int(child)
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def test_a_plan_for_ampere_and_newer_says_so(build):
    """Hardware compatibility is a flag of the manifest; the plan runs here all the same."""
    built = build("tensorrt-fp16", hardware_compatibility="ampere_plus")

    assert built.value.flags["hardware_compatibility"] == "ampere_plus"
    assert runnable_here(built.value) is None


def test_a_lower_level_builds(build):
    """The level is in the manifest, and decides which engine it is."""
    built = build("tensorrt-fp16", builder_optimization_level=0)

    assert built.value.flags["optimization_level"] == "0"
    assert built.value.proof.proven, built.value.proof.detail


def test_triton_gets_the_plan(build):
    """Its own backend serves it."""
    built = build("tensorrt-fp16")

    assert set(serving(built.value, built.folder).files) == {"model.plan"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Tokens (int64) through an embedding and a layer with Gelu, which came with opset 20."""
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(64, 64)
            self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            self.norm = nn.LayerNorm(64)

        def forward(self, tokens):
            found = self.words(tokens)
            return self.norm(found + self.layers(found)).mean(1)

    torch.manual_seed(0)
    values = np.random.default_rng(0).integers(0, 64, (16, 12))
    data = samples({"tokens": values}, "tokens")
    example = {name: array[:2] for name, array in data.inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = exported(Encoder(), example, tmp_path_factory.mktemp("encoder"), sequence=True)
    return made, data


def test_tokens_are_taken_as_the_plan_takes_them(encoder, root):
    """INT64 tokens become INT32 in a plan of TensorRT 8, and numbers beyond are refused."""
    made, data = encoder
    shapes = SHAPES.model_copy(update={"sequence": DimensionRange(min=4, best=12, max=16)})
    table = TensorRtTable(library="tensorrt", builder_optimization_level=QUICK)
    tables = {"shapes": shapes, "tensorrt": table}
    rules = CalibrationTable(method="max", max_samples=16)
    # Layers this small are as quick in FP32, and a builder that may choose chooses that.
    plan = planned(made, "tensorrt-fp32", data, tables=tables, calibration=rules)
    built = build_engine(plan, root)

    with open_reference(made.value, made.folder) as reference:
        exact = reference.run(dict(data.inputs))["output"]
    with open_engine(built.value, built.folder) as runner:
        answer = runner.run(dict(data.inputs))["output"]
        if library.is_weakly_typed:
            assert built.value.inputs[0].dtype == "int32"
            with pytest.raises(DataError, match="the engine takes int32"):
                runner.run({"tokens": data.inputs["tokens"] + 2**40})

    assert built.value.proof.proven, built.value.proof.detail
    assert onnx.load(made.folder / "model.onnx").opset_import[0].version > 17
    assert np.abs(answer - exact).max() <= 1e-2 * np.abs(exact).max()
