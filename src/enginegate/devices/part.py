"""One kind of device's part of a qualification, kept by content in the workspace.

A part is made once: whoever qualifies that kind finds what a worker, an earlier run or an import
left under the key of everything that decides it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from enginegate import __version__
from enginegate.atomic_io import mark_used, write_file
from enginegate.candidate import Candidate, Engine, FileDigest, Sha256, Unbuilt
from enginegate.content_store import ContentFolder
from enginegate.errors import InputError, TamperedError
from enginegate.evidence import DataDigests, DeviceEvidence, Outcome, Scorecard
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.workspace import Workspace

MANIFEST = "manifest.json"


class PartIdentity(Record):
    """Everything that decides what a part is about; its digest is the part's key."""

    device: str
    model: str
    model_uri: str
    policy_sha256: Sha256 = Field(description="of the whole policy, other kinds of device included")
    onnx_sha256: Sha256
    evaluation_sha256: Sha256
    calibration_sha256: Sha256 | None
    live_sha256: Sha256 | None = Field(
        default=None, description="of the live release, where candidates are compared with it"
    )
    version: str = Field(default=__version__, description="of enginegate")

    def differences(self, other: "PartIdentity") -> tuple[str, ...]:
        """Names of what differs in another part's identity."""
        mine, theirs = self.model_dump(), other.model_dump()
        return tuple(name for name, value in mine.items() if theirs[name] != value)


class StoredEngine(Record):
    """Where the store that built an engine has it: a folder by the digest of its plan."""

    folder: str = Field(pattern=r"^[0-9a-f]{64}$")
    manifest: FileDigest


class DeviceQualification(Record):
    """What `qualify` found out on one kind of device, and the engines that it is about."""

    schema_version: Literal[1] = 1
    identity: PartIdentity
    data: DataDigests
    evidence: DeviceEvidence
    engines: dict[str, StoredEngine] = Field(description="by candidate; those that were built")
    unbuilt: tuple[Unbuilt, ...] = ()
    results: dict[str, dict[str, str]] = Field(
        default={}, description="Great Expectations' results by candidate and name"
    )
    made_at: datetime
    made_by: str = Field(description="user and host")

    @property
    def device(self) -> str:
        """Its kind of device."""
        return self.identity.device

    def shown(self) -> Scorecard:
        """The part as a scorecard of its kind of device alone, which nobody can approve."""
        own = {name: getattr(self.evidence, name) for name in DeviceEvidence.model_fields}
        return Scorecard(
            **own,
            model=self.identity.model,
            model_uri=self.identity.model_uri,
            created_at=self.made_at,
            onnx_sha256=self.identity.onnx_sha256,
            policy_sha256=self.identity.policy_sha256,
            data=self.data,
        )

    @property
    def errored(self) -> bool:
        """Whether something broke meanwhile, so that another run may find out more."""
        outcomes = [each.outcome for each in self.evidence.verdicts]
        outcomes += [each.outcome for each in self.evidence.benchmarks]
        return Outcome.ERRORED in outcomes


@dataclass(frozen=True, slots=True)
class PartStore:
    """The parts of a workspace."""

    workspace: Workspace

    def file(self, key: Sha256) -> Path:
        """Where a part is kept."""
        return self.workspace.results / "devices" / f"{key}.json"

    def golden_file(self, golden: FileDigest) -> Path:
        """Samples with the answers that one engine gave on the device it was judged on.

        Kept by their own digest: equal engine bytes answer differently on another kind of device,
        and every part keeps its own answers.
        """
        return self.workspace.results / "golden" / f"{golden.sha256}.npz"

    def imported_folder(self, stored: StoredEngine) -> Path:
        """Where an engine that another machine built is kept.

        Two machines that build one plan make different manifests, and often different bytes. Each
        has a folder, so no import touches another part's engine or a build of this machine.
        """
        key = sha256_bytes(canonical_json([stored.folder, stored.manifest.sha256]))
        return self.workspace.engines / key

    def engine_folder(self, stored: StoredEngine) -> Path:
        """Where an engine of a part is: imported, or built in this workspace."""
        imported = self.imported_folder(stored)
        return imported if imported.is_dir() else self.workspace.engines / stored.folder

    def save(self, part: DeviceQualification) -> Path:
        """Keep a part whose files are all in the workspace."""
        path = self.file(part.identity.digest)
        write_file(path, part.pretty_json())
        return path

    def find(self, identity: PartIdentity) -> DeviceQualification | None:
        """The part of that identity, if it and every file that it names are here and sound."""
        with suppress(InputError, TamperedError):
            part = DeviceQualification.read(self.file(identity.digest))
            if part.identity == identity and part.evidence.device == identity.device:
                self.check(part)
                used = {self.file(identity.digest), *self.files(part)}
                for path in used | {path.parent for path in used}:
                    mark_used(path)
                return part
        return None

    def newest(self, device: str, model: str = "") -> DeviceQualification:
        """The part of a kind of device that was made last.

        Args:
            device: the kind.
            model: of which model; empty: of the only one that has parts of it.

        Raises:
            InputError: there is none, or of several models.
        """
        found = [p for p in self.parts() if p.device == device]
        models = sorted({part.identity.model for part in found})
        wanted = [part for part in found if part.identity.model == (model or part.identity.model)]
        if not wanted:
            known = ", ".join(sorted({part.device for part in self.parts()})) or "none"
            raise InputError(
                f"{self.workspace.root} has no evidence from {device} (kinds that it has evidence "
                f"from: {known}). Run `enginegate qualify POLICY --device {device}` here."
            )
        if not model and len(models) > 1:
            raise InputError(
                f"{self.workspace.root} has evidence from {device} about {', '.join(models)}. Say "
                "which with --model."
            )
        return max(wanted, key=lambda part: part.made_at)

    def near(self, identity: PartIdentity) -> str:
        """Why parts of the same version and kind of device do not serve; empty: there are none."""
        like = (
            part
            for part in self.parts()
            if (part.device, part.identity.model_uri) == (identity.device, identity.model_uri)
        )
        said = [
            f"one that {part.made_by} made at {part.made_at:%Y-%m-%d %H:%M} differs in "
            f"{', '.join(part.identity.differences(identity)) or 'its files'}"
            for part in like
        ]
        return "; ".join(said)

    def parts(self) -> Iterator[DeviceQualification]:
        """Every part that can be read, in no order that means anything."""
        for path in sorted((self.workspace.results / "devices").glob("*.json")):
            with suppress(InputError):
                yield DeviceQualification.read(path)

    def engine(self, part: DeviceQualification, candidate: Candidate) -> ContentFolder[Engine]:
        """An engine of the part, and its folder; nothing of its bytes is checked."""
        folder = self.engine_folder(part.engines[candidate.name])
        return ContentFolder(Engine.read(folder / MANIFEST), folder, reused=True)

    def attempts(self, part: DeviceQualification) -> list[ContentFolder[Engine] | Unbuilt]:
        """Each candidate of the part in the order of its verdicts: its engine, or why not."""
        unbuilt: Mapping[Candidate, Unbuilt] = {each.candidate: each for each in part.unbuilt}
        found: list[ContentFolder[Engine] | Unbuilt] = []
        for verdict in part.evidence.verdicts:
            candidate = verdict.candidate
            found.append(unbuilt.get(candidate) or self.engine(part, candidate))
        return found

    def files(self, part: DeviceQualification) -> dict[Path, FileDigest]:
        """Every file that the part needs besides itself, and what it must be.

        Raises:
            InputError: the manifest of an engine is missing or damaged.
            TamperedError: it is another one.
        """
        found: dict[Path, FileDigest] = {}
        for stored in part.engines.values():
            folder = self.engine_folder(stored)
            stored.manifest.check(folder / MANIFEST)
            engine = Engine.read(folder / MANIFEST)
            own = {engine.filename: engine.file, **engine.external, **engine.beside}
            found |= {folder / name: digest for name, digest in own.items()}
            found[folder / MANIFEST] = stored.manifest
        for verdict in part.evidence.verdicts:
            golden = part.evidence.golden.get(verdict.candidate.name)
            if golden is not None and verdict.engine_sha256 is not None:
                found[self.golden_file(golden)] = golden
        return found

    def check(self, part: DeviceQualification) -> None:
        """Refuse a part of which a file is missing or changed, or that is about other engines.

        Raises:
            InputError: a manifest is missing or damaged.
            TamperedError: a file is missing or differs, or an engine is not the one judged.
        """
        for path, digest in self.files(part).items():
            digest.check(path)
        for verdict in part.evidence.verdicts:
            stored = part.engines.get(verdict.candidate.name)
            sha256 = self.engine(part, verdict.candidate).value.file.sha256 if stored else None
            if verdict.engine_sha256 != sha256:
                raise TamperedError(
                    f"The part of {part.device} judges {verdict.candidate} with another engine "
                    "than it names. Make it again."
                )


def stored_engine(built: ContentFolder[Engine]) -> StoredEngine:
    """Where an engine of this workspace is."""
    return StoredEngine(folder=built.folder.name, manifest=FileDigest.of(built.folder / MANIFEST))
