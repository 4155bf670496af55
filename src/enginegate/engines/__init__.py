"""Engines: planned, built once, proven, run and served."""

from enginegate.engines.build import build_engine, plan_engine, read_engine
from enginegate.engines.decidable import (
    DecisionObstacle,
    Machine,
    obstacle_to,
    this_machine,
    undecidable,
)
from enginegate.engines.onnxruntime.engine import open_onnx
from enginegate.engines.plan import BuildPlan
from enginegate.engines.protocol import Availability, Runner, ServedFiles
from enginegate.engines.registry import NATIVE
from enginegate.engines.run import (
    availability,
    native_drawback,
    open_engine,
    open_reference,
    runnable_here,
    serving,
)
from enginegate.engines.tensorrt.plan_header import check_plan, plan_info

__all__ = [
    "NATIVE",
    "Availability",
    "BuildPlan",
    "DecisionObstacle",
    "Machine",
    "Runner",
    "ServedFiles",
    "availability",
    "build_engine",
    "check_plan",
    "native_drawback",
    "native_obstacle",
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
