"""What a machine and a policy's data allow is known before anything is built."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from enginegate.candidate import Candidate
from enginegate.engines.cuda import Gpu
from enginegate.engines.decidable import Machine, undecidable
from enginegate.engines.onnxruntime.kind import OnnxRuntimeHere
from enginegate.engines.tensorrt.kind import TensorRtHere
from enginegate.engines.tensorrt.library import TensorRtLibrary
from enginegate.policy import parse_policy

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"
RTX = TensorRtLibrary("python", "tensorrt_rtx", "tensorrt_rtx", "1.7.1.116")
TENSORRT = TensorRtLibrary("python", "tensorrt", "tensorrt", "11.4.0.106")
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
LAPTOP = Machine(
    converts=True,
    converter_obstacle="",
    kinds={
        "onnxruntime": OnnxRuntimeHere(
            installed=True, device="cpu", providers=frozenset({CPU}), gpu=None
        ),
        "tensorrt": TensorRtHere(library=RTX, obstacle="", gpu=None),
    },
)


def changed(machine, **fields):
    """The machine with some fields of an engine kind's part, or of its own, changed."""
    kinds = {
        name: replace(here, **{k: v for k, v in fields.items() if k in here.__slots__})
        for name, here in machine.kinds.items()
    }
    own = {key: value for key, value in fields.items() if key in machine.__slots__}
    return replace(machine, kinds=kinds, **own)


ADA = changed(
    LAPTOP,
    device="cuda",
    providers=frozenset({CPU, CUDA}),
    library=TENSORRT,
    gpu=Gpu("NVIDIA L4", "sm89"),
)
WITHOUT_ONNXRUNTIME = changed(LAPTOP, converts=False, installed=False)
ALL = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")


def found(machine, *, calibration=True, onnxruntime=ALL, tensorrt=ALL, **tables):
    """What cannot be decided: the candidate's name -> why."""
    raw = tomllib.loads(DIGITS.read_text())
    raw["candidates"] = {"onnxruntime": list(onnxruntime), "tensorrt": list(tensorrt)}
    if not calibration:
        del raw["data"]["calibration"]
    rules = parse_policy(raw | tables, "a test")
    return {
        candidate.name: each
        for candidate, each in undecidable(rules.engine_tables, machine).items()
    }


def test_without_calibration_data_int8_and_fp8_are_open_everywhere():
    """Scales are never made up, so nothing is built; the remedy names the key."""
    without = found(ADA, calibration=False)

    assert set(without) == {
        f"{kind}-{precision}"
        for kind in ("onnxruntime", "tensorrt")
        for precision in ("int8", "fp8")
    }
    assert all(not each.builds for each in without.values())
    assert "needs calibration data" in without["onnxruntime-int8"].why
    assert "[data]" in without["onnxruntime-int8"].remedy


def test_cpu_decides_no_short_float_precision():
    """ONNX Runtime computes fp32 and int8 there; TF32 is a GPU's."""
    open_here = found(LAPTOP, tensorrt=())

    assert set(open_here) == {f"onnxruntime-{p}" for p in ("tf32", "fp16", "bf16", "fp8")}
    assert (
        "not in fp16; that needs the CUDA provider and a GPU" in open_here["onnxruntime-fp16"].why
    )
    assert "TensorRT has fp8" in open_here["onnxruntime-fp8"].why
    assert not any(each.builds for each in open_here.values())


def test_plans_that_nothing_here_can_run_are_built_all_the_same():
    """TensorRT-RTX builds ahead of time: size, precision and range are shown."""
    open_here = found(LAPTOP, onnxruntime=())

    assert set(open_here) == {f"tensorrt-{p}" for p in ALL}
    assert all(each.builds for each in open_here.values())
    assert "for sm89, and this machine has no NVIDIA GPU" in open_here["tensorrt-int8"].why


def test_gpu_decides_its_own_precisions():
    """An Ada GPU decides everything but ONNX Runtime's fp8; a Turing one not TF32, BF16 and FP8."""
    turing = changed(ADA, gpu=Gpu("NVIDIA T4", "sm75"))

    assert set(found(ADA)) == {"onnxruntime-fp8"}
    assert set(found(turing)) == {
        *("onnxruntime-tf32", "onnxruntime-bf16", "onnxruntime-fp8"),
        *("tensorrt-tf32", "tensorrt-bf16", "tensorrt-fp8"),
    }


@pytest.mark.parametrize(
    ("machine", "candidate", "why"),
    [
        (WITHOUT_ONNXRUNTIME, "onnxruntime-fp32", "not installed"),
        (WITHOUT_ONNXRUNTIME, "tensorrt-fp16", "converts models to fp16"),
        (
            changed(LAPTOP, library=None, obstacle="no library"),
            "tensorrt-fp32",
            "no libr",
        ),
        (changed(LAPTOP, converter_obstacle="no ModelOpt"), "tensorrt-int8", "no ModelOpt"),
        (changed(LAPTOP, device="cuda"), "onnxruntime-fp32", "there is no NVIDIA GPU"),
        (changed(ADA, providers=frozenset({CPU})), "onnxruntime-fp32", f"has no {CUDA}"),
    ],
)
def test_missing_runtime_decides_nothing(machine, candidate, why):
    """Nothing is built for it, and the reason is this machine's."""
    obstacle = found(machine)[Candidate.parse(candidate).name]

    assert why in obstacle.why
    assert not obstacle.builds
    assert obstacle.remedy
