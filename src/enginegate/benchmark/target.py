"""What a benchmark measures, and where it keeps what it found."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginegate.benchmark.deployed import ServedModel
from enginegate.benchmark.measurement_cache import MeasurementCache
from enginegate.candidate import Engine, Sha256
from enginegate.records import sha256_file
from enginegate.serving import ServingConfig, ServingOptions


@dataclass(frozen=True, slots=True)
class BenchmarkPaths:
    """Folders of a benchmark.

    Attributes:
        repository: of the embedded server; emptied of what a benchmark put there.
        logs: of the server.
        results: where measurements, raw latencies and calibrations are kept.
    """

    repository: Path
    logs: Path
    results: Path

    @property
    def shelf(self) -> MeasurementCache:
        """Where measurements are kept."""
        return MeasurementCache(self.results / "measurements", self.results / "latencies")


@dataclass(frozen=True, slots=True)
class BenchmarkTarget:
    """A model to measure.

    Attributes:
        files: path inside the version folder -> digest.
        options: what it is served with besides batching and instances.
    """

    model: ServedModel
    files: Mapping[str, Sha256]
    options: ServingOptions

    @classmethod
    def of(cls, model: ServedModel, engine: Engine, options: ServingOptions) -> "BenchmarkTarget":
        """An engine of the store, whose own files were checked against its manifest."""
        known = {engine.filename: engine.file, **engine.external}
        files = {
            name: known[path.name].sha256 if path.name in known else sha256_file(path)
            for name, path in model.files.items()
        }
        return cls(model, files, options)


@dataclass(frozen=True, slots=True)
class LiveTargetPlaces:
    """What is live, to be measured in turns with a candidate."""

    subject: BenchmarkTarget
    config: ServingConfig
    release: int
