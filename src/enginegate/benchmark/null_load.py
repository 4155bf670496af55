"""What sending alone costs: the generator against a model that does nothing.

The model's time is Triton's and Python's own, well below a millisecond, so what is measured here is
the floor under every latency, and the highest rate that this generator keeps up with here and now.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from enginegate.benchmark.deployed import ServedModel, deployed
from enginegate.candidate import TensorSpec
from enginegate.loadgen.traffic import LoadResult, Traffic, Transport, run_load
from enginegate.measurement import Generator, Load
from enginegate.measuring.p99 import nearest_rank
from enginegate.serving import ServingConfig
from enginegate.triton.server import Server

_NAME = "enginegate_null"
_BATCH = 64
_PROBE_S = 1.0
_WARMUP_S = 0.2
_MIN_ACHIEVED = 0.99
_MAX_LATE_S = 0.005
_LESS = 0.6
_LEAST_PER_S = 50.0


def calibrate(
    server: Server,
    *,
    sending: Transport,
    up_to_per_s: float,
    budget_s: float = 6.0,
    payload_bytes: int = 64,
) -> Generator:
    """Send to a do-nothing model, at the rate asked for and, while that is too much, at lower ones.

    Args:
        server: an embedded server; the model is placed on it, loaded, and taken away again.
        sending: how requests travel, as in the measurements that this stands beside.
        up_to_per_s: the highest rate that will be offered.
        budget_s: for sending; loading the model takes a second or two more.
        payload_bytes: of each request's input.

    Returns:
        ``null_p50_ms`` and ``null_p99_ms`` at the highest rate it kept up with (sent at 99 % of it
        or more, 99 % of requests less than 5 ms late, none failed), which is ``trusted_per_s``. If
        it kept up with none, 0 and the latencies of the lowest that was tried.

    Raises:
        ServerError: the server is not ours to change, or the model does not load.
    """
    with deployed(server, do_nothing()) as deployment:
        deployment.serve(ServingConfig(max_batch_size=_BATCH, max_queue_delay_us=0, instances=1))
        sample = {"x": np.zeros((1, payload_bytes), np.uint8)}
        traffic = Traffic.of(_NAME, [sample])
        address = server.http if sending.protocol == "http" and server.http else server.grpc
        sending = replace(sending, control=server.grpc)

        def probe(rate_per_s: float, duration_s: float) -> LoadResult:
            load = Load(rate_per_s=rate_per_s, duration_s=duration_s, seed=0)
            return run_load(address, traffic, load, sending=sending)

        probe(_LEAST_PER_S, _WARMUP_S)
        return _highest(probe, up_to_per_s, budget_s)


def _highest(
    probe: Callable[[float, float], LoadResult], up_to_per_s: float, budget_s: float
) -> Generator:
    """Lower the rate until it is kept up with, or the time is spent."""
    end_s = time.monotonic() + budget_s
    rate_per_s = up_to_per_s
    while True:
        result = probe(rate_per_s, _PROBE_S)
        kept = _kept_up(result)
        lower = rate_per_s * _LESS
        if kept or lower < _LEAST_PER_S or time.monotonic() + _PROBE_S > end_s:
            return _said(result, rate_per_s if kept else 0.0)
        rate_per_s = lower


def _kept_up(result: LoadResult) -> bool:
    return (
        result.failed == 0
        and result.achieved_share >= _MIN_ACHIEVED
        and len(result.due_s) > 0
        and nearest_rank(result.late_s) < _MAX_LATE_S
    )


def _said(result: LoadResult, trusted_per_s: float) -> Generator:
    answered_ms = result.latency_s[np.isfinite(result.latency_s)] * 1e3
    known = len(answered_ms) > 0
    return result.generator.model_copy(
        update={
            "null_p50_ms": nearest_rank(answered_ms, 0.5) if known else None,
            "null_p99_ms": nearest_rank(answered_ms) if known else None,
            "trusted_per_s": trusted_per_s,
        }
    )


def do_nothing(name: str = _NAME) -> ServedModel:
    """The model, to be served under a name."""
    return ServedModel(
        name=name,
        backend="python",
        inputs=(TensorSpec(name="x", dtype="uint8", shape=(-1, -1)),),
        outputs=(TensorSpec(name="y", dtype="uint8", shape=(-1, -1)),),
        files={"model.py": Path(__file__).with_name("null_model.py")},
    )
