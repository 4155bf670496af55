"""What this program can be asked to do, by name."""

from collections.abc import Callable
from typing import Any

from .build import write_plan
from .driver import CudaError
from .inspection import inspect
from .library import probe
from .run import PlanError, serve


def _inspected(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return inspect(job)
    except (PlanError, CudaError) as error:
        return {"error": str(error)}


COMMANDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "probe": probe,
    "build": write_plan,
    "inspect": _inspected,
    "run": serve,
}
