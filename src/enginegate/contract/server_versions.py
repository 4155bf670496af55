"""Which TensorRT and which driver a server has, and which it will have when it starts again.

A plan loads in the very TensorRT that built it. Of a server on this machine, its process says what
is loaded and the folder of that library what is installed by now; an upgrade shows there before
anything is restarted. Of any other server only Triton's version is known, and what its images had.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.gpu_memory import LOCAL, GpuDriver

# Triton's version -> TensorRT in NVIDIA's -py3 images. NVIDIA's release pages do not say; these
# come from public scans and notes of the images. So a hint, no more.
IMAGES = {
    "2.56": "10.9",
    "2.57": "10.9",
    "2.59": "10.11",
    "2.65": "10.14",
    "2.67": "10.16",
    "2.69": "10.16.1.11",
    "2.70": "11.0",
    "2.71": "11.1.0.106",
    "2.72": "11.2.1.2",
}
_TENSORRT = "libnvinfer.so"
_DRIVER_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
_DRIVER = "libcuda.so"
_LOADED_DRIVER = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")
_VERSION = re.compile(r"\.so\.(\d+(?:\.\d+)*)$")


@dataclass(frozen=True, slots=True)
class ServerVersions:
    """What a server has; every part is empty where it is not known.

    Attributes:
        address: of the server.
        triton: its version, e.g. 2.51.0.
        tensorrt: that its process has loaded, as far as the library's file name says.
        installed_tensorrt: that it will load when it starts again.
        driver: that the kernel has loaded.
        installed_driver: whose libraries a new process gets.
    """

    address: str
    triton: str = ""
    tensorrt: str = ""
    installed_tensorrt: str = ""
    driver: str = ""
    installed_driver: str = ""

    @property
    def usual_tensorrt(self) -> str:
        """What NVIDIA's images with this Triton had, as far as is known."""
        return IMAGES.get(".".join(self.triton.split(".")[:2]), "")


def read_versions(addresses: LiveAddresses, *, root: Path = Path("/")) -> ServerVersions:
    """Ask a server, and look at its process where it runs on this machine.

    Args:
        addresses: where it listens, with the number of its process if that is known.
        root: of the file system that has ``/proc`` and the libraries.

    Raises:
        ServerError: it does not answer.
    """
    with TritonClient(addresses.grpc) as client:
        triton = client.metadata().version
    if addresses.grpc.rpartition(":")[0] not in LOCAL:
        return ServerVersions(addresses.grpc, triton)
    tensorrt = installed = ""
    process = addresses.pid if addresses.pid is not None else _only_server(root)
    library = _mapped(process, root) if process is not None else None
    if process is not None and library is not None:
        tensorrt = _version_in(library.name.removesuffix(" (deleted)"))
        files = _files_of(process, root)
        installed = _installed(files / library.parent.relative_to("/"), _TENSORRT)
    return ServerVersions(
        address=addresses.grpc,
        triton=triton,
        tensorrt=tensorrt,
        installed_tensorrt=installed,
        driver=_loaded_driver(root),
        installed_driver=_installed_driver(root),
    )


def _only_server(root: Path) -> int | None:
    """The number of the only Triton that runs here; None where there is none, or several."""
    found = [int(path.parent.name) for path in _commands(root)]
    return found[0] if len(found) == 1 else None


def _commands(root: Path) -> Iterator[Path]:
    for path in (root / "proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == "tritonserver":
                yield path


def _mapped(process: int, root: Path) -> Path | None:
    """The TensorRT library in a process, as its memory map names it: `` (deleted)`` if replaced."""
    try:
        lines = (root / "proc" / str(process) / "maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line[line.index("/") :] for line in lines if "/" in line)
    return next((Path(path) for path in paths if Path(path).name.startswith(_TENSORRT)), None)


def _files_of(process: int, root: Path) -> Path:
    """The file system as a process sees it: in a container the same path is another file."""
    own = root / "proc" / str(process) / "root"
    return own if os.path.lexists(own) else root


def _installed(folder: Path, library: str) -> str:
    """The newest version of a library in a folder, of the longest: links have shorter ones."""
    try:
        versions = [_version_in(path.name) for path in folder.glob(f"{library}.*")]
    except OSError:
        return ""
    whole = max((version.count(".") for version in versions), default=0)
    return max(
        (version for version in versions if version.count(".") == whole), key=_parts, default=""
    )


def _loaded_driver(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = _LOADED_DRIVER.search(text)
    return found[1] if found else ""


def _installed_driver(root: Path) -> str:
    """The driver that a new process gets: by NVML, which opens only where it fits the kernel's.

    An image may hold other files than those that the machine mounts into it, so they count only
    where NVML does not open; and a link to a first version, as every machine has it, says nothing.
    """
    driver = GpuDriver.open()
    if driver is not None:
        return driver.version()
    found = (_installed(root / each, _DRIVER) for each in _DRIVER_FOLDERS)
    return next((version for version in found if "." in version), "")


def _version_in(name: str) -> str:
    found = _VERSION.search(name)
    return found[1] if found else ""


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)
