"""Puts one model on an embedded server, serves it in one configuration after another, takes it off.

A configuration travels with the load call, into the running server: no restart, and no file to
rewrite. Only for a server and a repository of our own: a live repository is changed elsewhere.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.candidate import Engine, TensorSpec
from enginegate.durable import new_folder
from enginegate.engines import Served
from enginegate.errors import ModelError, ServerError
from enginegate.evidence import Load, ServingConfig
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, model_config
from enginegate.triton.measure import Sampled, allowed_lateness_ms, measure
from enginegate.triton.server import Server
from enginegate.triton.traffic import Traffic, run_load

_SERVING = "enginegate.serving"
_VERSION = 1
_POLL_S = 0.02
_UNLOAD_S = 30.0
_MARK = ".scratch"
_PRESENT = {"READY", "LOADING", "UNLOADING"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What it takes to serve an engine.

    Attributes:
        files: name in the version folder -> file to put there.
        parameters: strings the backend's code reads.
        gpu: place instances on GPUs.
    """

    name: str
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: Mapping[str, Path]
    parameters: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False

    @classmethod
    def of(cls, name: str, engine: Engine, served: Served) -> "ServedModel":
        """An engine of the store under the name it is to have in Triton."""
        return cls(
            name=name,
            backend=served.backend,
            inputs=engine.inputs,
            outputs=engine.outputs,
            files=served.files,
            parameters=served.parameters,
            gpu=served.gpu,
        )

    def config(self, serving: ServingConfig) -> Config:
        """Its configuration under one way of serving, marked so that it can be recognised."""
        return model_config(
            name=self.name,
            inputs=self.inputs,
            outputs=self.outputs,
            serving=serving,
            backend=self.backend,
            parameters={**self.parameters, _SERVING: serving.digest},
            versions=(_VERSION,),
            gpu=self.gpu,
        )


@dataclass(slots=True)
class Deployment:
    """A model whose files are in place on a server; nothing is loaded until `serve`."""

    server: Server
    client: TritonClient
    model: ServedModel
    load_timeout_s: float
    serving: ServingConfig | None = None

    def serve(self, serving: ServingConfig) -> None:
        """Load the model in this configuration and prove that it is in force; warms it up.

        Raises:
            ServerError: it did not load, or something else is in force.
        """
        if serving == self.serving:
            return
        self.serving, name = None, self.model.name
        self.client.load(name, self.model.config(serving), timeout_s=self.load_timeout_s)
        found = self.client.parameters(name).get(_SERVING)
        if found != serving.digest or not self.client.model_ready(name, str(_VERSION)):
            raise ServerError(
                f"Triton at {self.client.address} said it loaded {name} ({serving}), but serves "
                f"configuration {found}, not {serving.digest}.\nSomebody else changes this server; "
                "use one of its own."
            )
        self.serving = serving


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures a deployment: `measure` is what a search calls.

    Attributes:
        traffic: made from real samples, for the model's name.
        folder: where raw latencies go.
        slo_p99_ms: sets how late the generator may be.
    """

    deployment: Deployment
    traffic: Traffic
    folder: Path
    slo_p99_ms: float

    def measure(self, serving: ServingConfig, load: Load) -> Sampled:
        """Serve one configuration under one load.

        Raises:
            ServerError: the model does not load, or the server died.
        """
        self.deployment.serve(serving)
        client, name = self.deployment.client, self.deployment.model.name
        before = client.statistics(name)
        result = run_load(client.address, self.traffic, load)
        if result.failed:
            self.deployment.server.check_alive()
        return measure(
            result,
            serving,
            counted=client.statistics(name) - before,
            folder=self.folder,
            late_limit_ms=allowed_lateness_ms(self.slo_p99_ms),
        )


@contextmanager
def deployed(
    server: Server, model: ServedModel, *, load_timeout_s: float = 120.0
) -> Iterator[Deployment]:
    """Place a model's files in an embedded server's repository; unload and remove them at the end.

    Raises:
        ModelError: a file is missing. Checked first: a Python model without its file makes the
            load hang for ever, and the server with it.
        ServerError: the server is not ours to change.
    """
    if server.repository is None:
        raise ServerError(
            f"The server at {server.grpc} was not started here, so models cannot be placed in its "
            "repository. Benchmark on an embedded server."
        )
    _check_files(model)
    folder = server.repository / model.name
    _clear(folder)
    with server.client() as client:
        try:
            _place(model, folder)
            yield Deployment(server, client, model, load_timeout_s)
        finally:
            _take_away(client, model.name)
            shutil.rmtree(folder, ignore_errors=True)


def _check_files(model: ServedModel) -> None:
    missing = [str(path) for path in model.files.values() if not path.is_file()]
    if missing or not model.files:
        raise ModelError(
            f"{model.name} cannot be served: "
            + (f"missing {', '.join(missing)}." if missing else "it has no files.")
            + "\nBuild the engine again."
        )
    if model.backend == "python" and "model.py" not in model.files:
        raise ModelError(f"{model.name} is for the Python backend, but has no model.py.")


def _clear(folder: Path) -> None:
    """Remove what a killed run left; never a model that somebody else put there."""
    if folder.is_dir() and not (folder / _MARK).is_file():
        raise ServerError(
            f"{folder} holds a model that was not put there for a benchmark.\n"
            "Give the embedded server a repository of its own."
        )
    shutil.rmtree(folder, ignore_errors=True)


def _place(model: ServedModel, folder: Path) -> None:
    with new_folder(folder) as staging:
        version = staging / str(_VERSION)
        for name, source in model.files.items():
            target = version / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source, target)
        (staging / _MARK).touch()


def _link_or_copy(source: Path, target: Path) -> None:
    """Engines are large and never written to, so a second name for the same bytes will do."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _take_away(client: TritonClient, name: str) -> None:
    """Unload and wait until it is gone; a dead server has nothing to unload."""
    deadline = time.monotonic() + _UNLOAD_S
    with suppress(ServerError):
        client.unload(name)
        while any(row.name == name and row.state in _PRESENT for row in client.index()):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)
