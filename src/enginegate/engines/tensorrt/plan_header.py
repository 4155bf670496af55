"""Which TensorRT wrote a plan, read from its first bytes: loading one to ask may crash.

NVIDIA's trtexec --getPlanVersionOnly reads the same bytes (samples/common/sampleEngines.cpp);
that TensorRT-RTX keeps its version at the same offset was observed.
"""

import re
from pathlib import Path

from enginegate.errors import ModelError

_LENGTH = 28
_LIBRARIES = {b"ftrt": "tensorrt", b"vtrt": "tensorrt_rtx"}
_PARTS = 4
# Which tag of NVIDIA's TensorRT and tritonserver containers carries which version. NVIDIA's release
# pages do not say; these come from public scans and notes of the images. So a hint, no more.
_CONTAINERS = {
    "10.9": "25.03",
    "10.11": "25.06",
    "10.14": "25.12",
    "10.16.1.11": "26.05",
    "10.16": "26.03",
    "11.0": "26.06",
    "11.1": "26.07",
    "11.2": "26.08",
}


def plan_info(path: Path) -> str:
    """Library and four-part version, for example ``tensorrt_rtx 1.7.1.116``.

    Raises:
        ModelError: the file cannot be read, or is not a plan of a known layout.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_LENGTH)
    except OSError as error:
        raise ModelError(f"Cannot read the plan {path}: {error.strerror}.") from error
    library = _LIBRARIES.get(header[:4])
    if len(header) < _LENGTH or library is None or any(header[4:8]):
        raise ModelError(
            f"{path} is not a TensorRT plan (it begins with {header[:8].hex(' ') or 'nothing'}), "
            "or its layout is newer than this program knows. Build the engine again."
        )
    return f"{library} {'.'.join(str(part) for part in header[24:28])}"


def check_plan(path: Path, server_tensorrt: str, *, version_compatible: bool = False) -> str:
    """The plan's library and version, when a server with this TensorRT version will load it.

    Args:
        server_tensorrt: four-part version of the server's TensorRT, e.g. ``11.0.0.114``.
        version_compatible: whether the plan was built so, and the server started with
            ``--backend-config=tensorrt,version-compatible=true``; then older plans load, too.

    Raises:
        ModelError: the server would refuse the plan; names both versions, and the container to
            build in. Or the server's version is not of four parts.
    """
    found = plan_info(path)
    library, version = found.split(" ")
    if not re.fullmatch(r"\d+(\.\d+){3}", server_tensorrt):
        raise ModelError(
            f"{server_tensorrt!r} is not a TensorRT version of four parts. Read it from the "
            "server's image: the banner of trtexec, or dpkg -l on libnvinfer."
        )
    if library != "tensorrt":
        raise ModelError(
            f"{path} was built by {found}; Triton's TensorRT backend loads plans of the full "
            f"TensorRT only, and the server has {server_tensorrt}. Build it with "
            "'enginegate[tensorrt]' on the GPU that serves."
        )
    if version == server_tensorrt or (version_compatible and _older(version, server_tensorrt)):
        return found
    raise ModelError(
        f"{path} was built by TensorRT {version}; the server has {server_tensorrt}, which will not "
        f"load it. Build it in {_container(server_tensorrt)}, or serve it from "
        f"{_container(version)}."
    )


def _older(version: str, server: str) -> bool:
    return tuple(map(int, version.split("."))) < tuple(map(int, server.split(".")))


def _container(version: str) -> str:
    parts = version.split(".")
    names = (".".join(parts[:count]) for count in range(_PARTS, 1, -1))
    tag = next((_CONTAINERS[name] for name in names if name in _CONTAINERS), None)
    if tag is None:
        return f"the container that carries TensorRT {version} (its release notes say which)"
    return f"the {tag}-py3 container (TensorRT {version}, as far as is known)"
