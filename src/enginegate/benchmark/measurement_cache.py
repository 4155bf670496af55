"""Measurements kept by content: what was measured once is not measured again.

A measurement depends on what served (engine, files, server, options), on which machine, what was
sent and how, on the configuration and on the load; not on the SLO it is judged by. So a killed
search repeats nothing, and a moved SLO is decided from what was kept. The one exception: a run that
was ended early because *another* limit was decided is measured again where it leaves this one open.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from enginegate.atomic_io import write_file
from enginegate.candidate import Sha256
from enginegate.errors import InputError, TamperedError
from enginegate.evidence import Outcome
from enginegate.measurement import LatencySample, Load, Measurement
from enginegate.measuring.measure import read_sample
from enginegate.measuring.p99 import SequentialTest
from enginegate.measuring.raw_requests import read_requests
from enginegate.measuring.validity import allowed_lateness_ms, lateness_decides
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.search.trial_runner import Measure
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions

_WHOLE = 0.95


class CacheKey(Record):
    """Everything a measurement depends on besides the configuration and the load."""

    files: dict[str, Sha256]
    """What is served: path inside the version folder -> digest."""
    backend: str
    server: str
    """Triton: version and where it came from."""
    machine: str
    options: ServingOptions
    traffic: Sha256
    sending: str
    """Protocol, shared memory and driver."""
    gpu: bool = False
    """Whether instances are on GPUs."""
    settings: BackendSettings = Field(default_factory=BackendSettings)
    """What the backend is told besides; the same files may compute in another precision."""


@dataclass(frozen=True, slots=True)
class MeasurementCache:
    """Where measurements are kept.

    Attributes:
        folder: of the records, named by what they depend on.
        latencies: of the raw latencies, named by their digest.
    """

    folder: Path
    latencies: Path

    def find(self, key: Sha256) -> LatencySample | None:
        """What was kept under a key; None when there is nothing, or it is damaged."""
        with suppress(InputError, TamperedError):
            return read_sample(Measurement.read(self.folder / f"{key}.json"), self.latencies)
        return None

    def keep(self, key: Sha256, found: LatencySample) -> None:
        """Write a measurement; its raw latencies are in place already."""
        write_file(self.folder / f"{key}.json", found.measurement.pretty_json())


def measure_cached(
    measure: Measure,
    setup: CacheKey,
    shelf: MeasurementCache,
    *,
    limit_ms: float,
    reused: Callable[[], None] = lambda: None,
) -> Measure:
    """The same, but a valid measurement that was made before is returned instead of made.

    Args:
        measure: makes one; it writes the raw latencies to ``shelf.latencies``.
        setup: what it depends on.
        shelf: where measurements are kept; void ones are not.
        limit_ms: the SLO now, which decides whether a run that was ended early says enough.
        reused: called when nothing had to be measured.
    """

    def measured(
        config: ServingConfig, load: Load, *, ends: SequentialTest | None = None
    ) -> LatencySample:
        key = measurement_key(setup, config, load)
        found = shelf.find(key)
        if (
            found is not None
            and _says_enough(found, load, ends, limit_ms)
            and _of_the_server(found, shelf, limit_ms)
        ):
            reused()
            return replace(found, cached=True)
        made = measure(config, load, ends=ends)
        if not made.measurement.invalid:
            shelf.keep(key, made)
        return made

    return measured


def measurement_key(setup: CacheKey, config: ServingConfig, load: Load) -> Sha256:
    """Digest of everything one measurement depends on."""
    deciding = {
        "setup": setup.digest,
        "config": config.digest,
        "load": load.digest,
    }
    return sha256_bytes(canonical_json(deciding))


def _of_the_server(found: LatencySample, shelf: MeasurementCache, limit_ms: float) -> bool:
    """Whether the sender's lateness does not decide about this limit; it did not about another."""
    requests = read_requests(shelf.latencies, found.measurement.latencies_sha256)
    return not lateness_decides(requests, limit_ms)


def _says_enough(
    found: LatencySample, load: Load, ends: SequentialTest | None, limit_ms: float
) -> bool:
    """Whether a run went to its end, or was ended where this limit is decided too.

    The generator may be less late under a shorter limit, so that is looked at again too.
    """
    if found.measurement.late_p99_ms > allowed_lateness_ms(limit_ms):
        return False
    lasted_s = found.measurement.lasted_s
    if lasted_s is None or lasted_s >= _WHOLE * load.duration_s:
        return True
    if ends is None:
        return False
    decided = ends.decide(len(found.latencies_ms), found.over(limit_ms))
    return decided is not Outcome.INCONCLUSIVE
