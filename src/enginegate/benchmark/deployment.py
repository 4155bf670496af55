"""Puts one model on an embedded server, serves it in one configuration after another, takes it off.

A configuration travels with the load call, into the running server: no restart, and no file to
rewrite. Only for a server and a repository of our own: a live repository is changed elsewhere.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from enginegate.candidate import Engine, TensorSpec
from enginegate.data import Tensors
from enginegate.engines import ServedFiles
from enginegate.errors import NotLoadedError, ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen import perf_analyzer
from enginegate.loadgen.traffic import EarlyEnd, LoadResult, Traffic, Transport, run_load
from enginegate.measurement import ClosedLoad, Driver, Generator, LatencySample, Load
from enginegate.measuring.measure import RunConditions, measure, warmup_s
from enginegate.measuring.p99 import SequentialTest
from enginegate.measuring.pipeline_counts import PipelineCounts
from enginegate.measuring.resources import monitor_resources
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, model_config
from enginegate.triton.endpoint import LiveAddresses
from enginegate.triton.gpu_memory import GpuMemory, server_memory
from enginegate.triton.liveness import Liveness, monitor_liveness
from enginegate.triton.repository_files import (
    check_model_files,
    clear_model_folder,
    write_model_folder,
)
from enginegate.triton.server import Server
from enginegate.triton.types import Statistics

_log = logging.getLogger("enginegate.benchmark")
_SERVING = "enginegate.serving"
_VERSION = 1
_PRESENT = {"READY", "LOADING", "UNLOADING"}
_PLAIN = ServingOptions()
# How long a model may take to unload; a busy instance finishes its batch first.
_UNLOAD_S, _POLL_S = 30.0, 0.02
# A run does not end before that many requests: fewer give no percentiles worth keeping.
_FEWEST_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What it takes to serve an engine.

    Attributes:
        files: name in the version folder -> file to put there.
        settings: what the backend is given so that it runs the engine as it was validated.
        gpu: place instances on GPUs.
    """

    name: str
    backend: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: Mapping[str, Path]
    settings: BackendSettings = field(default_factory=BackendSettings)
    gpu: bool = False

    @classmethod
    def of(cls, name: str, engine: Engine, served: ServedFiles) -> "ServedModel":
        """An engine of the store under the name it is to have in Triton."""
        return cls(
            name=name,
            backend=served.backend,
            inputs=engine.inputs,
            outputs=engine.outputs,
            files=served.files,
            settings=served.settings,
            gpu=served.gpu,
        )

    def config(self, serving: ServingConfig, options: ServingOptions = _PLAIN) -> Config:
        """Its configuration under one way of serving, marked so that it can be recognised."""
        return model_config(
            name=self.name,
            inputs=self.inputs,
            outputs=self.outputs,
            serving=serving,
            backend=self.backend,
            parameters={_SERVING: _mark(serving, options)},
            versions=(_VERSION,),
            gpu=self.gpu,
            options=options,
            settings=self.settings,
        )

    def probe(self) -> Tensors:
        """One request of zeros; axes of no fixed size are 1."""
        return {
            spec.name: np.zeros([max(size, 1) for size in spec.shape], spec.dtype)
            for spec in self.inputs
        }


@dataclass(slots=True)
class DeployedModel:
    """A model whose files are in place on a server; nothing is loaded until `serve`."""

    server: Server
    client: TritonClient
    model: ServedModel
    load_timeout_s: float
    serving: ServingConfig | None = None
    options: ServingOptions = _PLAIN
    _taken: tuple[int, ...] = field(default=(), init=False)

    def memory(self) -> tuple[GpuMemory, ...]:
        """The memory of the server's GPUs now; empty for a model on the processor."""
        server = self.server
        if not self.model.gpu:
            return ()
        return server_memory(
            LiveAddresses(grpc=server.grpc, metrics=server.metrics, pid=server.pid)
        )

    def taken_since(self, before: tuple[GpuMemory, ...]) -> int | None:
        """What the model takes of the fullest GPU, in bytes; None where that is not known.

        Every call adds what changed since ``before`` to what earlier ones found, so that other
        models on the server count for nothing: they may change between, not during.
        """
        after = self.memory()
        if not after or len(before) != len(after):
            return None
        changes = [
            now.used_bytes - then.used_bytes for then, now in zip(before, after, strict=True)
        ]
        taken = self._taken or (0,) * len(changes)
        self._taken = tuple(sum(pair) for pair in zip(taken, changes, strict=True))
        return max(0, *self._taken)

    def serve(self, serving: ServingConfig, options: ServingOptions = _PLAIN) -> float | None:
        """Load the model in this configuration and prove that it is in force; warms it up.

        Returns:
            Seconds from the load call to the first answer; None when it was in force already.

        Raises:
            NotLoadedError: it did not load.
            ServerError: it does not answer, or something else is in force.
        """
        if (serving, options) == (self.serving, self.options):
            return None
        self.serving, name = None, self.model.name
        started_s = time.perf_counter()
        config = self.model.config(serving, options)
        try:
            self.client.load(name, config, timeout_s=self.load_timeout_s)
        except ServerError as error:
            raise NotLoadedError(str(error)) from error
        self.client.infer(name, self.model.probe(), timeout_s=self.load_timeout_s)
        cold_start_s = time.perf_counter() - started_s
        found, wanted = self.client.parameters(name).get(_SERVING), _mark(serving, options)
        if found != wanted or not self.client.model_ready(name, str(_VERSION)):
            raise ServerError(
                f"Triton at {self.client.address} said it loaded {name} ({serving}), but serves "
                f"configuration {found}, not {wanted}.\nSomebody else changes this server; "
                "use one of its own."
            )
        self.serving, self.options = serving, options
        return cold_start_s


@dataclass(frozen=True, slots=True)
class DeployedBenchmark:
    """Measures a deployment: `measure` is what a search calls.

    Attributes:
        traffic: made from real samples, for the model's name.
        folder: where raw latencies go.
        slo_p99_ms: sets how late the generator may be, and what a run that may end early is about.
        generator: what a do-nothing model showed of the generator; goes into every measurement.
        price_per_hour: of one GPU, or of the machine where there is none.
        options: what the model is served with besides the configuration.
        sending: how requests travel.
        driver: what sends; perf_analyzer cannot end early, and stops at the first failure.
        failures_counted: whether this program then sends the load again, and counts failures.
    """

    deployment: DeployedModel
    traffic: Traffic
    folder: Path
    slo_p99_ms: float
    generator: Generator = field(default_factory=Generator)
    price_per_hour: float | None = None
    options: ServingOptions = _PLAIN
    sending: Transport = field(default_factory=Transport)
    driver: Driver = "python"
    failures_counted: bool = False

    def measure(
        self, config: ServingConfig, load: Load | ClosedLoad, *, ends: SequentialTest | None = None
    ) -> LatencySample:
        """Serve one configuration under one load.

        Args:
            config: loaded first, unless it is in force.
            load: what is offered.
            ends: the run ends as soon as this test has decided about the SLO.

        Raises:
            ServerError: the model does not load, or the server died.
        """
        deployment, name = self.deployment, self.deployment.model.name
        with monitor_liveness(deployment.server) as liveness:
            memory = deployment.memory()
            cold_start_s = deployment.serve(config, self.options)
            if cold_start_s is None:
                before = deployment.client.statistics(name)
            else:
                # The load began them anew; the answer that proved it may not be counted yet.
                before = deployment.client.statistics_since(name, Statistics(), answers=1)
            gpu, pipeline = deployment.model.gpu, None
            if deployment.model.config(config).streams:
                pipeline = PipelineCounts.begin(deployment.server.metrics, name)
            with monitor_resources(deployment.server, gpu=gpu, gpus=config.gpus) as usage:
                result = self._send(load, ends, liveness)
            usage.model_bytes = deployment.taken_since(memory)
            if result.failed:
                deployment.server.check_alive()
            answered = len(result.latency_s) - result.failed
            counted = deployment.client.statistics_since(name, before, answers=answered)
            return measure(
                result,
                config,
                counted=pipeline.complete(counted) if pipeline else counted,
                folder=self.folder,
                slo_p99_ms=self.slo_p99_ms,
                conditions=RunConditions(usage, self.generator, self.price_per_hour, cold_start_s),
            )

    def _send(
        self, load: Load | ClosedLoad, ends: SequentialTest | None, liveness: Liveness
    ) -> LoadResult:
        server, sending = self.deployment.server, self.sending
        address = server.http if sending.protocol == "http" else server.grpc
        if address is None:
            raise ServerError(
                f"The HTTP address of the server at {server.grpc} is not known, so it cannot be "
                "asked over HTTP. Give it, or send over gRPC."
            )
        if self.driver == "perf_analyzer":
            try:
                return perf_analyzer.run_perf_analyzer(
                    address,
                    self.traffic,
                    load,
                    protocol=sending.protocol,
                    shared_memory=sending.shared_memory,
                )
            except ServerError as error:
                if not self.failures_counted:
                    raise
                server.check_alive()
                _log.info("sent again by this program, which counts failures: %s", error)
        early = EarlyEnd(
            self.slo_p99_ms / 1e3, warmup_s(load), _decided_by(ends, lambda: liveness.gone)
        )
        return run_load(
            address,
            self.traffic,
            load,
            ends=early,
            sending=replace(sending, control=sending.control or server.grpc),
        )


def _decided_by(
    test: SequentialTest | None, gone: Callable[[], bool]
) -> Callable[[int, int], bool]:
    """Whether a run may end: the test has decided, from enough to give percentiles too.

    Or the server has stopped, and nobody will answer.
    """

    def decided(requests: int, over: int) -> bool:
        if gone() or test is None:
            return gone()
        return (
            requests >= _FEWEST_REQUESTS and test.decide(requests, over) is not Outcome.INCONCLUSIVE
        )

    return decided


def _mark(serving: ServingConfig, options: ServingOptions) -> str:
    """What the loaded configuration carries, so that it can be recognised."""
    return serving.digest if options == _PLAIN else f"{serving.digest}+{options.digest}"


@contextmanager
def deploy(
    server: Server, model: ServedModel, *, load_timeout_s: float = 120.0
) -> Iterator[DeployedModel]:
    """Place a model's files in an embedded server's repository; unload and remove them at the end.

    Raises:
        ModelError: a file is missing.
        ServerError: the server is not ours to change.
    """
    if server.repository is None:
        raise ServerError(
            f"The server at {server.grpc} was not started here, so models cannot be placed in its "
            "repository. Benchmark on an embedded server."
        )
    check_model_files(model.name, model.backend, model.files)
    folder = server.repository / model.name
    clear_model_folder(folder)
    with server.client() as client:
        try:
            write_model_folder(model.files, folder, version=_VERSION)
            yield DeployedModel(server, client, model, load_timeout_s)
        finally:
            _take_away(client, model.name)
            shutil.rmtree(folder, ignore_errors=True)


def _take_away(client: TritonClient, name: str) -> None:
    """Unload and wait until it is gone; a dead server has nothing to unload."""
    deadline = time.monotonic() + _UNLOAD_S
    with suppress(ServerError):
        client.unload(name, timeout_s=_UNLOAD_S)
        while any(row.name == name and row.state in _PRESENT for row in client.index()):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)
