"""NVIDIA ModelOpt converts for TensorRT where it is installed, in a process of its own."""

import os
import sys

import pytest

from enginegate.errors import BuildError
from enginegate.policy import CalibrationTable
from enginegate.precision import convert, converter_of, modelopt
from tests.integration.precision.conftest import cnn, images, kept_onnx

pytestmark = pytest.mark.xdist_group("precision")
HERE = os.environ.get("ENGINEGATE_MODELOPT")
installed = pytest.mark.skipif(not HERE, reason="ENGINEGATE_MODELOPT names no Python")


@pytest.fixture
def plain(tmp_path):
    """The CNN without outliers."""
    return kept_onnx(cnn(spike=1.0), tmp_path).folder / "model.onnx"


def test_asked_for_and_absent(plain, candidate, monkeypatch):
    """The message says how to get it and how to do without."""
    monkeypatch.delenv("ENGINEGATE_MODELOPT", raising=False)
    rules = CalibrationTable(tool="modelopt")

    with pytest.raises(BuildError, match=r"not installed here.*tool = \"onnxruntime\""):
        convert(plain, candidate("tensorrt-int8"), data=images(8, seed=1), rules=rules)


def test_interpreter_without_modelopt_is_refused(plain, candidate, monkeypatch):
    """ENGINEGATE_MODELOPT must name a Python that has it."""
    monkeypatch.setenv("ENGINEGATE_MODELOPT", sys.executable)

    with pytest.raises(BuildError, match="has no nvidia-modelopt"):
        convert(plain, candidate("tensorrt-int8"), data=images(8, seed=1), rules=CalibrationTable())


def test_onnxruntime_engines_never_use_it(candidate, monkeypatch):
    """Its placement of pairs is TensorRT's; the CPU has its own."""
    monkeypatch.setenv("ENGINEGATE_MODELOPT", "/no/such/python")

    told = converter_of(
        candidate("onnxruntime-int8"), data=images(8, seed=1), rules=CalibrationTable()
    )

    assert told.startswith("onnxruntime")


@pytest.fixture
def real(monkeypatch):
    """The ModelOpt that the environment named."""
    monkeypatch.setenv("ENGINEGATE_MODELOPT", str(HERE))
    return modelopt._find(HERE)


@installed
@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("name", ["tensorrt-int8", "tensorrt-fp16"])
def test_modelopt_conversion_is_reproducible(plain, candidate, name):
    """Kept nodes stay FP32, tool and version are recorded, and the bytes are the same each time."""
    word = name.removeprefix("tensorrt-")
    order = {
        "data": images(32, seed=1),
        "rules": CalibrationTable(method="max"),
        "keep": ("conv4",),
    }
    before = plain.read_bytes()

    found = convert(plain, candidate(name), **order)

    assert plain.read_bytes() == before, "ModelOpt writes into its source"
    assert found.converter.startswith("modelopt 0.")
    assert found.converter.endswith("1 node kept at fp32")
    assert found.stats().layers[word] >= 6
    assert convert(plain, candidate(name), **order).onnx == found.onnx


@installed
@pytest.mark.usefixtures("real")
def test_layers_it_leaves_out(candidate, tmp_path):
    """It quantises no convolution of 12 channels; ONNX Runtime's tools do, and that is said."""
    path = kept_onnx(cnn(spike=1.0, channels=12), tmp_path).folder / "model.onnx"

    found = convert(
        path,
        candidate("tensorrt-int8"),
        data=images(32, seed=1),
        rules=CalibrationTable(method="max"),
    )

    assert found.stats().quantised == 9
    assert "it quantised no layer, so by onnxruntime, max" in found.converter


@installed
def test_its_failure_shows_its_log(candidate, real, tmp_path):
    """An operator that does not exist fails inside it; the log's end is in the message."""
    broken = cnn(spike=1.0)
    broken.graph.node[3].op_type = "FancyRelu"
    path = kept_onnx(broken, tmp_path).folder / "model.onnx"
    job = modelopt.ModelOptJob(real, path, candidate("tensorrt-int8"), 8, (), tmp_path)
    sample = modelopt.Sample.of(images(8, seed=1), CalibrationTable())

    with pytest.raises(BuildError, match=r"(?s)ended with status 1.*end of its log.*Error"):
        job.run(sample, "max")
