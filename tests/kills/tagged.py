"""Releases that can be told apart: each answers its input plus a tag of its own.

A package takes no time to build, and Triton loads it in a fraction of a second.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from enginegate.candidate import Candidate, FileDigest, Precision, TensorSpec
from enginegate.data import Tensors
from enginegate.decision import Decision, Promise
from enginegate.policy.operating import Ensemble, EnsembleStep
from enginegate.repository import Golden, Package
from enginegate.repository.ensemble.composition import as_ensemble
from enginegate.serving import ServingConfig
from enginegate.triton.types import Reply

# Completing a configuration costs Triton a second for each load; these are complete.
QUICK = ("--disable-auto-complete-config",)
ENGINE, CHAIN = "lab", "lab-chain"
_WHEN = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
# GPU memory that a release says it took.
TAKES = 100
_SHA = "5c" * 32
_WIDTH, _GOLDEN = 2, 3
_FACTOR = 2.0
_SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
_SOURCE = '''"""Adds the number in engine.bin."""

import ctypes
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb

WORK_S = 0.0
UNFIT_IN = ""

_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _tensor(name, array):
    capsule = np.ascontiguousarray(array).__dlpack__()
    tensor = pb.Tensor.from_dlpack(name, capsule)
    _set_name(capsule, b"used_dltensor")
    return tensor


class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(args["model_repository"]) / args["model_version"]
        if UNFIT_IN and str(folder).startswith(UNFIT_IN):
            raise RuntimeError("this host cannot run it")
        self.tag = np.float32((folder / "engine.bin").read_text())

    def execute(self, requests):
        time.sleep(WORK_S)
        xs = [np.from_dlpack(pb.get_input_tensor_by_name(r, "x")) for r in requests]
        return [pb.InferenceResponse([_tensor("y", x + self.tag)]) for x in xs]
'''
_STEP = (
    _SOURCE[: _SOURCE.index("class")]
    + f"""class TritonPythonModel:
    def execute(self, requests):
        xs = [np.from_dlpack(pb.get_input_tensor_by_name(r, "IN")) for r in requests]
        return [pb.InferenceResponse([_tensor("OUT", x * np.float32({_FACTOR}))]) for x in xs]
"""
)
_STEP_CONFIG = f"""
backend: "python"
max_batch_size: {_SERVING.max_batch_size}
input {{ name: "IN" data_type: TYPE_FP32 dims: {_WIDTH} }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: {_WIDTH} }}
"""


@dataclass(frozen=True, slots=True)
class Order:
    """Which package to make; can be handed to another process.

    Attributes:
        folder: where its files go; of its own.
        model: ``ENGINE``, or ``CHAIN`` for an ensemble around one.
        tag: what its answers carry; whole and below 2 ** 23, so exact in a float32.
        wrong: it answers otherwise than it was validated.
        work_ms: how long each run of the engine takes besides, asleep as if on a GPU.
        unfit_in: a server whose repository is below this folder cannot load it.
    """

    folder: Path
    model: str
    tag: int
    wrong: bool = False
    work_ms: float = 0.0
    unfit_in: str = ""


def made(order: Order) -> Package:
    """The package of an order."""
    engine = _engine(order)
    if order.model != CHAIN:
        return engine
    raw = _inputs()
    tag = order.tag + int(order.wrong)
    return as_ensemble(
        engine, _rules(order.folder), lambda _: Golden({"raw": raw}, {"y": _FACTOR * raw + tag})
    )


def samples(model: str, count: int = 16) -> list[Tensors]:
    """Requests for a model, each with numbers of its own."""
    name = "raw" if model == CHAIN else "x"
    return [{name: np.full((1, _WIDTH), number, np.float32)} for number in range(count)]


def tag_in(model: str, sample: int, reply: Reply) -> float:
    """What an answer to one of `samples` carries; NaN if its numbers disagree."""
    found = reply.outputs["y"] - np.float32(sample * (_FACTOR if model == CHAIN else 1.0))
    first = float(found.flat[0])
    return first if bool((found == first).all()) else float("nan")


def _engine(order: Order) -> Package:
    order.folder.mkdir(parents=True, exist_ok=True)
    (order.folder / "model.py").write_text(_source(order))
    (order.folder / "engine.bin").write_text(str(order.tag))
    digest = FileDigest.of(order.folder / "engine.bin")
    x = _inputs()
    return Package(
        model=order.model,
        model_uri=f"models:/{order.model}/1",
        candidate=Candidate(kind="onnxruntime", precision=Precision.FP32),
        engine_sha256=digest.sha256,
        approved={"engine.bin": digest},
        files={name: order.folder / name for name in ("model.py", "engine.bin")},
        backend="python",
        gpu=False,
        inputs=(_spec("x"),),
        outputs=(_spec("y"),),
        serving=_SERVING,
        golden=Golden({"x": x}, {"y": x + np.float32(order.tag + int(order.wrong))}),
        golden_max_abs_error=1e-4,
        scorecard_sha256=_SHA,
        decision=Decision(
            scorecard_sha256=_SHA,
            answer="approve",
            approver="lab",
            reason="a measurement",
            decided_at=_WHEN,
        ),
        promise=Promise(p99_ms=9.0, throughput_per_s=400.0, slo_p99_ms=25.0),
        gpu_bytes=TAKES,
        cold_start_s=0.2,
    )


def _source(order: Order) -> str:
    timed = _SOURCE.replace("WORK_S = 0.0", f"WORK_S = {order.work_ms / 1e3!r}")
    return timed.replace('UNFIT_IN = ""', f"UNFIT_IN = {order.unfit_in!r}")


def _rules(folder: Path) -> Ensemble:
    step = folder / "double"
    step.mkdir(exist_ok=True)
    (step / "model.py").write_text(_STEP)
    (step / "config.pbtxt").write_text(_STEP_CONFIG)
    double = EnsembleStep(name="double", folder=step, inputs={"IN": "raw"}, outputs={"OUT": "x"})
    return Ensemble(before=(double,))


def _inputs() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.arange(_GOLDEN * _WIDTH, dtype=np.float32).reshape(_GOLDEN, _WIDTH)


def _spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=(-1, _WIDTH))
