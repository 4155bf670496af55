"""Which PyTorch is here, with which CUDA libraries, for which device: found without importing it.

A package holds calls into libtorch, cuDNN and cuBLAS, and machine code for one kind of processor or
GPU. PyTorch itself only warns when one of them differs.
"""

import importlib.util
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from enginegate.engines import cuda
from enginegate.engines.cuda import Device

REMEDY = "pip install 'enginegate[torch]', and a C++ compiler (g++)"
_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)", re.MULTILINE)
_CUDA = re.compile(r"^cuda[^=\n]*= ['\"]([^'\"]+)", re.MULTILINE)
_LIBRARIES = {"cudnn": "nvidia-cudnn", "cublas": "nvidia-cublas"}
# Instructions that generated kernels and the layout of oneDNN's weights depend on.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile")


@cache
def torch_version() -> str | None:
    """The installed version, e.g. ``2.11.0+cu130``, or None."""
    text = _version_file()
    found = _VERSION.search(text)
    return found[1] if found else None


@cache
def torch_cuda() -> str | None:
    """The CUDA version that PyTorch was built for, or None."""
    found = _CUDA.search(_version_file())
    return found[1] if found else None


def package_device(wanted: str) -> Device:
    """What packages are compiled for under a policy."""
    if wanted == "auto":
        return "cuda" if torch_cuda() and cuda.gpu() is not None else "cpu"
    return "cuda" if wanted == "cuda" else "cpu"


def builder_name(device: Device) -> str:
    """PyTorch and what a package depends on: CUDA libraries, or a processor's instructions."""
    words = [f"torch {torch_version()}"]
    if device == "cpu":
        words.append(" ".join((platform.machine(), *_instructions())))
    else:
        words.append(f"cuda {torch_cuda()}")
        words += [f"{name} {_library(distribution)}" for name, distribution in _LIBRARIES.items()]
    return ", ".join(words)


def target_name(device: Device) -> str:
    """``cpu``, or the compute capability that machine code is for, e.g. ``cuda sm90``."""
    if device == "cpu":
        return "cpu"
    found = cuda.gpu()
    return f"cuda {found.capability if found else 'no GPU'}"


def _version_file() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    path = Path(spec.submodule_search_locations[0]) / "version.py"
    return path.read_text() if path.is_file() else ""


def _library(distribution: str) -> str:
    """Of NVIDIA's wheel, whose name may end in the CUDA version."""
    major = (torch_cuda() or "").partition(".")[0]
    for name in (distribution, f"{distribution}-cu{major}"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of the system"


@cache
def _instructions() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return tuple(name for name in _INSTRUCTIONS if name in flags)
