"""What sending alone costs: the generator against a model that does nothing, found out once.

The model's time is Triton's and Python's own, well below a millisecond, so what is measured here is
the floor under every latency, and the highest rate that this generator keeps up with here and now.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.candidate import TensorSpec
from enginegate.errors import EnginegateError
from enginegate.loadgen.perf_analyzer import run_perf_analyzer
from enginegate.loadgen.traffic import LoadResult, Traffic, Transport, run_load
from enginegate.measurement import TIMERS_MS, Driver, Generator, Load
from enginegate.measuring.p99 import nearest_rank
from enginegate.measuring.validity import MIN_ACHIEVED
from enginegate.records import canonical_json, sha256_bytes
from enginegate.serving import ServingConfig
from enginegate.triton.server import Server
from enginegate.workspace import remembered

_NAME = "enginegate_null"
# Far more than wait at any rate that is tried, so that the model itself is never the limit.
_BATCH = 64
# One answers 20,000 requests a second or more; each is a process that takes time to start.
_MOST_INSTANCES, _CORES_AN_INSTANCE = 4, 4
# A second has enough requests for a p99 at the lowest rates; three of them are little of a budget.
_TRIAL_S, _BUDGET_S = 1.0, 3.0
_WARMUP_S = 0.2
# Factor to the next rate after one that was not kept up with: from the top to a fifth in three.
_LESS = 0.6
_LEAST_PER_S = 50.0
# One that fell short of the highest rate may have met a bad moment.
_ATTEMPTS = 2
# How long one that fell short is believed by this process: about a qualification of many
# candidates. Longer trusts a busy moment for too many of them, shorter costs each ten seconds.
_RECENT_S = 900.0
_RECENT: dict[Path, tuple[float, Generator]] = {}


@dataclass(frozen=True, slots=True)
class GeneratorBaseline:
    """What sending alone costs, measured once for one machine, server and way of sending.

    Attributes:
        up_to_per_s: the highest rate that will be offered.
        driver: who sends.
        conditions: what else the result is valid for, e.g. machine and server.
        folder: where results are kept.
        warn: called with the reason where there is none.
    """

    sending: Transport
    up_to_per_s: float
    conditions: tuple[str, ...]
    folder: Path
    warn: Callable[[str], None]
    driver: Driver = "python"

    def measure(self, server: Server) -> Generator:
        """What sending alone costs, and the highest rate that was kept up with.

        One that did not make every rate may have met a bad moment: it is made again at once, and
        kept for a while only, so that a qualification of many candidates does not pay for it with
        each. Without one (no Python backend, a model that fails) nothing is known, which is no
        reason not to measure.
        """
        driver = [] if self.driver == "python" else [self.driver]
        key = sha256_bytes(canonical_json([*self.conditions, self.up_to_per_s, *driver]))
        path = self.folder / f"{key}.json"
        if path in _RECENT and time.monotonic() - _RECENT[path][0] < _RECENT_S:
            return _RECENT[path][1]
        try:
            found = remembered(
                path,
                Generator,
                lambda: self._best_of_attempts(server),
                worth_keeping=self._made_all,
            )
        except EnginegateError as error:
            self.warn(f"the generator was not calibrated: {error}")
            return Generator(driver=self.driver)
        if not self._made_all(found):
            _RECENT[path] = time.monotonic(), found
        return found

    def for_measurements(self, baseline: Generator) -> Generator:
        """Without the rate limit where it is short of every rate: then it is only a note.

        Each measurement says itself how late its requests were.
        """
        if self._made_all(baseline):
            return baseline
        return baseline.model_copy(update={"trusted_per_s": None})

    def _best_of_attempts(self, server: Server) -> Generator:
        made: list[Generator] = []
        while len(made) < _ATTEMPTS and not (made and self._made_all(made[-1])):
            made.append(
                calibrate(
                    server,
                    sending=self.sending,
                    up_to_per_s=self.up_to_per_s,
                    driver=self.driver,
                )
            )
        return max(made, key=lambda baseline: baseline.trusted_per_s or 0.0)

    def _made_all(self, baseline: Generator) -> bool:
        return (baseline.trusted_per_s or 0.0) >= self.up_to_per_s


def best_driver(ours: Generator, up_to_per_s: float, theirs: Callable[[], Generator]) -> Generator:
    """Who sends: this program, unless it falls short and the other was shown to send more.

    Args:
        ours: this program's baseline.
        up_to_per_s: the highest rate that will be offered.
        theirs: measures the other's baseline; called only where ours falls short.
    """
    reached = ours.trusted_per_s or 0.0
    if reached >= up_to_per_s:
        return ours
    other = theirs()
    return other if (other.trusted_per_s or 0.0) > reached else ours


def calibrate(
    server: Server,
    *,
    sending: Transport,
    up_to_per_s: float,
    budget_s: float = _BUDGET_S,
    driver: Driver = "python",
) -> Generator:
    """Send to a do-nothing model, at the rate asked for and, while that is too much, at lower ones.

    Args:
        server: an embedded server; the model is placed on it, loaded, and taken away again.
        sending: how requests travel, as in the measurements that this stands beside.
        up_to_per_s: the highest rate that will be offered.
        driver: who sends.
        budget_s: for sending; loading the model takes a second or two more.

    Returns:
        ``null_p50_ms`` and ``null_p99_ms`` at the highest rate it kept up with (sent at 99 % of it
        or more, p99 of lateness less than 5 ms, none failed), which is ``trusted_per_s``. If it
        kept up with none, 0 and the latencies of the lowest that was tried.

    Raises:
        ServerError: the server is not ours to change, or the model does not load.
    """
    address = server.http if sending.protocol == "http" and server.http else server.grpc
    traffic = Traffic.of(_NAME, [{"x": np.zeros((1, 64), np.uint8)}])
    transport = replace(sending, control=server.grpc)

    def send(rate_per_s: float, duration_s: float) -> LoadResult:
        load = Load(rate_per_s=rate_per_s, duration_s=duration_s, seed=0)
        if driver == "perf_analyzer":
            return run_perf_analyzer(
                address,
                traffic,
                load,
                protocol=sending.protocol,
                shared_memory=sending.shared_memory,
            )
        return run_load(address, traffic, load, sending=transport)

    with deploy(server, do_nothing()) as deployment:
        instances = max(1, min(_MOST_INSTANCES, len(os.sched_getaffinity(0)) // _CORES_AN_INSTANCE))
        deployment.serve(
            ServingConfig(max_batch_size=_BATCH, max_queue_delay_us=0, instances=instances)
        )
        send(_LEAST_PER_S, _WARMUP_S)
        return _highest(send, up_to_per_s, budget_s)


def _highest(
    send: Callable[[float, float], LoadResult], rate_per_s: float, budget_s: float
) -> Generator:
    """Lower the rate until it is kept up with, or the time is spent."""
    end_s = time.monotonic() + budget_s
    while True:
        result = send(rate_per_s, _TRIAL_S)
        kept_up, lower = _kept_up(result), rate_per_s * _LESS
        if kept_up or lower < _LEAST_PER_S or time.monotonic() + _TRIAL_S > end_s:
            return _baseline(result, rate_per_s if kept_up else 0.0)
        rate_per_s = lower


def _kept_up(result: LoadResult) -> bool:
    return (
        result.failed == 0
        and result.achieved_share >= MIN_ACHIEVED
        and len(result.due_s) > 0
        and nearest_rank(result.late_s) * 1e3 < TIMERS_MS
    )


def _baseline(result: LoadResult, trusted_per_s: float) -> Generator:
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
