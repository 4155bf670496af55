"""What serving used while a load ran: GPU, power, processor; read beside the run.

GPU figures of a server on this machine come from the driver (NVML, package ``nvidia-ml-py``), else
from Triton's own metrics, which it renews every two seconds unless told otherwise. The processor
time is that of the server and the processes its models run in. What cannot be read is None, never
zero.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from enginegate.errors import ServerError
from enginegate.measurement import Resources
from enginegate.triton.gpu_memory import USED, GpuDriver
from enginegate.triton.metrics import Metrics, read_metrics
from enginegate.triton.server import Server
from enginegate.triton.supervised_process import cores, processor_s

# Often enough for a mean over a second, seldom enough not to be seen in the latencies.
_EVERY_S = 0.25
_ANSWER_S = 2.0


class GpuReading(NamedTuple):
    """The GPUs together at one moment.

    Attributes:
        utilisation: mean over the GPUs, 0 to 1; None when not reported, so are the others.
        energy_j: since the driver was loaded.
    """

    gpus: int
    utilisation: float | None
    memory_bytes: float | None
    power_w: float | None
    energy_j: float | None


ReadGpus = Callable[[], GpuReading | None]


@dataclass(slots=True)
class Usage:
    """What was read between `monitor_resources`'s start and its end.

    Attributes:
        lasted_s: of the block.
        cores: processor time over wall time; None when the server's processes are not known.
        model_bytes: GPU memory that the model takes; None when not known.
    """

    readings: list[GpuReading] = field(default_factory=list)
    lasted_s: float = 0.0
    cores: float | None = None
    model_bytes: int | None = None

    def resources(
        self, *, completed: int, throughput_per_s: float, price_per_hour: float | None
    ) -> Resources:
        """As a measurement keeps them.

        Args:
            completed: requests answered in the block, warm-up included, as energy is.
            throughput_per_s: of the measured time.
            price_per_hour: of one GPU, or of the machine where there is none.
        """
        utilisation = _mean([reading.utilisation for reading in self.readings])
        memory_bytes = _mean([reading.memory_bytes for reading in self.readings])
        energy_j = self._energy_j()
        return Resources(
            gpu_utilisation=None if utilisation is None else min(max(utilisation, 0.0), 1.0),
            gpu_memory_bytes=None if memory_bytes is None else round(memory_bytes),
            gpu_model_bytes=self.model_bytes,
            gpu_power_w=_mean([reading.power_w for reading in self.readings]),
            server_cores=self.cores,
            joules_per_request=energy_j / completed if energy_j and completed else None,
            cost_per_million=self._cost(price_per_hour, throughput_per_s),
        )

    def _energy_j(self) -> float | None:
        """The counter's difference; where there is none, mean power times time."""
        counted = [r.energy_j for r in self.readings if r.energy_j is not None]
        if counted and counted[-1] > counted[0]:
            return counted[-1] - counted[0]
        power_w = _mean([reading.power_w for reading in self.readings])
        return None if power_w is None else power_w * self.lasted_s

    def _cost(self, price_per_hour: float | None, throughput_per_s: float) -> float | None:
        if price_per_hour is None or throughput_per_s <= 0.0:
            return None
        machines = max([1, *(reading.gpus for reading in self.readings)])
        return price_per_hour * machines / 3600.0 / throughput_per_s * 1e6


@contextmanager
def monitor_resources(server: Server, *, gpu: bool, gpus: Sequence[int] = ()) -> Iterator[Usage]:
    """Read what the server uses while the block runs.

    Args:
        server: its metrics address and process are used where they are known.
        gpu: whether the model runs on GPUs.
        gpus: which of them; empty: every one that the server sees.
    """
    usage, read = Usage(), _gpu_reader(server, gpus) if gpu else None
    before, started_s = processor_s(server.pid), time.monotonic()
    with _repeating(lambda: _note(usage, read)) if read else nullcontext():
        yield usage
    usage.lasted_s = time.monotonic() - started_s
    usage.cores = cores(before, processor_s(server.pid), usage.lasted_s)


def gpus_of(metrics: Metrics) -> GpuReading | None:
    """What Triton says of its GPUs, in one reading of its endpoint; None when of none."""
    memory = _values(metrics, USED)
    if not memory:
        return None
    return GpuReading(
        gpus=len(memory),
        utilisation=_mean(_values(metrics, "nv_gpu_utilization")),
        memory_bytes=sum(memory),
        power_w=_sum(_values(metrics, "nv_gpu_power_usage")),
        energy_j=_sum(_values(metrics, "nv_energy_consumption")),
    )


def _values(metrics: Metrics, name: str) -> list[float]:
    # A GPU that cannot tell is NaN there.
    return [series.value for series in metrics.matching(name) if math.isfinite(series.value)]


def _sum(values: list[float]) -> float | None:
    return sum(values) if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _note(usage: Usage, read: ReadGpus) -> None:
    with suppress(ServerError):
        reading = read()
        if reading is not None:
            usage.readings.append(reading)


@contextmanager
def _repeating(note: Callable[[], None]) -> Iterator[None]:
    """Call it at once, then every quarter of a second, and once more at the end."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(_EVERY_S):
            note()

    note()
    thread = threading.Thread(target=repeat, name="resources", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        note()


def _gpu_reader(server: Server, gpus: Sequence[int]) -> ReadGpus | None:
    """Whatever answers; None when nothing knows of the GPUs that are meant."""
    driver = None if server.pid is None else GpuDriver.open(tuple(gpus))
    if driver is not None:
        return partial(_of_driver, driver)
    if server.metrics is None:
        return None
    address = server.metrics
    with suppress(ServerError):
        found = gpus_of(read_metrics(address, timeout_s=_ANSWER_S))
        # Metrics have no GPU numbers, so some of several cannot be told from the others.
        if found is not None and len(gpus) in {0, found.gpus}:
            return lambda: gpus_of(read_metrics(address, timeout_s=_ANSWER_S))
    return None


def _of_driver(driver: GpuDriver) -> GpuReading:
    """Now, over the GPUs together."""
    rates = driver.each("nvmlDeviceGetUtilizationRates")
    return GpuReading(
        gpus=len(driver.handles),
        utilisation=_mean([rate.gpu / 100.0 for rate in rates]),
        memory_bytes=_sum([float(info.used) for info in driver.each("nvmlDeviceGetMemoryInfo")]),
        power_w=_sum([milli / 1e3 for milli in driver.each("nvmlDeviceGetPowerUsage")]),
        energy_j=_sum([m / 1e3 for m in driver.each("nvmlDeviceGetTotalEnergyConsumption")]),
    )
