"""Measurements kept by content: what was measured once is not measured again.

A measurement depends on what served (engine, files, server, options), on which machine, what was
sent and how, on the configuration and on the load; not on the SLO it is judged by. So a killed
search repeats nothing, and a moved SLO is decided from what was kept. The one exception: a run that
was ended early because *another* limit was decided is measured again where it leaves this one open.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from enginegate.atomic_io import mark_used, write_file
from enginegate.candidate import Sha256
from enginegate.errors import InputError, TamperedError
from enginegate.evidence import Outcome
from enginegate.measurement import LatencySample, Load, Measurement
from enginegate.measuring.measure import read_latency_sample
from enginegate.measuring.p99 import SequentialTest
from enginegate.measuring.raw_requests import read_raw_requests
from enginegate.measuring.validity import allowed_lateness_ms, lateness_decides
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.search.trial_runner import Measure
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions

# A run that lasted this share of its load was not ended early: the last gap may be long.
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
    """The backend's other settings; the same files may compute in another precision."""


@dataclass(frozen=True, slots=True)
class MeasurementCache:
    """Where measurements are kept; invalid ones are not.

    Attributes:
        folder: of the records, named by what they depend on.
        latencies: of the raw latencies, named by their digest.
    """

    folder: Path
    latencies: Path

    def measure_with(self, measure: Measure, key: CacheKey, *, limit_ms: float) -> Measure:
        """Measure only what is not kept.

        Args:
            measure: makes a measurement; it writes the raw latencies to ``latencies``.
            key: what it depends on.
            limit_ms: the SLO now, which decides whether a run that was ended early says enough.
        """

        def measure_cached(
            config: ServingConfig, load: Load, *, ends: SequentialTest | None = None
        ) -> LatencySample:
            deciding = {"setup": key.digest, "config": config.digest, "load": load.digest}
            path = self.folder / f"{sha256_bytes(canonical_json(deciding))}.json"
            # A damaged file is no measurement.
            with suppress(InputError, TamperedError):
                kept = read_latency_sample(Measurement.read(path), self.latencies)
                if self._decides(kept, load, ends, limit_ms):
                    mark_used(path)
                    mark_used(self.latencies / f"{kept.measurement.latencies_sha256}.npz")
                    return replace(kept, cached=True)
            made = measure(config, load, ends=ends)
            if not made.measurement.invalid:
                write_file(path, made.measurement.pretty_json())
            return made

        return measure_cached

    def _decides(
        self, kept: LatencySample, load: Load, ends: SequentialTest | None, limit_ms: float
    ) -> bool:
        """Whether a run says as much about this limit as a new one would.

        It went to its end, or was ended where this limit is decided too; and the generator's
        lateness, which may be less under a shorter limit, does not decide about it.
        """
        measurement = kept.measurement
        if measurement.late_p99_ms > allowed_lateness_ms(limit_ms):
            return False
        if measurement.sent_for_s < _WHOLE * load.duration_s:
            over = kept.over(limit_ms)
            if ends is None or ends.decide(len(kept.latencies_ms), over) is Outcome.INCONCLUSIVE:
                return False
        requests = read_raw_requests(self.latencies, measurement.latencies_sha256)
        return not lateness_decides(requests, limit_ms)
