"""What a benchmark measures, and where it keeps what it found."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginegate.candidate import Engine, Sha256
from enginegate.canonical import sha256_file
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.deploy import ServedModel
from enginegate.triton.store import Shelf


@dataclass(frozen=True, slots=True)
class Places:
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
    def shelf(self) -> Shelf:
        """Where measurements are kept."""
        return Shelf(self.results / "measurements", self.results / "latencies")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to measure.

    Attributes:
        files: path inside the version folder -> digest.
        options: what it is served with besides batching and instances.
    """

    model: ServedModel
    files: Mapping[str, Sha256]
    options: ServingOptions

    @classmethod
    def of(cls, model: ServedModel, engine: Engine, options: ServingOptions) -> "Subject":
        """An engine of the store, whose own files were checked against its manifest."""
        known = {engine.filename: engine.file, **engine.external}
        files = {
            name: known[path.name].sha256 if path.name in known else sha256_file(path)
            for name, path in model.files.items()
        }
        return cls(model, files, options)


@dataclass(frozen=True, slots=True)
class LiveSubject:
    """What is live, to be measured in turns with a candidate."""

    subject: Subject
    config: ServingConfig
    release: int
