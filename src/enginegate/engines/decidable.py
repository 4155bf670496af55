"""Which candidates can be decided on this machine, before anything is built.

What no device, library or data here allows is inconclusive: it says nothing about the candidate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginegate.candidate import Candidate, EngineKindName, OnnxModel, Precision
from enginegate.engines.onnxruntime.session import REMEDY, version
from enginegate.engines.protocol import DecisionObstacle, EngineKind, engine_kind
from enginegate.errors import BuildError
from enginegate.policy.building import EngineTables
from enginegate.precision import modelopt_for


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has, as far as a policy's candidates need it.

    Attributes:
        converts: whether ONNX Runtime is installed, which converts models to other precisions.
        converter_obstacle: why the converter that the policy insists on is not there; else empty.
        kinds: what each engine kind of the policy's candidates found here (`EngineKind.inspect`).
    """

    converts: bool
    converter_obstacle: str
    kinds: Mapping[EngineKindName, Any]


def this_machine(tables: EngineTables) -> Machine:
    """What is here for a policy's engines; nothing is loaded onto a device to find out."""
    wanted = dict.fromkeys(candidate.kind for candidate in tables.candidates.all())
    return Machine(
        converts=version() is not None,
        converter_obstacle=_converter_obstacle(tables),
        kinds={name: engine_kind(name).inspect(tables.kinds[name]) for name in wanted},
    )


def undecidable(tables: EngineTables, machine: Machine) -> Mapping[Candidate, DecisionObstacle]:
    """The candidates that cannot be decided on a machine under a policy, and why; the rest can."""
    obstacles = {each: obstacle_to(each, tables, machine) for each in tables.candidates.all()}
    return {candidate: obstacle for candidate, obstacle in obstacles.items() if obstacle}


def obstacle_to(
    candidate: Candidate,
    tables: EngineTables,
    machine: Machine,
    onnx: OnnxModel | None = None,
) -> DecisionObstacle | None:
    """Why one candidate cannot be decided on a machine under a policy, or None if it can.

    Args:
        onnx: the model, once it is exported; some kinds need more of it than ONNX.
    """
    kind, precision = engine_kind(candidate.kind), candidate.precision
    if precision not in kind.precisions:
        return DecisionObstacle(
            f"{kind.title} has no {precision}",
            f"Drop {precision} from {kind.name} under [candidates].",
        )
    if tables.candidates.made_as(candidate) is not None:
        return kind.undecidable_made(precision, tables.kinds[kind.name], machine.kinds[kind.name])
    return _unmakeable(kind, precision, tables, machine, onnx) or kind.undecidable(
        precision, tables.kinds[kind.name], machine.kinds[kind.name]
    )


def _unmakeable(
    kind: EngineKind,
    precision: Precision,
    tables: EngineTables,
    machine: Machine,
    onnx: OnnxModel | None,
) -> DecisionObstacle | None:
    """Why the form that a kind builds an engine from cannot be made here; None if it can."""
    if kind.takes_program and onnx is not None and onnx.program is None:
        return DecisionObstacle(
            f"{kind.title} compiles a PyTorch program, and {onnx.source} gave none: "
            f"{onnx.no_program or 'it was exported before programs were kept'}".rstrip("."),
            "Register the model with mlflow.pytorch (serialization_format='pt2'), name its Hugging "
            f"Face folder, or drop {kind.name} from [candidates].",
        )
    if precision.needs_calibration and tables.calibration_data is None:
        return DecisionObstacle(
            f"{precision} needs calibration data, and the policy names none",
            f"Set calibration under [data], or drop {precision} from [candidates].",
        )
    if not (precision.is_as_exported or kind.takes_program):
        if not machine.converts:
            return DecisionObstacle(
                f"ONNX Runtime converts models to {precision}, and it is not installed here",
                f"Run: {REMEDY}",
            )
        if machine.converter_obstacle and kind.takes_modelopt:
            return DecisionObstacle(
                machine.converter_obstacle, "Mend that, or qualify where it is installed."
            )
    return None


def _converter_obstacle(tables: EngineTables) -> str:
    """Why the converter that the policy insists on cannot be had; empty when it can."""
    if tables.calibration.tool != "modelopt":
        return ""
    try:
        for candidate in tables.candidates.all():
            if tables.candidates.made_as(candidate) is not None:
                continue
            modelopt_for(candidate, tables.calibration)
    except BuildError as error:
        return str(error).rstrip(".")
    return ""
