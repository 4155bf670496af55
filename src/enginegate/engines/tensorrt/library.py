"""Which TensorRT library is here, and what it can build for and load. Nothing is loaded to ask."""

import importlib
from functools import cache
from typing import Any

from enginegate.engines import cuda
from enginegate.errors import BuildError
from enginegate.policy.building import TensorRt

RTX = "tensorrt_rtx"
NAMES = ("tensorrt", RTX)
REMEDY = (
    "pip install 'enginegate[rtx]' for TensorRT-RTX (x86-64 Linux, builds without a GPU), or "
    "'enginegate[tensorrt]' beside an NVIDIA GPU"
)


@cache
def find_library(asked: str = "auto") -> Any:
    """The library asked for; with ``auto`` the full one if it is here, else RTX. Or None."""
    for name in NAMES if asked == "auto" else (asked,):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(library, "Builder"):
            return library
    return None


@cache
def logger(library: Any) -> Any:
    """The first logger a process gives a library stays the active one."""
    return library.Logger(library.Logger.ERROR)


def library_name(library: Any) -> str:
    """Import name and version, as plans are labelled."""
    return f"{library.__name__} {library.__version__}"


def toolchain(library: Any) -> str:
    """Library and version; with the full library also the GPU, which its plans depend on."""
    if library is None:
        return "absent"
    if library.__name__ == RTX:
        return library_name(library)
    return f"{library_name(library)} on {cuda.gpu() or 'no GPU'}"


def target(library: Any, rules: TensorRt) -> str:
    """What a plan built here is for: compute capabilities (RTX), or the GPU here.

    Raises:
        BuildError: the library is missing, cannot do what the policy asks, or needs a GPU.
    """
    if library is None:
        wanted = "Neither tensorrt nor tensorrt_rtx" if rules.library == "auto" else rules.library
        verb = "is installed" if rules.library == "auto" else "(library in [tensorrt]) is missing"
        raise BuildError(f"{wanted} {verb} here. Run: {REMEDY}.")
    if library.__name__ == RTX:
        asked = {
            f"hardware_compatibility = {rules.hardware_compatibility!r}": (
                rules.hardware_compatibility != "none"
            ),
            "version_compatible = true": rules.version_compatible,
        }
        for setting in (name for name, is_asked in asked.items() if is_asked):
            raise BuildError(
                f"{library_name(library)} has no {setting}: its plans run on every target they "
                "were built for, with that version only. Remove it from [tensorrt], or build with "
                "the full TensorRT."
            )
        return "+".join(rules.targets)
    found = cuda.gpu()
    if found is None:
        raise BuildError(
            f"{library_name(library)} builds on the GPU a plan will run on, and there is none "
            'here. Build on a GPU machine, or set library = "tensorrt_rtx" in [tensorrt] to '
            "build ahead of time."
        )
    return str(found)


def no_device(builder: str, wanted: str) -> str | None:
    """Why no device here can run a plan of ``builder`` for target ``wanted``, or None."""
    library = find_library(builder.split(" ", maxsplit=1)[0])
    if library is None:
        return f"it was built by {builder}, and no such TensorRT is installed here. Run: {REMEDY}."
    if library_name(library) != builder:
        return f"it was built by {builder}; {library_name(library)} here cannot load it."
    found = cuda.gpu()
    if found is None:
        return f"it needs {wanted}; there is no NVIDIA GPU with a driver here."
    fits = (
        found.capability in wanted.split("+") if library.__name__ == RTX else str(found) == wanted
    )
    return None if fits else f"it was built for {wanted}; the GPU here is {found}."
