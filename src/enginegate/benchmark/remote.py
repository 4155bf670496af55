"""Measures a model on a server that somebody else runs, as it is configured there."""

import math
from dataclasses import dataclass
from pathlib import Path

from enginegate.errors import ServerError
from enginegate.loadgen import perf_analyzer
from enginegate.loadgen.traffic import EarlyEnd, Traffic, run_load
from enginegate.measurement import ClosedLoad, Driver, LatencySample, Load
from enginegate.measuring.measure import measure
from enginegate.measuring.pipeline_counts import PipelineCounts
from enginegate.triton.config import Config
from enginegate.triton.liveness import monitor_liveness
from enginegate.triton.server import Server, connect


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that is being served; nothing about it or its server is changed.

    Attributes:
        config: as its server reports it.
    """

    server: Server
    config: Config

    @property
    def name(self) -> str:
        """As its server knows it."""
        return self.config.name

    def measure(
        self,
        traffic: Traffic,
        load: Load | ClosedLoad,
        *,
        folder: Path,
        slo_p99_ms: float,
        driver: Driver = "python",
    ) -> LatencySample:
        """One load over gRPC against whatever configuration is in force.

        What a do-nothing model would show is not known: it cannot be put there. Other clients of
        the model are in the server's counters.

        Args:
            traffic: for this model's name.
            load: what is offered.
            folder: where raw latencies go.
            slo_p99_ms: sets how late the generator may be.
            driver: what sends.

        Raises:
            ServerError: the server is gone.
        """
        with monitor_liveness(self.server) as liveness, self.server.client() as client:
            before, pipeline = client.statistics(self.name), None
            if self.config.streams:
                pipeline = PipelineCounts.begin(self.server.metrics, self.name)
            if driver == "perf_analyzer":
                result = perf_analyzer.run_perf_analyzer(self.server.grpc, traffic, load)
            else:
                # It ends early only where the server is gone and nobody will answer.
                early = EarlyEnd(math.inf, 0.0, lambda _requests, _over: liveness.gone)
                result = run_load(self.server.grpc, traffic, load, ends=early)
            if result.failed:
                self.server.check_alive()
            answered = len(result.latency_s) - result.failed
            counted = client.statistics_since(self.name, before, answers=answered)
            if pipeline is not None:
                counted = pipeline.complete(counted)
        return measure(
            result,
            self.config.serving,
            counted=counted,
            folder=folder,
            slo_p99_ms=slo_p99_ms,
        )


def remote_model(address: str, name: str) -> RemoteModel:
    """The model of that name at a running server's gRPC ``HOST:PORT``.

    Raises:
        ServerError: nothing answers there, or the model is not ready; lists those that are.
    """
    server = connect(address)
    with server.client() as client:
        if not client.model_ready(name):
            ready = sorted({row.name for row in client.index() if row.ready})
            raise ServerError(
                f"The server at {address} does not serve {name!r}.\n"
                f"Ready there: {', '.join(ready) or 'no model'}. Name one with --model."
            )
        return RemoteModel(server, client.config(name))
