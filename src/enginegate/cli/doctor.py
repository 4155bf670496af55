"""What is here, what each missing part costs, and how to get it."""

import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from enginegate.engines import availability
from enginegate.errors import ServerError
from enginegate.machine import gpus
from enginegate.triton.install import find_triton
from enginegate.workspace import Workspace


class Part(NamedTuple):
    """One thing the pipeline can use."""

    name: str
    found: str
    cost: str
    remedy: str


_PACKAGES = (
    ("prefect", "flows do not run", "pip install enginegate"),
    ("mlflow", "no registry, nothing is recorded", "pip install enginegate"),
    ("great-expectations", "nothing is judged", "pip install enginegate"),
    ("tritonclient", "no server can be talked to", "pip install 'enginegate[triton]'"),
    ("torch", "PyTorch models cannot be exported", "pip install 'enginegate[torch]'"),
    ("matplotlib", "no plots in MLflow", "pip install 'enginegate[plots]'"),
)


def table() -> Table:
    """The parts as a table; what is missing in the second half of a row."""
    shown = Table("part", "here", "without it", "how to get it")
    for part in parts():
        missing = not part.found
        shown.add_row(
            part.name,
            escape(part.found) or "[bold red]missing[/]",
            part.cost if missing else "",
            escape(part.remedy) if missing else "",
        )
    return shown


def parts() -> Iterator[Part]:
    """Every part, in the order of the pipeline."""
    yield _gpu()
    for kind in availability():
        uses = [w for w, can in (("builds", kind.can_build), ("runs", kind.can_run)) if can]
        found = f"{kind.library}: {' and '.join(uses) or 'unusable'}" if kind.library else ""
        note = f" ({kind.why_not})" if kind.why_not and found else ""
        yield Part(kind.kind, found + note, f"no {kind.kind} candidates", kind.remedy)
    yield _triton()
    yield _on_path(
        "perf_analyzer",
        "no second load generator to compare with",
        "pip install tritonclient==2.51.0",
    )
    for name, cost, remedy in _PACKAGES:
        yield Part(name, _version(name), cost, remedy)


def _gpu() -> Part:
    cost = "engines for a GPU are built ahead of time at best, and stay inconclusive"
    return Part("GPU", gpus(), cost, "run on a machine with an NVIDIA GPU and its driver")


def _triton() -> Part:
    cost = "nothing can be benchmarked or served here"
    try:
        found = find_triton(Workspace.here().root / "triton")
    except ServerError as error:
        return Part("Triton server", "", cost, str(error))
    return Part("Triton server", found.origin, cost, "")


def _on_path(name: str, cost: str, remedy: str) -> Part:
    return Part(name, shutil.which(name) or "", cost, remedy)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
