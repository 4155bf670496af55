"""Which provider runs an engine is found out, never assumed; no GPU is needed to see it fail."""

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginegate.candidate import Precision
from enginegate.engines import build_engine, cuda, open_engine, runnable_here, serving
from enginegate.engines.onnxruntime import session as sessions
from enginegate.errors import BuildError, EnginegateError

pytestmark = pytest.mark.xdist_group("engines")
ON_GPU = {"onnxruntime": {"device": "cuda", "batch_buckets": [4]}}


@pytest.fixture
def fallen_back(plan, store):
    """Built for the CUDA provider, which this machine does not have."""
    if cuda.gpu() is not None:
        pytest.skip("this machine has a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_engine(plan("onnxruntime-fp32", **ON_GPU), store / "engines")


def test_silent_fallback_is_a_failed_proof(fallen_back):
    """ONNX Runtime answers on the CPU instead, without an error; the proof says so and fails."""
    proof = fallen_back.value.proof

    assert not proof.proven
    assert proof.device == "CPUExecutionProvider"
    assert "Asked for CUDAExecutionProvider, got CPUExecutionProvider." in proof.detail


def test_gpu_engine_is_refused_without_a_gpu(fallen_back):
    """It is said beforehand, and opening it is an error: CPU numbers are not a GPU's."""
    assert "no NVIDIA GPU" in str(runnable_here(fallen_back.value))
    with (
        pytest.raises(EnginegateError, match="Asked for CUDAExecutionProvider, got CPU"),
        open_engine(fallen_back.value, fallen_back.folder),
    ):
        pass


def test_the_device_is_part_of_the_engine(plan, fallen_back):
    """Target, flags and key tell a GPU's engine from a CPU's."""
    engine = fallen_back.value

    assert engine.target.startswith("cuda")
    assert engine.flags["batch_buckets"] == "4 8"
    assert engine.flags["use_tf32"] == "0"
    assert plan("onnxruntime-fp32", **ON_GPU).key != plan("onnxruntime-fp32").key
    assert "CUDA" in plan("onnxruntime-fp32", **ON_GPU).toolchain


def test_triton_gets_the_buckets(fallen_back):
    """For a GPU the file that pads and warms up travels beside the model file."""
    served = serving(fallen_back.value, fallen_back.folder)

    assert served.settings.parameters["provider"] == "CUDAExecutionProvider"
    assert served.files["onnxruntime_gpu.py"].is_file()


def test_the_file_for_triton_needs_nothing_of_this_package():
    """Triton's Python may have NumPy and ONNX Runtime only."""
    path = Path(str(sessions.__file__)).with_name("gpu.py")
    program = (
        "import sys, importlib.util as u; sys.modules['enginegate'] = None;"
        f"s = u.spec_from_file_location('gpu', {str(path)!r});"
        "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.buckets_up_to(6))"
    )

    told = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )

    assert told.stdout.strip() == "(1, 2, 4, 6)"


@pytest.mark.parametrize(
    ("gpu", "precision", "message"),
    [
        pytest.param(None, Precision.FP8, "TensorRT has fp8", id="fp8"),
        pytest.param(cuda.Gpu("NVIDIA T4", "sm75"), Precision.BF16, "needs compute", id="turing"),
        pytest.param(cuda.Gpu("NVIDIA T4", "sm75"), Precision.TF32, "sm75 NVIDIA T4", id="tf32"),
    ],
)
def test_precisions_the_gpu_lacks_are_refused(monkeypatch, gpu, precision, message):
    """No kernels, no engine: the error names the precision and the GPU."""
    monkeypatch.setattr(cuda, "gpu", lambda: gpu)

    with pytest.raises(BuildError, match=message):
        sessions.check_precision(precision, "cuda")


def test_half_precision_that_runs_in_fp32_is_seen(cnn, tmp_path):
    """On a CPU ONNX Runtime computes fp16 in fp32; the optimised graph shows it."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load(cnn.folder / "model.onnx"), keep_io_types=True)
    onnx.save(model, tmp_path / "model.onnx")

    opened = sessions.open_session(tmp_path / "model.onnx", Precision.FP16, "cpu", inspect=True)

    assert opened.layers == {"fp32": 3}


def test_int8_runs_as_integers(plan, store):
    """On a CPU the pairs around layers become integer operators, all of them."""
    engine = build_engine(plan("onnxruntime-int8"), store / "engines").value

    assert engine.proof.executed_layers == {"int8": 3}


def test_the_portable_form_is_kept(plan, store, samples):
    """What holds on any hardware is optimised once; it answers as the engine does."""
    built = build_engine(plan("onnxruntime-fp32"), store / "engines")
    portable = built.folder / "optimised.onnx"

    found = sessions.open_plain(portable).run(None, dict(samples.inputs))[0]

    built.value.beside["optimised.onnx"].check(portable)
    with open_engine(built.value, built.folder) as runner:
        np.testing.assert_allclose(found, runner.run(dict(samples.inputs))["output"], atol=1e-5)


def test_fp8_stops_at_basic_optimisation():
    """Above basic, ONNX Runtime fuses FP8 pairs into operators that nobody has."""
    levels = {precision: sessions.level_for(precision) for precision in Precision}

    assert [p for p, level in levels.items() if level == "ORT_ENABLE_BASIC"] == [Precision.FP8]
