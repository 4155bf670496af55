"""Where things are in a live repository, and reading them. Nothing here writes.

::

    ROOT/                             what Triton reads
    ├── .enginegate.lock              who is changing it
    ├── .enginegate-journal.jsonl     what was under way
    ├── .enginegate-audit.jsonl       who did what, when and why
    ├── .enginegate-current.MODEL.json    the commit point
    └── MODEL/
        ├── config.pbtxt              which versions serve, with each release's digest
        ├── 1/ 2/ …                   the bytes of each release
        └── 00/                       ours
            └── releases/             N.json, .golden.npz, .sig.json; outlive the bytes;
                                      N.promise-DIGEST.json: what N is held to since it was given

Triton refuses to start on a folder in ROOT that is no model in its NONE, POLL and
``--load-model=*`` modes, but ignores files there. Inside a model it looks at the times of
everything: after a change the next load reloads every version that serves, unless what changed is
``config.pbtxt`` or has a name of digits, like a version. A name that begins with a zero is no
version. Hence ``00``: what is written there costs the versions that serve nothing.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import Field, PositiveInt

from enginegate.atomic_io import NotRegularFileError, file_lock
from enginegate.candidate import FileDigest, Sha256
from enginegate.decision import Head, Release, RenewedPromise
from enginegate.errors import (
    NotWritableError,
    RepositoryBusyError,
    RepositoryError,
    TamperedError,
)
from enginegate.records import Record
from enginegate.triton.release_labels import RECORDS

LOCK = ".enginegate.lock"
JOURNAL = ".enginegate-journal.jsonl"
AUDIT = ".enginegate-audit.jsonl"
CURRENT = ".enginegate-current"
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_EARLIER = ".enginegate"
PART_OF = f"{RECORDS}/part-of"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class Current(Record):
    """Which release is live: replaced in one rename, which is the moment a change happens."""

    version: PositiveInt
    standby: PositiveInt | None = None
    """An older version that stays loaded, so that going back needs no load."""
    known: tuple[PositiveInt, ...]
    """Versions whose digests stand in the configuration; the same set keeps a rollback instant."""
    changed_at: datetime
    promises: dict[PositiveInt, Sha256] = Field(default_factory=dict)
    """Releases that are held to another promise than their manifest's -> that record's digest."""
    audit: Head | None = None
    """How far the audit log had come after the last event about this model."""

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
        """The model's folder."""
        return self.root / self.model

    @property
    def config(self) -> Path:
        """Triton's configuration of the model."""
        return self.folder / "config.pbtxt"

    @property
    def is_ours(self) -> bool:
        """Whether this program made the model's folder; a part's is its ensemble's."""
        ours = (self.folder / RECORDS / "releases").is_dir()
        return ours and not (self.root / self.model / PART_OF).exists()

    @property
    def current_file(self) -> Path:
        """The commit point."""
        return self.root / f"{CURRENT}.{self.model}.json"

    def version_folder(self, version: int) -> Path:
        """The served bytes of one release."""
        return self.folder / str(version)

    def release_file(self, version: int) -> Path:
        """The manifest of one release."""
        return self.folder / RECORDS / "releases" / f"{version}.json"

    def golden_file(self, version: int) -> Path:
        """Samples and answers of one release."""
        return self.folder / RECORDS / "releases" / f"{version}.golden.npz"

    def signature_file(self, version: int) -> Path:
        """The signature on one release."""
        return self.folder / RECORDS / "releases" / f"{version}.sig.json"

    def promise_file(self, version: int, digest: str) -> Path:
        """A promise that a release was given after it was published."""
        return self.folder / RECORDS / "releases" / f"{version}.promise-{digest[:16]}.json"

    def promise_signature(self, version: int, digest: str) -> Path:
        """The signature on such a promise."""
        return self.folder / RECORDS / "releases" / f"{version}.promise-{digest[:16]}.sig.json"

    def part(self, name: str) -> "Layout":
        """A part of this model: a model folder beside it (parts.py)."""
        return Layout(self.root, name)

    def part_file(self, version: int, part: str, suffix: str) -> Path:
        """What is kept of one release's part besides its bytes: its configuration, for example."""
        return self.folder / RECORDS / "releases" / f"{version}.{part}.{suffix}"

    def current(self) -> Current | None:
        """The live release; None before the first.

        Raises:
            RepositoryError: the folder was written before records lay in ``00``.
        """
        if (self.folder / _EARLIER).is_dir():
            raise RepositoryError(
                f"{self.folder} was written by an earlier enginegate, which kept its records in "
                f"{_EARLIER}/. Move that folder out of {self.root} and promote the model again; "
                "a running server keeps what it has loaded until then."
            )
        return Current.read(self.current_file) if os.path.lexists(self.current_file) else None

    def release(self, version: int) -> Release:
        """A release's manifest.

        Raises:
            RepositoryError: there is no such release.
        """
        path = self.release_file(version)
        if not path.is_file():
            known = ", ".join(str(release.version) for release in self.releases()) or "none"
            raise RepositoryError(
                f"{self.model} has no release {version} in {self.root} (releases: {known})."
            )
        return Release.read(path)

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
        held = {
            "promise": renewed.promise,
            "scorecard_sha256": renewed.scorecard_sha256,
            "decision": renewed.decision,
            "further_decisions": renewed.further_decisions,
        }
        return release.model_copy(update=held)

    def releases(self) -> tuple[Release, ...]:
        """Every release that was ever published, oldest first, also when its bytes are gone."""
        files = (self.folder / RECORDS / "releases").glob("*.json")
        found = [Release.read(path) for path in files if path.stem.isdigit()]
        return tuple(sorted(found, key=lambda release: release.version))

    def stored_versions(self) -> tuple[int, ...]:
        """Versions whose bytes are here, as Triton sees them, also where a manifest is missing."""
        return tuple(sorted(int(p.name) for p in self.folder.glob("[1-9]*") if p.name.isdigit()))

    def check_files(self, release: Release) -> None:
        """Recompute every digest of a release, those of its parts included.

        Raises:
            TamperedError: a file is missing, differs or was added.
        """
        _check_folder(self.version_folder(release.version), release.files)
        release.golden.check(self.golden_file(release.version))
        for part in release.parts:
            _check_folder(self.part(part.name).version_folder(part.version), part.files)
            part.config.check(self.part_file(release.version, part.name, "pbtxt"))
            if part.golden is not None:
                part.golden.check(self.part_file(release.version, part.name, "golden.npz"))


def _check_folder(folder: Path, files: Mapping[str, FileDigest]) -> None:
    links = [path for path in (folder, *folder.rglob("*")) if path.is_symlink()]
    if links:
        raise TamperedError(f"{links[0]} is a link; a release holds only its own files.")
    for name, digest in files.items():
        digest.check(folder / name)
    expected = {folder / name for name in files}
    added = sorted(p for p in folder.rglob("*") if not p.is_dir() and p not in expected)
    if added:
        raise TamperedError(
            f"{folder} holds files that were not published: "
            f"{', '.join(str(path.relative_to(folder)) for path in added)}."
        )


@contextmanager
def locked(root: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold a repository's lock; the folder is made if it is not there.

    Raises:
        RepositoryBusyError: somebody else held it for all of ``timeout_s``.
        NotWritableError: the folder may not be written to.
        RepositoryError: the folder cannot be made, or its lock is no regular file.
    """
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(root / LOCK, timeout_s=timeout_s))
        except TimeoutError as error:
            raise RepositoryBusyError(
                f"{root} is being changed by {error}. Try again when it has finished."
            ) from error
        except NotRegularFileError as error:
            raise RepositoryError(f"{error.strerror}.") from error
        except OSError as error:
            kind = NotWritableError if error.errno in _READ_ONLY else RepositoryError
            raise kind(
                f"The live repository {root} cannot be changed: {error.strerror}. Make it a folder "
                "that you may write to, or name another one under [target] in the policy."
            ) from error
        yield


def models(root: Path) -> tuple[str, ...]:
    """Names of the models this program has published in a repository; parts are not counted."""
    found = [path.parent for path in root.glob(f"*/{RECORDS}") if path.is_dir()]
    return tuple(sorted(path.name for path in found if not (path / PART_OF).exists()))


def earlier_models(root: Path) -> tuple[str, ...]:
    """Names of the models that an earlier program published, whose records nobody reads here."""
    return tuple(sorted(path.parent.name for path in root.glob(f"*/{_EARLIER}") if path.is_dir()))
