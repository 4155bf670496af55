"""Engines: planned, built once, proven, run and served; each kind behind one protocol."""

from enginegate.engines.build import build_engine, plan_engine, read_engine
from enginegate.engines.decidable import Machine, obstacle_to, this_machine, undecidable
from enginegate.engines.onnxruntime.session import open_onnx
from enginegate.engines.plan import BuildPlan
from enginegate.engines.protocol import (
    Availability,
    DecisionObstacle,
    EngineKind,
    Runner,
    ServedFiles,
    engine_kind,
)
from enginegate.engines.run import (
    REFERENCE,
    availability,
    open_engine,
    open_reference,
    runnable_here,
    serving,
)
from enginegate.engines.tensorrt.plan_header import check_plan, plan_info

__all__ = [
    "REFERENCE",
    "Availability",
    "BuildPlan",
    "DecisionObstacle",
    "EngineKind",
    "Machine",
    "Runner",
    "ServedFiles",
    "availability",
    "build_engine",
    "check_plan",
    "engine_kind",
    "obstacle_to",
    "open_engine",
    "open_onnx",
    "open_reference",
    "plan_engine",
    "plan_info",
    "read_engine",
    "runnable_here",
    "serving",
    "this_machine",
    "undecidable",
]
