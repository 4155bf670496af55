"""What is published: everything a release is made of, or a release that exists elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.candidate import Candidate, FileDigest, Sha256, TensorSpec
from enginegate.decision import Decision, Promise, Release
from enginegate.repository.store.golden import Golden
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from enginegate.triton.config import Config


@dataclass(frozen=True, slots=True)
class PartPackage:
    """One composing model of an ensemble before it is published.

    Attributes:
        name: as Triton knows it, e.g. ``digits.preprocess``.
        config: under that name, without versions.
        files: path in the version folder -> file to copy.
        approved: digests that some of them must have.
        golden: samples with validated answers of this model alone.
    """

    name: str
    config: Config
    files: Mapping[str, Path]
    approved: Mapping[str, FileDigest] = field(default_factory=dict)
    golden: Golden | None = None
    golden_max_abs_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Package:
    """Everything a release is made of; the engine's digest is the one that was approved.

    Attributes:
        files: name in the version folder -> file to copy.
        approved: digests that the engine's own files must have, by name in the version folder.
        golden: samples with the validated engine's answers.
        golden_max_abs_error: how far a live answer may be from them.
        options: Triton settings besides batching and instances.
        settings: backend settings with which it runs the engine as it was validated.
        gpu_bytes: memory that it took of the fullest GPU when it was benchmarked; None: not known.
        cold_start_s: from the load call to the first answer, in its benchmark; None: not known.
        builder: library and version that built the engine; empty: not known.
        version_compatible: whether later versions of that library load it too.
        ensemble: the model's configuration when it is made of several: then the engine is one of
            the ``parts``, ``files`` is empty, and inputs and outputs are the ensemble's.
        device: the kind of device that the engine is for; empty: the policy names none.
        further: the same release for other kinds of device.
    """

    model: str
    model_uri: str
    candidate: Candidate
    engine_sha256: Sha256
    approved: dict[str, FileDigest]
    files: dict[str, Path]
    backend: str
    gpu: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    serving: ServingConfig
    golden: Golden
    golden_max_abs_error: float
    scorecard_sha256: Sha256
    decision: Decision
    promise: Promise
    further_decisions: tuple[Decision, ...] = ()
    options: ServingOptions = field(default_factory=ServingOptions)
    settings: BackendSettings = field(default_factory=BackendSettings)
    gpu_bytes: int | None = None
    cold_start_s: float | None = None
    builder: str = ""
    version_compatible: bool = False
    ensemble: Config | None = None
    parts: tuple[PartPackage, ...] = ()
    device: str = ""
    further: tuple["Package", ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device that it has engines for; empty: the policy names none."""
        return tuple(each.device for each in (self, *self.further) if each.device)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The models beside its own that it brings in."""
        return tuple(part.name for part in self.parts)


@dataclass(frozen=True, slots=True)
class ImportedRelease:
    """A release of another repository, number and digest included.

    Attributes:
        root: where its files are, laid out as in a live repository.
        device: kind of device of the server that it is for; empty: the policy names none.
    """

    release: Release
    root: Path
    device: str = ""

    @property
    def devices(self) -> tuple[str, ...]:
        """The kinds of device that it has engines for."""
        return self.release.devices

    @property
    def model(self) -> str:
        return self.release.model

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.release.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.release.outputs

    @property
    def part_names(self) -> tuple[str, ...]:
        """The models beside its own that it brings in."""
        return tuple(part.name for part in self.release.engine.parts)
