"""The TensorRT library of this Python: found, imported, and described without a device."""

import ctypes
import importlib
import os
import re
import sys
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

# What TensorRT 8 takes kernels from, and a function that a real library has. Its plugin library
# cannot be loaded without these files, so hosts put empty ones in their place.
_KERNELS = {
    "cudnn": ("libcudnn.so.8", "cudnnCreate"),
    "cublas": ("libcublas.so.12", "cublasCreate_v2"),
    "cublaslt": ("libcublasLt.so.12", "cublasLtCreate"),
}
_CUDA_OF_KERNELS = "12"
_WITH_KERNEL_LIBRARIES = 8  # the last major version that takes kernels from them
LISTED = ("BuilderFlag", "TacticSource", "HardwareCompatibilityLevel", "ComputeCapability")
SEVERITIES = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I"}


def import_library(names: list[str]) -> Any:
    """The first library of these names that is here and can build.

    Symbols are bound when they are called, so that a library may lack those that nobody calls.

    Raises:
        ImportError: there is none; says why for each name.
    """
    sys.setdlopenflags(os.RTLD_LAZY)
    reasons = []
    for name in names:
        try:
            found = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if hasattr(found, "Builder"):
            return found
        reasons.append(f"{name} has no Builder")
    raise ImportError("; ".join(reasons))


def kernel_libraries() -> dict[str, str]:
    """For each library of kernels: ``here``, ``empty`` (a placeholder) or ``absent``.

    Those of NVIDIA's wheels are loaded on the way, so that TensorRT finds them.
    """
    found = {}
    for word, (filename, symbol) in reversed(_KERNELS.items()):
        library = _load(filename)
        if library is None:
            found[word] = "absent"
        else:
            found[word] = "here" if hasattr(library, symbol) else "empty"
    return found


def _load(filename: str) -> ctypes.CDLL | None:
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    wheels = [str(path) for folder in folders for path in folder.glob(f"*/lib/{filename}")]
    for place in (filename, *wheels):
        with suppress(OSError):
            return ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
    return None


def probe(job: dict[str, Any]) -> dict[str, Any]:
    """What this Python has, asked without a device: TensorRT 8.6 crashes where it finds none.

    Job: names (import names to try, in this order).
    """
    kernels = kernel_libraries()
    try:
        trt = import_library(job["names"])
    except ImportError as error:
        return {"error": str(error), "kernels": kernels}
    name = trt.__name__.removesuffix("_bindings")
    takes_kernels = name == "tensorrt" and _major(trt) <= _WITH_KERNEL_LIBRARIES
    return {
        "name": name,
        "module": trt.__name__,
        "version": library_version(trt),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "kernels": kernels if takes_kernels else {},
        "cuda": _CUDA_OF_KERNELS if takes_kernels else _cuda_of_wheels(),
        "members": {kind: members(trt, kind) for kind in LISTED},
        "monitor": hasattr(trt, "IProgressMonitor"),
        "strong": "STRONGLY_TYPED" in members(trt, "NetworkDefinitionCreationFlag"),
    }


def _cuda_of_wheels() -> str:
    """The CUDA that TensorRT's wheels were built for, by their names; empty if they do not say."""
    names = (each.metadata["Name"] or "" for each in distributions())
    found = (re.fullmatch(r"tensorrt.*[-_]cu([0-9]+).*", name) for name in names)
    return next((match[1] for match in found if match), "")


def library_version(trt: Any) -> str:
    """The library's version; of TensorRT 8 the bindings may be of another release than the library.

    That library tells a number, 8601 for 8.6.1 (NvInferVersion.h).
    """
    if _major(trt) == _WITH_KERNEL_LIBRARIES:
        with suppress(OSError, AttributeError):
            number = int(ctypes.CDLL("libnvinfer.so.8").getInferLibVersion())
            return f"{number // 1000}.{number // 100 % 10}.{number % 100}"
    return str(trt.__version__)


def _major(trt: Any) -> int:
    return int(str(trt.__version__).split(".", maxsplit=1)[0])


def members(trt: Any, kind: str) -> list[str]:
    """Names of an enumeration's members; none where the library lacks it."""
    return list(getattr(getattr(trt, kind, None), "__members__", {}))


def named(trt: Any, kind: str, name: str) -> Any:
    """A member by its name: the numbers differ between versions.

    Raises:
        LookupError: this version has no such member.
    """
    found = getattr(getattr(trt, kind, None), name, None)
    if found is None:
        raise LookupError(f"{trt.__name__} {trt.__version__} has no {kind}.{name}.")
    return found


def logger(trt: Any, on_verbose: Any = None) -> Any:
    """A logger that writes to standard error; ``on_verbose`` gets what is too much to write."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            letter = SEVERITIES.get(severity.name)
            if letter is not None:
                sys.stderr.write(f"[TRT] [{letter}] {message}\n")
            elif on_verbose is not None:
                on_verbose(message)

    return Logger()
