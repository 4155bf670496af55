"""Which TensorRT there is: in this Python, or in the one that ENGINEGATE_TENSORRT names.

TensorRT 8.6 has bindings for Python 3.10 and 3.11 only, so it may live in a Python of its own. It
is asked in a process that touches no device, because that version crashes where it finds none.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from enginegate.errors import BuildError
from enginegate.redact import environment_for_others

VARIABLE = "ENGINEGATE_TENSORRT"
FULL, RTX = "tensorrt", "tensorrt_rtx"
# The bindings of TensorRT 8.6.1 are a package of their own, which is enough beside the library.
_NAMES = {FULL: (FULL, "tensorrt_bindings"), RTX: (RTX,)}
_WORKER = Path(__file__).with_name("worker")
_PROBE_S = 120.0  # importing reads a gigabyte of libraries, from a cold disk perhaps
_WEAKLY_TYPED = 8  # the last major version without strongly typed networks
_OPSETS = {8: 17}  # highest ONNX operator set of a major version; later ones take all that we write
_SHOWN = 400
REMEDY_KERNELS = (
    "TensorRT 8.6 needs libcudnn.so.8, libcublas.so.12 and libcublasLt.so.12: install "
    "nvidia-cudnn-cu12==8.9.7.29 and nvidia-cublas-cu12==12.1.3.1 beside it, or put placeholders "
    "on LD_LIBRARY_PATH (docs/engines.md)."
)


@dataclass(frozen=True, slots=True)
class TensorRtLibrary:
    """One TensorRT that can build.

    Attributes:
        python: the interpreter that has it.
        name: ``tensorrt`` or ``tensorrt_rtx``.
        module: its import name there.
        version: of the library, three or four parts.
        kernels: libraries of kernels that it would use -> ``here``, ``empty`` (a placeholder) or
            ``absent``; empty where it needs none.
        targets: compute capabilities that it builds for ahead of time, e.g. ``sm89``.
        tells_progress: whether a build reports steps and can be asked to stop.
        cuda: major version of the CUDA that it was built for; empty if it does not say.
    """

    python: str
    name: str
    module: str
    version: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    tells_progress: bool = True
    cuda: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def is_rtx(self) -> bool:
        """Whether it builds ahead of time, for GPUs that are elsewhere."""
        return self.name == RTX

    @property
    def is_weakly_typed(self) -> bool:
        """Whether flags allow precisions, instead of the network's types deciding them."""
        return not self.is_rtx and self._major <= _WEAKLY_TYPED

    @property
    def highest_opset(self) -> int | None:
        """Highest ONNX operator set that its parser takes, or None for any."""
        return None if self.is_rtx else _OPSETS.get(self._major)

    @property
    def lacks_kernels(self) -> bool:
        """Whether a library of kernels is a placeholder, so that it must not be called."""
        return any(state != "here" for state in self.kernels.values())

    @property
    def _major(self) -> int:
        return int(self.version.split(".", maxsplit=1)[0])

    def wrote(self, builder: str) -> bool:
        """Whether a plan that ``builder`` labels is of this library and version."""
        name, _, version = builder.partition(" ")
        ours, theirs = self.version.split("."), version.split(".")
        shared = min(len(ours), len(theirs))
        return name == self.name and ours[:shared] == theirs[:shared]


def find_library(asked: str = "auto") -> TensorRtLibrary | None:
    """The library asked for; with ``auto`` the full one if it is here, else RTX. Or None.

    Raises:
        BuildError: ENGINEGATE_TENSORRT names a Python that cannot be run or lacks TensorRT, or
            what is installed cannot be imported.
    """
    found = _find(asked, os.environ.get(VARIABLE, ""))
    if isinstance(found, str):
        raise BuildError(found)
    return found


@cache
def _find(asked: str, foreign: str) -> TensorRtLibrary | str | None:
    """The library, or why it cannot be asked: a process finds out once, it takes seconds."""
    try:
        return _found(asked, foreign)
    except BuildError as error:
        return str(error)


def _found(asked: str, foreign: str) -> TensorRtLibrary | None:
    for name in (FULL, RTX) if asked == "auto" else (asked,):
        python = foreign if foreign and name == FULL else ""
        if python or any(_is_installed(module) for module in _NAMES[name]):
            found = _probe(python or sys.executable, name, is_named=bool(python))
            if found is not None:
                return found
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module that was put into sys.modules without a specification
        return False


def _probe(python: str, name: str, *, is_named: bool) -> TensorRtLibrary | None:
    """Ask an interpreter; None if the library that this Python has cannot build."""
    with tempfile.TemporaryDirectory(prefix="enginegate-probe-") as folder:
        report = Path(folder) / "report.json"
        job = {"command": "probe", "report": str(report), "names": list(_NAMES[name])}
        (Path(folder) / "job.json").write_text(json.dumps(job))
        try:
            ended = subprocess.run(  # noqa: S603 - the user's own interpreter, our own program
                worker_command(python, Path(folder) / "job.json"),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PROBE_S,
                check=False,
                env=worker_environment(python),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{_origin(python, is_named)} cannot be run: {error}.") from error
        found = read_report(report)
    if found is None:
        raise BuildError(
            f"{_origin(python, is_named)} {ending(ended.returncode)} while it imported {name}: "
            f"{ended.stderr.strip()[-_SHOWN:]}\nMend that installation, or unset {VARIABLE}."
        )
    if found.get("error"):
        if not is_named:
            return None
        hint = f" {REMEDY_KERNELS}" if "absent" in str(found.get("kernels", "")) else ""
        raise BuildError(
            f"{_origin(python, is_named)} has no TensorRT that can build: "
            f"{str(found['error'])[-_SHOWN:]}.{hint}"
        )
    return library_of(found, python)


def library_of(found: Mapping[str, object], python: str) -> TensorRtLibrary:
    """The library that a probe's report describes."""
    members, kernels = found["members"], found["kernels"]
    assert isinstance(members, dict)  # noqa: S101 - our own program wrote it
    assert isinstance(kernels, dict)  # noqa: S101
    capabilities = members.get("ComputeCapability", [])
    return TensorRtLibrary(
        python=python,
        name=str(found["name"]),
        module=str(found["module"]),
        version=str(found["version"]),
        kernels={str(name): str(state) for name, state in kernels.items()},
        targets=tuple(each.lower() for each in capabilities if each.startswith("SM")),
        tells_progress=bool(found["monitor"]),
        cuda=str(found.get("cuda", "")),
    )


def _origin(python: str, is_named: bool) -> str:  # noqa: FBT001 - one meaning, one caller
    return f"{VARIABLE}={python}" if is_named else f"The TensorRT of {python}"


def worker_command(python: str, job: Path) -> list[str]:
    """How the program of this room is started in an interpreter."""
    return [python, str(_WORKER), str(job)]


def worker_environment(python: str) -> dict[str, str]:
    """This process's environment, without what is meant for its own Python only."""
    own = {} if python == sys.executable else {"PYTHONPATH", "PYTHONHOME"}
    kept = {name: value for name, value in environment_for_others().items() if name not in own}
    return kept | {"PYTHONFAULTHANDLER": "1", "PYTHONSAFEPATH": ""}


def read_report(path: Path) -> dict[str, object] | None:
    """What a worker wrote, or None if it wrote nothing that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def ending(code: int) -> str:
    """How a process ended, in words."""
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )
