"""TensorRT-RTX plans are really built here, ahead of time, and proven by what the parser saw."""

import json
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.candidate import Candidate
from enginegate.content_store import ContentFolder
from enginegate.engines import (
    availability,
    build_engine,
    cuda,
    open_engine,
    plan_info,
    runnable_here,
    serving,
)
from enginegate.engines.tensorrt import kind, process
from enginegate.errors import BuildError, EnginegateError, ModelError

pytestmark = [pytest.mark.rtx, pytest.mark.xdist_group("engines")]
pytest.importorskip("tensorrt_rtx")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These tests mean the same on a machine that has a GPU."""
    monkeypatch.setattr(cuda, "gpu", lambda: None)


def left_in(folder):
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("precision", "layers", "quantised"),
    [
        pytest.param("fp32", {"fp32": 3}, 0, id="fp32"),
        pytest.param("tf32", {"tf32": 3}, 0, id="tf32"),
        pytest.param("fp16", {"fp16": 3}, 0, id="fp16"),
        pytest.param("bf16", {"bf16": 3}, 0, id="bf16"),
        pytest.param("int8", {"int8": 3}, 3, id="int8"),
        pytest.param("fp8", {"fp8": 3}, 3, id="fp8"),
    ],
)
def test_every_precision_is_built_and_proven(plan, store, precision, layers, quantised):
    """Six precisions of one model compile for SM89, and each is what it says."""
    built = build_engine(plan(f"tensorrt-{precision}"), store / "engines")
    engine = built.value

    assert engine.proof.proven, engine.proof.detail
    assert engine.proof.weighted_layers == layers
    assert engine.proof.quantised_layers == quantised
    assert engine.target == "sm89"
    assert engine.builder == plan_info(built.folder / engine.filename)
    assert (engine.calibration_sha256 is not None) == (quantised > 0)
    assert "[TRT]" in (built.folder / "build.log").read_text()


def test_no_device_is_a_reason_not_a_crash(plan, store):
    """A plan for a GPU that is not here is said to be so; nothing tries to load it."""
    built = build_engine(plan("tensorrt-fp16"), store / "engines")

    reason = runnable_here(built.value)

    assert reason == "it needs sm89; there is no NVIDIA GPU with a driver here."
    assert built.value.proof.device == "none here"
    with (
        pytest.raises(EnginegateError, match="tensorrt-fp16 cannot run: it needs sm89"),
        open_engine(built.value, built.folder),
    ):
        pass


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        pytest.param(cuda.Gpu("NVIDIA L4", "sm89"), None, id="target"),
        pytest.param(
            cuda.Gpu("NVIDIA H200", "sm90"),
            "it was built for sm89; the GPU here is sm90 NVIDIA H200.",
            id="other",
        ),
    ],
)
def test_gpu_must_be_a_target(plan, store, monkeypatch, gpu, reason):
    """A plan runs on the compute capabilities it was built for, and on no others."""
    built = build_engine(plan("tensorrt-fp16"), store / "engines")
    monkeypatch.setattr(cuda, "gpu", lambda: gpu)

    assert runnable_here(built.value) == reason


def test_triton_cannot_serve_rtx_plans(plan, store):
    """Triton's backend loads the full library's plans only, so the error says what to build."""
    built = build_engine(plan("tensorrt-fp16"), store / "engines")

    with pytest.raises(ModelError, match="plans of the full TensorRT only"):
        serving(built.value, built.folder)


def test_plan_of_another_version_is_not_loaded(plan, store):
    """A plan runs only with the library version that built it; both are named."""
    engine = build_engine(plan("tensorrt-fp16"), store / "engines").value
    older = engine.model_copy(update={"builder": "tensorrt_rtx 1.2.0.54"})

    assert "built by tensorrt_rtx 1.2.0.54; tensorrt_rtx 1.7" in str(runnable_here(older))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        pytest.param(
            "tensorrt-fp8",
            {"targets": ["sm80"]},
            "cannot build tensorrt-fp8 for sm80(.|\n)*fp8_e4m3",
            id="no-fp8-on-ampere",
        ),
        pytest.param(
            "tensorrt-fp16",
            {"targets": ["sm90"]},
            "no target sm90; it has sm75, .*sm89",
            id="unknown-target",
        ),
        pytest.param(
            "tensorrt-fp16",
            {"timeout_s": 0.05},
            "longer than timeout_s = 0.05 and was stopped",
            id="timeout",
        ),
        pytest.param(
            "tensorrt-fp16",
            {"memory_mib": 64},
            r"out of memory: raise memory_mib = 64 in \[tensorrt\]",
            id="memory",
        ),
    ],
)
def test_refusals_say_why_and_leave_nothing(plan, tmp_path, name, settings, message):
    """A target, time or memory that does not do is an error with the setting to change."""
    with pytest.raises(BuildError, match=message):
        build_engine(plan(name, tensorrt=settings), tmp_path)

    assert left_in(tmp_path) == []


def test_crash_of_the_builder_is_an_error(plan, tmp_path, monkeypatch):
    """A builder that is killed is reported with the signal; the flow lives on."""
    program = "import os, signal; print('last words'); os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr(
        process, "worker_command", lambda _python, _job: [sys.executable, "-c", program]
    )

    with pytest.raises(BuildError, match="killed by SIGSEGV"):
        build_engine(plan("tensorrt-fp16"), tmp_path)

    assert left_in(tmp_path) == []


def unsupported(path):
    """A valid ONNX model with an operator that TensorRT's parser does not have."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["image", "w"], ["flat"], name="multiply"),
            helper.make_node("Unique", ["flat"], ["output"], name="distinct", axis=0),
        ],
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    onnx.save(model, path / "model.onnx")


def test_parser_errors_name_the_node(plan, cnn, tmp_path):
    """An operator that TensorRT lacks is named, with its node."""
    from enginegate.candidate import FileDigest, TensorSpec

    folder = tmp_path / "onnx"
    folder.mkdir()
    unsupported(folder)
    changes = {
        "file": FileDigest.of(folder / "model.onnx"),
        "inputs": (TensorSpec(name="image", dtype="float32", shape=(-1, 8)),),
        "program": None,
    }
    kept = ContentFolder(cnn.value.model_copy(update=changes), folder, reused=False)

    with pytest.raises(BuildError, match=r"opset \d+: node 'distinct' \(Unique\): "):
        build_engine(plan("tensorrt-fp32", onnx=kept), tmp_path / "engines")

    assert left_in(tmp_path / "engines") == []


def test_tf32_flag_is_in_the_proof(plan, store):
    """FP32 and TF32 plans come from the same ONNX; the flag is what makes the difference."""
    fp32 = build_engine(plan("tensorrt-fp32"), store / "engines").value
    tf32 = build_engine(plan("tensorrt-tf32"), store / "engines").value

    assert fp32.converted_sha256 == tf32.converted_sha256 == fp32.onnx_sha256
    assert fp32.proof.weighted_layers != tf32.proof.weighted_layers


def test_doctor_says_what_rtx_can_do_here():
    """Without a GPU, plans can be built and not run, and the reason lists what would do."""
    found = {each.kind: each for each in availability()}["tensorrt"]

    assert found.library.startswith("tensorrt_rtx 1.7")
    assert (found.can_build, found.can_run) == (True, False)
    assert "sm89" in found.why_not
    assert "no GPU" in found.why_not
    assert found.remedy


def test_missing_library_says_how_to_install(plan, tmp_path, monkeypatch):
    """Without any TensorRT, building says what to install, and doctor too."""
    monkeypatch.setattr(kind, "find_library", lambda _asked="auto": None)

    with pytest.raises(BuildError, match=r"Neither tensorrt nor tensorrt_rtx.*enginegate\[rtx\]"):
        build_engine(plan("tensorrt-fp16"), tmp_path)
    found = {each.kind: each for each in availability()}["tensorrt"]
    assert (found.library, found.can_build, found.can_run) == (None, False, False)


def test_manifest_is_canonical_json(plan, store):
    """The record beside the plan can be read by people and by programs."""
    built = build_engine(plan("tensorrt-fp16"), store / "engines")

    written = json.loads((built.folder / "manifest.json").read_bytes())

    assert Candidate(**written["candidate"]).name == "tensorrt-fp16"
    assert written["file"]["sha256"] == built.value.file.sha256
