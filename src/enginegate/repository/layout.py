"""Where things are in a live repository, and reading them. Nothing here writes.

::

    ROOT/                             what Triton reads
    ├── .enginegate.lock              who is changing it
    ├── .enginegate-journal.jsonl     what was under way
    └── MODEL/
        ├── config.pbtxt              which versions serve, with each release's digest
        ├── 1/ 2/ …                   the bytes of each release
        └── .enginegate/              ours: Triton ignores it
            ├── current.json          the commit point
            └── releases/             N.json, N.golden.npz; kept after the bytes are gone

Triton refuses to start on a dot-folder in ROOT in its NONE, POLL and ``--load-model=*`` modes, but
ignores files there and dot-folders inside a model; hence this shape.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import PositiveInt

from enginegate.canonical import Record
from enginegate.decision import Release
from enginegate.durable import file_lock
from enginegate.errors import RepositoryBusyError, RepositoryError, TamperedError

LOCK = ".enginegate.lock"
JOURNAL = ".enginegate-journal.jsonl"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class Current(Record):
    """Which release is live: replaced in one rename, which is the moment a change happens."""

    version: PositiveInt
    standby: PositiveInt | None = None
    """An older version that stays loaded, so that going back needs no load."""
    known: tuple[PositiveInt, ...]
    """Versions whose digests stand in the configuration; the same set keeps a rollback instant."""
    changed_at: datetime

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

    @property
    def folder(self) -> Path:
        """The model's folder."""
        return self.root / self.model

    @property
    def config(self) -> Path:
        """Triton's configuration of the model."""
        return self.folder / "config.pbtxt"

    @property
    def current_file(self) -> Path:
        """The commit point."""
        return self.folder / ".enginegate" / "current.json"

    def version_folder(self, version: int) -> Path:
        """The served bytes of one release."""
        return self.folder / str(version)

    def release_file(self, version: int) -> Path:
        """The manifest of one release."""
        return self.folder / ".enginegate" / "releases" / f"{version}.json"

    def golden_file(self, version: int) -> Path:
        """Samples and answers of one release."""
        return self.folder / ".enginegate" / "releases" / f"{version}.golden.npz"

    def current(self) -> Current | None:
        """The live release; None before the first."""
        return Current.read(self.current_file) if self.current_file.exists() else None

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

    def releases(self) -> tuple[Release, ...]:
        """Every release that was ever published, oldest first, also when its bytes are gone."""
        found = (self.folder / ".enginegate" / "releases").glob("*.json")
        return tuple(sorted((Release.read(p) for p in found), key=lambda release: release.version))

    def stored_versions(self) -> tuple[int, ...]:
        """Versions whose bytes are here, as Triton sees them, also where a manifest is missing."""
        return tuple(sorted(int(p.name) for p in self.folder.glob("[1-9]*") if p.name.isdigit()))

    def check_files(self, release: Release) -> None:
        """Recompute every digest of a release.

        Raises:
            TamperedError: a file is missing, differs or was added.
        """
        folder = self.version_folder(release.version)
        links = [path for path in (folder, *folder.rglob("*")) if path.is_symlink()]
        if links:
            raise TamperedError(f"{links[0]} is a link; a release holds only its own files.")
        for name, digest in release.files.items():
            digest.check(folder / name)
        release.golden.check(self.golden_file(release.version))
        expected = {folder / name for name in release.files}
        added = sorted(p for p in folder.rglob("*") if p.is_file() and p not in expected)
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
        RepositoryError: the folder cannot be made or written to.
    """
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(root / LOCK, timeout_s=timeout_s))
        except TimeoutError as error:
            raise RepositoryBusyError(
                f"{root} is being changed by {error}. Try again when it has finished."
            ) from error
        except OSError as error:
            raise RepositoryError(
                f"The live repository {root} cannot be changed: {error.strerror}. Make it a folder "
                "that you may write to, or name another one under [target] in the policy."
            ) from error
        yield


def models(root: Path) -> tuple[str, ...]:
    """Names of the models this program has published in a repository."""
    return tuple(sorted(p.parent.name for p in root.glob("*/.enginegate") if p.is_dir()))
