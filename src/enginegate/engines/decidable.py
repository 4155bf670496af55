"""Which candidates can be decided on this machine, before anything is built.

What no device, library or data here allows is inconclusive: it says nothing about the candidate.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from enginegate.candidate import Candidate, EngineKind, Precision
from enginegate.engines import cuda
from enginegate.engines.cuda import Gpu
from enginegate.engines.onnxruntime import session as sessions
from enginegate.engines.plan import AS_EXPORTED
from enginegate.engines.tensorrt import library as tensorrt_library
from enginegate.engines.tensorrt.library import RTX
from enginegate.errors import BuildError
from enginegate.policy.building import Device, EngineTables, TensorRt
from enginegate.precision import modelopt_for

_ADA = 89  # the first capability with FP8 arithmetic


@dataclass(frozen=True, slots=True)
class DecisionObstacle:
    """Why a candidate cannot be decided here.

    Attributes:
        why: what is missing, in one sentence.
        remedy: what to do about it.
        builds: whether its engine can be built all the same, which shows its size, its precision
            and, emulated, its range.
    """

    why: str
    remedy: str
    builds: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has, as far as a policy's candidates need it.

    Attributes:
        onnxruntime: whether ONNX Runtime is installed.
        device: what ONNX Runtime is to run on under the policy.
        providers: the execution providers that the installed ONNX Runtime has.
        tensorrt: import name of the TensorRT library that the policy gets, or None.
        tensorrt_obstacle: why nothing can be built with it for the policy; empty when it can.
        converter_obstacle: why the converter that the policy insists on is not there; else empty.
        gpu: the first GPU.
    """

    onnxruntime: bool
    device: Device
    providers: frozenset[str]
    tensorrt: str | None
    tensorrt_obstacle: str
    converter_obstacle: str
    gpu: Gpu | None


def this_machine(tables: EngineTables) -> Machine:
    """What is here for a policy's engines; nothing is loaded onto a device to find out."""
    wanted = {candidate.kind for candidate in tables.candidates.all()}
    library = (
        tensorrt_library.find_library(tables.building.tensorrt.library)
        if EngineKind.TENSORRT in wanted
        else None
    )
    return Machine(
        onnxruntime=sessions.version() is not None,
        device=sessions.device_of(tables.building.onnxruntime),
        providers=sessions.providers(),
        tensorrt=None if library is None else str(library.__name__),
        tensorrt_obstacle=_library_obstacle(library, tables.building.tensorrt),
        converter_obstacle=_converter_obstacle(tables),
        gpu=cuda.gpu(),
    )


def undecidable(tables: EngineTables, machine: Machine) -> Mapping[Candidate, DecisionObstacle]:
    """The candidates that cannot be decided on a machine under a policy, and why; the rest can."""
    obstacles = {each: obstacle_to(each, tables, machine) for each in tables.candidates.all()}
    return {candidate: obstacle for candidate, obstacle in obstacles.items() if obstacle}


def obstacle_to(
    candidate: Candidate, tables: EngineTables, machine: Machine
) -> DecisionObstacle | None:
    """Why one candidate cannot be decided on a machine under a policy, or None if it can."""
    precision = candidate.precision
    if precision.needs_calibration and tables.calibration_data is None:
        return DecisionObstacle(
            f"{precision} needs calibration data, and the policy names none",
            f"Set calibration under [data], or drop {precision} from [candidates].",
        )
    if not machine.onnxruntime and precision not in AS_EXPORTED:
        return DecisionObstacle(
            f"ONNX Runtime converts models to {precision}, and it is not installed here",
            f"Run: {sessions.REMEDY}",
        )
    if candidate.kind is EngineKind.ONNXRUNTIME:
        return _on_onnxruntime(precision, machine)
    return _on_tensorrt(precision, tables.building.tensorrt, machine)


def _on_onnxruntime(precision: Precision, machine: Machine) -> DecisionObstacle | None:
    if not machine.onnxruntime:
        return DecisionObstacle("ONNX Runtime is not installed here", f"Run: {sessions.REMEDY}")
    provider = sessions.PROVIDERS[machine.device]
    if machine.device == "cuda" and machine.gpu is None:
        return DecisionObstacle(
            'it is for device = "cuda", and there is no NVIDIA GPU with a driver here',
            'Qualify on a machine with a GPU, or set device = "auto" under [onnxruntime].',
        )
    if provider not in machine.providers:
        return DecisionObstacle(
            f"the ONNX Runtime that is installed here has no {provider}",
            "Install onnxruntime-gpu on this machine.",
        )
    why = sessions.lacks(precision, machine.device, machine.gpu)
    if not why:
        return None
    where = (
        "Move it to tensorrt under [candidates]."
        if precision is Precision.FP8
        else "Qualify on a machine with such a GPU, or drop it from onnxruntime under [candidates]."
    )
    return DecisionObstacle(why, where)


def _on_tensorrt(
    precision: Precision, rules: TensorRt, machine: Machine
) -> DecisionObstacle | None:
    if machine.tensorrt_obstacle:
        return DecisionObstacle(
            machine.tensorrt_obstacle, "Mend that, or qualify on a machine that has it."
        )
    if machine.converter_obstacle and precision not in AS_EXPORTED:
        return DecisionObstacle(
            machine.converter_obstacle, "Mend that, or qualify where it is installed."
        )
    gpu = machine.gpu
    if machine.tensorrt == RTX:
        targets = "+".join(rules.targets)
        here = gpu or "no NVIDIA GPU with a driver"
        if gpu is None or gpu.capability not in rules.targets:
            return DecisionObstacle(
                f"its plan is for {targets}, and this machine has {here}",
                f"Qualify on a machine with a GPU of {targets}.",
                builds=True,
            )
        return None
    needed = _needed(precision)
    if gpu is not None and sessions.capability(gpu) < needed:
        return DecisionObstacle(
            f"{precision} needs compute capability {needed / 10:.1f}, and the GPU here is {gpu}",
            f"Qualify on a newer GPU, or drop {precision} from tensorrt under [candidates].",
        )
    return None


def _needed(precision: Precision) -> int:
    if precision is Precision.FP8:
        return _ADA
    return sessions.AMPERE if precision in {Precision.TF32, Precision.BF16} else 0


def _library_obstacle(library: object, rules: TensorRt) -> str:
    """Why no plan can be built here for the policy; empty when one can."""
    try:
        tensorrt_library.target(library, rules)
    except BuildError as error:
        return str(error).rstrip(".")
    return ""


def _converter_obstacle(tables: EngineTables) -> str:
    """Why the converter that the policy insists on cannot be had; empty when it can."""
    if tables.calibration.tool != "modelopt":
        return ""
    try:
        for candidate in tables.candidates.all():
            modelopt_for(candidate, tables.calibration)
    except BuildError as error:
        return str(error).rstrip(".")
    return ""
