"""Where things are in a live repository, and reading them. Nothing here writes.

::

    ROOT/                             what Triton reads
    ├── .enginegate.lock              who is changing it
    ├── .enginegate-journal.jsonl     what was under way
    ├── .enginegate-audit.jsonl       who did what, when and why
    ├── .enginegate-audit-head.json   how far that has come
    ├── .enginegate-current.MODEL.json    the commit point
    └── MODEL/
        ├── config.pbtxt              which versions serve, with each release's digest
        ├── 1/ 2/ …                   the bytes of each release, for this server's kind of device
        └── 00/                       ours
            ├── device                that kind; none: the one that releases are published on
            └── releases/             N.json, .golden.npz, .sig.json; outlive the bytes;
                                      N.promise-DIGEST.json: what N is held to since it was given;
                                      N.engine-DEVICE/, N.golden-DEVICE.npz: for other kinds

Triton refuses to start on a folder in ROOT that is no model in its NONE, POLL and
``--load-model=*`` modes, but ignores files there. Inside a model it looks at the times of
everything: after a change the next load reloads every version that serves, unless what changed is
``config.pbtxt`` or has a name of digits, like a version. A name that begins with a zero is no
version. Hence ``00``: what is written there costs the versions that serve nothing.
"""

import json
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, PositiveInt

from enginegate.atomic_io import read_file
from enginegate.candidate import Sha256
from enginegate.decision import ComposingModel, Release, ReleasedEngine, RenewedPromise
from enginegate.errors import InputError, NoReleaseError, RepositoryError, TamperedError
from enginegate.records import Record
from enginegate.triton.config import Config, model_config, read_config
from enginegate.triton.release_labels import RECORDS
from enginegate.triton.version_sharing import sharing_obstacle

CURRENT = ".enginegate-current"
PART_OF = f"{RECORDS}/part-of"
DEVICE = f"{RECORDS}/device"
R = TypeVar("R", bound=Record)
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class Current(Record):
    """Which release is live: replaced in one rename, which is the moment a change happens."""

    schema_version: Literal[2] = 2
    version: PositiveInt
    standby: PositiveInt | None = None
    """An older version that stays loaded, so that a rollback needs no load."""
    known: tuple[PositiveInt, ...]
    """Versions whose digests stand in the configuration; the same set keeps a rollback instant."""
    changed_at: datetime
    promises: dict[PositiveInt, Sha256] = Field(default_factory=dict)
    """Releases that are held to another promise than their manifest's -> that record's digest."""

    @property
    def served(self) -> tuple[int, ...]:
        """Versions Triton keeps loaded; requests without a version go to the highest."""
        return (self.version,) if self.standby is None else (self.standby, self.version)


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one model in one repository."""

    root: Path
    model: str

    def __post_init__(self) -> None:
        if not _MODEL_NAME.fullmatch(self.model):
            raise RepositoryError(
                f"{self.model!r} cannot be a model's name: use letters, digits, '_', '.' and '-', "
                "beginning with a letter or digit, at most 100."
            )
        if self.root.exists() and not self.root.is_dir():
            raise RepositoryError(
                f"{self.root} is a file, so it is no live repository, and nothing in it can be "
                "shown or changed. Name a folder as repository under [target] in the policy."
            )

    @property
    def folder(self) -> Path:
        return self.root / self.model

    @property
    def config(self) -> Path:
        return self.folder / "config.pbtxt"

    @property
    def is_ours(self) -> bool:
        """Whether this program made the model's folder; a composing model's is its ensemble's."""
        ours = (self.folder / RECORDS / "releases").is_dir()
        return ours and not (self.root / self.model / PART_OF).exists()

    @property
    def current_file(self) -> Path:
        """The commit point."""
        return self.root / f"{CURRENT}.{self.model}.json"

    def version_folder(self, version: int) -> Path:
        """The served bytes of one release."""
        return self.folder / str(version)

    @property
    def device(self) -> str:
        """Kind of device of the server that reads this; empty: that of the publisher."""
        try:
            return read_file(self.folder / DEVICE).decode().strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def spare_folder(self, version: int, device: str) -> Path:
        """One release's bytes for another kind of device than this server's."""
        return self.folder / RECORDS / "releases" / f"{version}.engine-{device}"

    def spare_golden(self, version: int, device: str) -> Path:
        """Samples, and the answers of that kind of device."""
        return self.folder / RECORDS / "releases" / f"{version}.golden-{device}.npz"

    def bytes_of(self, release: Release, engine: ReleasedEngine) -> Path:
        """Where the bytes of one of a release's engines are."""
        if engine.device == release.engine.device:
            return self.version_folder(release.version)
        return self.spare_folder(release.version, engine.device)

    def golden_of(self, release: Release, engine: ReleasedEngine) -> Path:
        """Where its samples and answers are."""
        if engine.device == release.engine.device:
            return self.golden_file(release.version)
        return self.spare_golden(release.version, engine.device)

    def release_file(self, version: int) -> Path:
        return self.folder / RECORDS / "releases" / f"{version}.json"

    def golden_file(self, version: int) -> Path:
        """Samples and answers of one release."""
        return self.folder / RECORDS / "releases" / f"{version}.golden.npz"

    def signature_file(self, version: int) -> Path:
        return self.folder / RECORDS / "releases" / f"{version}.sig.json"

    def promise_file(self, version: int, digest: str) -> Path:
        """A promise that a release was given after it was published."""
        return self.folder / RECORDS / "releases" / f"{version}.promise-{digest[:16]}.json"

    def promise_signature(self, version: int, digest: str) -> Path:
        return self.folder / RECORDS / "releases" / f"{version}.promise-{digest[:16]}.sig.json"

    def part(self, name: str) -> "Layout":
        """A composing model: a model folder beside this one, whose pointer is the ensemble's."""
        return Layout(self.root, name)

    def owned_parts(self) -> tuple["Layout", ...]:
        """Every composing model that is here, also of releases that are no longer served."""
        found = self.root.glob(f"{self.model}.*/{PART_OF}")
        mine = [path for path in found if read_file(path) == self.model.encode()]
        return tuple(sorted((self.part(p.parents[1].name) for p in mine), key=lambda p: p.model))

    def part_file(self, version: int, part: str, suffix: str) -> Path:
        """A record of one composing model beside its bytes: its configuration, for example."""
        return self.folder / RECORDS / "releases" / f"{version}.{part}.{suffix}"

    def current(self) -> Current | None:
        """The live release; None before the first.

        Raises:
            RepositoryError: an earlier enginegate wrote it.
            TamperedError: it is cut short or edited; the message says how it is written again.
        """
        if not os.path.lexists(self.current_file):
            return None
        try:
            return _read(Current, self.current_file)
        except InputError as error:
            raise TamperedError(
                f"{error}\nIt is the live pointer of {self.model}. Restore it from a backup; or "
                "move it away: `enginegate verify POLICY` then names the recorded release N, and "
                "`enginegate rollback POLICY --to N` writes it again."
            ) from error

    def release(self, version: int) -> Release:
        """A release's manifest.

        Raises:
            NoReleaseError: there is no such release.
            RepositoryError: an earlier enginegate wrote it.
        """
        path = self.release_file(version)
        if not path.is_file():
            known = ", ".join(str(release.version) for release in self.releases()) or "none"
            raise NoReleaseError(
                f"{self.model} has no release {version} in {self.root} (releases: {known})."
            )
        return self._seen(_read(Release, path))

    def _seen(self, release: Release) -> Release:
        """The release as it is on this kind of device."""
        return release.seen_from(self.device) if len(release.engines) > 1 else release

    def renewed(self, version: int) -> RenewedPromise | None:
        """The promise that a release was given after it was published; None: it has its own.

        Raises:
            TamperedError: it is not the one that was approved, or is another release's.
            InputError: it is missing or damaged.
        """
        current = self.current()
        digest = current.promises.get(version) if current is not None else None
        if digest is None:
            return None
        path = self.promise_file(version, digest)
        found = RenewedPromise.read(path)
        if found.digest != digest or found.release_sha256 != self.release(version).digest:
            raise TamperedError(
                f"{path} is not the promise that release {version} of {self.model} was given: its "
                f"digest is {found.digest[:12]}, the commit point has {digest[:12]}. Restore it "
                "from a backup, or promote an approved scorecard of it again."
            )
        return found

    def held_to(self, release: Release) -> Release:
        """A release with the promise, scorecard and approvals that it is held to now.

        Its own digest is still that of ``release``, never of what this returns.

        Raises:
            TamperedError: the promise that it was given is not the one that was approved.
            InputError: that promise is missing or damaged.
        """
        renewed = self.renewed(release.version)
        if renewed is None:
            return release
        first, *others = release.engines
        promised = {first.device: renewed.promise, **renewed.promises}
        held = {
            "engines": tuple(
                each.model_copy(update={"promise": promised.get(each.device, each.promise)})
                for each in (first, *others)
            ),
            "scorecard_sha256": renewed.scorecard_sha256,
            "decision": renewed.decision,
            "further_decisions": renewed.further_decisions,
        }
        return release.model_copy(update=held)

    def releases(self) -> tuple[Release, ...]:
        """Every release that was ever published, oldest first, also when its bytes are gone."""
        files = (self.folder / RECORDS / "releases").glob("*.json")
        found = [self._seen(_read(Release, path)) for path in files if path.stem.isdigit()]
        return tuple(sorted(found, key=lambda release: release.version))

    @property
    def place(self) -> str:
        """The repository's folder, for people."""
        return str(self.root)

    def has_bytes(self, version: int) -> bool:
        """Whether a release can still be served: retention has not removed its bytes."""
        return self.version_folder(version).is_dir()

    def stored_versions(self) -> tuple[int, ...]:
        """Versions whose bytes are here, as Triton sees them, also where a manifest is missing."""
        return tuple(sorted(int(p.name) for p in self.folder.glob("[1-9]*") if p.name.isdigit()))


def parts_by_owner(root: Path) -> dict[str, tuple[Layout, ...]]:
    """Every composing model in a repository, by the model that it is part of; one look for all."""
    found: dict[str, list[Layout]] = {}
    for path in sorted(root.glob(f"*/{PART_OF}")):
        owner, name = read_file(path).decode(errors="replace"), path.parents[1].name
        if name.startswith(f"{owner}."):
            found.setdefault(owner, []).append(Layout(root, name))
    return {owner: tuple(parts) for owner, parts in found.items()}


def models(root: Path) -> tuple[str, ...]:
    """Names of the models this program has published in a repository, without composing models."""
    found = [path.parent for path in root.glob(f"*/{RECORDS}") if path.is_dir()]
    return tuple(sorted(path.name for path in found if not (path / PART_OF).exists()))


def _read(kind: type[R], path: Path) -> R:
    try:
        return kind.read(path)
    except InputError:
        if _is_older(path):
            raise RepositoryError(
                f"{path} is of an earlier enginegate's format, which is not read: move the model's "
                f"folder and its {CURRENT}.MODEL.json out of the repository, and promote it again."
            ) from None
        raise


def _is_older(path: Path) -> bool:
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("schema_version", 1) == 1


ENSEMBLE_FILE = "ensemble.pbtxt"


def engine_config(release: Release) -> Config:
    """The configuration that a release of one engine asks for."""
    engine = release.engine
    return model_config(
        name=release.model,
        inputs=release.inputs,
        outputs=release.outputs,
        serving=engine.serving,
        backend=engine.backend,
        parameters={},
        gpu=engine.gpu,
        options=engine.options,
        settings=engine.settings,
    )


def published_config(layout: Layout, release: Release) -> Config:
    """That of a release's own model: of its engine, or of the ensemble around it.

    Raises:
        TamperedError: the published configuration of an ensemble is not what it was.
    """
    if not release.engine.parts:
        return engine_config(release)
    path = layout.version_folder(release.version) / ENSEMBLE_FILE
    release.engine.files[ENSEMBLE_FILE].check(path)
    return read_config(path.read_text(), str(path))


def part_config(layout: Layout, version: int, part: ComposingModel) -> Config:
    """The configuration of one composing model.

    Raises:
        TamperedError: it is not the one that was published.
    """
    path = layout.part_file(version, part.name, "pbtxt")
    part.config.check(path)
    return read_config(path.read_text(), str(path))


def check_loadable(layout: Layout, config: Config) -> None:
    """Refuse a configuration with a version whose folder lacks the file that its backend opens.

    Triton 2.51 never ends the load of a Python model without its file, and from then on no other
    load of that model either, until it is started again.

    Raises:
        RepositoryError: a file is not there; names it.
    """
    for version in config.versions or ():
        path = layout.version_folder(version) / config.opened_file
        if config.opened_file and not path.exists():
            raise RepositoryError(
                f"Version {version} of {layout.model} cannot be loaded in Triton's "
                f"{config.backend or config.message.platform} backend: {path} is not there. Triton "
                "was not asked, because such a load may never end."
            )


def why_not_beside(live: Release, release: Release) -> str:
    """Why the live release cannot stay loaded beside a new one; empty: it can stand by.

    Both versions of a model share one configuration, which is the new release's: it must be able
    to load the older one's files too. Composing models are models of their own, and staging
    checks each.
    """
    if bool(live.engine.parts) != bool(release.engine.parts):
        return "an engine and an ensemble share no configuration"
    return (
        ""
        if release.engine.parts
        else sharing_obstacle(engine_config(live), engine_config(release))
    )
