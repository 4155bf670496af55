"""Which of Triton's own backends a server has, and which of them serves an engine.

An installation on this machine has a folder for each. Triton's protocol cannot list them, so a
running server is asked to load a broken model of that backend: its error message tells.
"""

import uuid
from contextlib import suppress
from typing import Literal

from enginegate.candidate import TensorSpec
from enginegate.engine_kinds import native_backends
from enginegate.errors import ModelError, ServerError
from enginegate.serving import ServingConfig
from enginegate.triton.client import TritonClient
from enginegate.triton.config import model_config, opened_file
from enginegate.triton.install import TritonInstall

# Triton 2.51: "unable to find backend library for backend 'tensorrt', try specifying runtime …"
_ABSENT = "unable to find backend library"
_REFUSES = "explicit model load / unload is not allowed"
_PROBE_S = 60.0
_WORKING_MODEL = b"class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
_TENSOR = TensorSpec(name="x", dtype="float32", shape=(-1, 1))
Wanted = Literal["auto", "native", "python"]
_known: dict[tuple[str, str], bool] = {}


def install_has_backend(install: TritonInstall, backend: str) -> bool:
    """Whether a server that can be started here has a backend."""
    return backend in install.backend_names()


def server_has_backend(client: TritonClient, backend: str) -> bool:
    """Whether a running server has a backend; asked once for each server and backend.

    A model of that backend that serves already is proof enough. Otherwise a probe is loaded under
    a name of its own, which fails either way; a Python model under the same name, loaded and
    unloaded, then clears the failure that strict readiness would hold against the server.

    Raises:
        ModelError: the backend is none that this program serves engines with.
        ServerError: the server does not answer, or takes no load calls (it polls).
    """
    if backend not in native_backends():
        raise ModelError(
            f"{backend!r} is none of Triton's own backends that engines are served with: "
            f"{', '.join(native_backends())}."
        )
    server = client.metadata()
    key = (f"{server.name} at {client.address}", backend)
    if key not in _known:
        _known[key] = not _is_older(server.version, native_backends()[backend].since) and (
            _serves(client, backend) or _probe(client, backend)
        )
    return _known[key]


def server_backends(client: TritonClient) -> tuple[str, ...]:
    """Triton's own backends for engines that a running server has.

    Raises:
        ServerError: the server does not answer, or takes no load calls (it polls).
    """
    native = sorted(native_backends())
    return tuple(backend for backend in native if server_has_backend(client, backend))


def choose_backend(wanted: Wanted, backend: str, *, has: bool) -> str:
    """The backend to serve with.

    Args:
        wanted: what the policy says.
        backend: the engine kind's own in Triton, e.g. ``onnxruntime``.
        has: whether the server has that one.

    Raises:
        ModelError: the policy insists on a backend that the server does not have.
    """
    if wanted == "native" and not has:
        raise ModelError(
            f'The policy says serving.backend = "native", and the server has no {backend} backend. '
            'Use a server that has it (`enginegate doctor` lists what is there), or "auto" or '
            '"python".'
        )
    return backend if has and wanted != "python" else "python"


def backend_for(
    wanted: Wanted,
    backend: str | None,
    *,
    install: TritonInstall,
    live: TritonClient | None,
) -> str:
    """The backend to measure in and to serve in: the live server must have it too.

    Args:
        wanted: what the policy says.
        backend: the engine kind's own in Triton; None if it has none.
        install: the server that measures.
        live: the server that will serve; None, or one that takes no load calls, is believed to have
            what `install` has: a release that it cannot load is rolled back.

    Raises:
        ModelError: the policy insists on a backend that is not there.
    """
    if backend is None:
        if wanted == "native":
            raise ModelError(
                'The policy says serving.backend = "native", and Triton has no backend of its own '
                'for this engine kind. Use "auto" or "python".'
            )
        return "python"
    has = wanted != "python" and install_has_backend(install, backend)
    if has and live is not None:
        with suppress(ServerError):
            has = server_has_backend(live, backend)
    return choose_backend(wanted, backend, has=has)


def _is_older(version: str, since: tuple[int, int]) -> bool:
    """Whether a server's version, e.g. 2.51.0, is before one; a version without numbers is not."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    return len(numbers) == len(since) and tuple(numbers) < since


def _serves(client: TritonClient, backend: str) -> bool:
    ready = {row.name for row in client.index() if row.ready}
    return any(client.config(name).backend == backend for name in sorted(ready))


def _probe(client: TritonClient, backend: str) -> bool:
    name = f"enginegate-probe-{uuid.uuid4().hex[:12]}"
    try:
        _load(client, name, backend, opened_file(backend), b"no model")
    except ServerError as error:
        if _REFUSES in str(error) or not client.live():
            raise
        has_backend = _ABSENT not in str(error)
    else:
        has_backend = True
    with suppress(ServerError):
        _load(client, name, "python", "model.py", _WORKING_MODEL)
    with suppress(ServerError):
        client.unload(name)
    return has_backend


def _load(client: TritonClient, name: str, backend: str, filename: str, content: bytes) -> None:
    config = model_config(
        name=name,
        inputs=(_TENSOR,),
        outputs=(_TENSOR.model_copy(update={"name": "y"}),),
        serving=ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1),
        backend=backend,
        parameters={},
        warmup=False,
    )
    client.load(name, config, files={f"1/{filename}": content}, timeout_s=_PROBE_S)
