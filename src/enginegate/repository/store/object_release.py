"""One model's releases in object storage: written whole, read back, fetched, removed.

::

    s3://BUCKET/PREFIX/MODEL/
    ├── N/…                    the bytes of each release
    ├── releases/N.*           first N.files.json (what there will be), golden samples, signature,
    │                          last the manifest N.json: without it there is no release N
    ├── journal/00000000.json  one object for each step
    └── current.json           the live pointer

The composing models of an ensemble lie beside it, as they do in a live repository.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from pydantic import Field, PositiveInt, ValidationError

from enginegate.atomic_io import write_file
from enginegate.candidate import FileDigest, Sha256
from enginegate.decision import Release, RenewedPromise
from enginegate.errors import NoReleaseError, RepositoryError, TamperedError
from enginegate.object_storage import ObjectStore
from enginegate.records import Record
from enginegate.repository.store.layout import Current, Layout
from enginegate.repository.store.package import ImportedRelease
from enginegate.repository.store.pointer import check_expected
from enginegate.repository.store.release_files import ReleaseFiles, check_same
from enginegate.triton.release_labels import RECORDS
from enginegate.workspace import now

_NONE: Mapping[int, str] = MappingProxyType({})
_OF_VERSION = re.compile(r"[^/]+/(?:releases/)?([1-9][0-9]*)[./]")


class Contents(Record):
    """The files of a release: path in a live repository -> digest."""

    files: dict[str, FileDigest]
    operation: str = ""
    """The journal's name of what wrote it, which alone may take it away again."""


class Pointer(Record):
    """Which release is live: ``current.json``, the live pointer. No version: the last was taken."""

    version: PositiveInt | None = None
    release: Sha256 | None = None
    changed_at: datetime
    promises: dict[PositiveInt, Sha256] = Field(default_factory=dict)
    """Releases that are held to another promise than their manifest's -> that record's digest."""
    who: str = ""
    why: str = ""
    """Of a withdrawal: by whom, and why; for the audit logs of the hosts that replicate."""
    unused: bool = False
    """Nothing was ever live: written only to keep out whoever was overtaken before the first."""

    def missing_promise(self, here: Current | None) -> str | None:
        """Digest of the live release's promise that a host which has the release does not know."""
        if here is None or self.version != here.version:
            return None
        given = self.promises.get(here.version)
        return None if given == here.promises.get(here.version) else given


@dataclass(frozen=True, slots=True)
class ObjectReleases:
    """The releases of one model below one prefix."""

    store: ObjectStore
    model: str

    def pointer(self) -> tuple[Pointer | None, str | None]:
        """What is live (None before the first release), and the tag to replace it by.

        Raises:
            TamperedError: the live pointer is damaged.
        """
        stored = self.store.read(self._pointer_key)
        if stored is None:
            return None, None
        try:
            pointer = Pointer.model_validate_json(stored.content)
        except ValidationError as error:
            raise TamperedError(
                f"{self.store.url}/{self._pointer_key} is damaged. The journal beside it says what "
                "was made live last."
            ) from error
        return (None if pointer.unused else pointer), stored.tag

    @property
    def place(self) -> str:
        """The storage's address, for people."""
        return self.store.url

    def live_version(self) -> int | None:
        """Which release is live; None: nothing is."""
        pointer, _ = self.pointer()
        return pointer.version if pointer else None

    def live_words(self) -> str:
        """What is live in storage, for people."""
        live = self.live_version()
        return f"{f'Release {live}' if live else 'Nothing'} is live in {self.store.url}."

    def tag_of(self, expected: int | None) -> str | None:
        """Read the live pointer, which must name the release that a change was prepared for.

        Returns:
            Its tag, to commit with: that fails if anybody committed after this.

        Raises:
            RepositoryError: another release is live.
        """
        pointer, tag = self.pointer()
        check_expected(self, pointer, expected)
        return tag

    def fence(self) -> None:
        """Give the live pointer another tag, so that whoever read it before cannot commit."""
        pointer, tag = self.pointer()
        again = (pointer or Pointer(changed_at=now(), unused=True)).model_copy(
            update={"changed_at": now()}
        )
        # Refused: somebody committed just now, which did the same.
        self.store.replace(self._pointer_key, again.pretty_json(), tag)

    def commit(
        self,
        release: Release | None,
        tag: str | None,
        *,
        who: str = "",
        why: str = "",
        promises: Mapping[int, str] = _NONE,
    ) -> None:
        """Make a release live (None: nothing), if nobody did since ``tag`` was read.

        Args:
            release: what becomes live.
            tag: of the live pointer that is replaced.
            who: of a withdrawal, by whom.
            why: of a withdrawal.
            promises: that releases are given; those they were given before stay.

        Raises:
            RepositoryError: somebody did.
        """
        known, _ = self.pointer()
        pointer = Pointer(
            version=release.version if release else None,
            release=release.digest if release else None,
            changed_at=now(),
            promises={**(known.promises if known else {}), **promises},
            who=who,
            why=why,
        )
        if not self.store.replace(self._pointer_key, pointer.pretty_json(), tag):
            raise RepositoryError(
                f"{self.store.url}/{self._pointer_key} was changed by somebody else meanwhile."
            )

    def upload(self, root: Path, release: Release, operation: str = "") -> None:
        """Write a release of a live repository, its manifest last, and read every object back.

        Raises:
            TamperedError: what came back is not what was sent.
            RepositoryError: the number is taken, or storage cannot be reached or refuses.
        """
        names = ReleaseFiles(Layout(root, self.model), release).names()
        files = {name: FileDigest.of(root / name) for name in names}
        *before, manifest = names
        # First of all, so that a killed upload can be removed whole, and by its own operation only.
        contents, key = (
            Contents(files=files, operation=operation),
            self._contents_key(release.version),
        )
        if not self.store.create(key, contents.pretty_json()):
            raise RepositoryError(
                f"{self.store.url}/{key} is there already: release {release.version} of "
                f"{self.model} is somebody else's. Look at `enginegate verify`."
            )
        for name in before:
            self.store.upload(root / name, _key(name))
        self._check(files, but=manifest)
        self.store.upload(root / manifest, _key(manifest))
        self._check({manifest: files[manifest]})

    def upload_promise(self, root: Path, renewed: RenewedPromise) -> None:
        """Write a promise of a live repository, with its signature if it has one.

        Raises:
            TamperedError: what came back is not what was sent.
            RepositoryError: storage cannot be reached or refuses.
        """
        for path in _promise_paths(Layout(root, self.model), renewed.version, renewed.digest):
            if path.is_file():
                name = str(path.relative_to(root))
                self.store.upload(path, _key(name))
                self._check({name: FileDigest.of(path)})

    def fetch_promise(self, version: int, digest: str, root: Path) -> RenewedPromise:
        """Write a promise from storage beside the release in a live repository.

        Raises:
            TamperedError: it is missing, or not the one that the live pointer names.
        """
        layout = Layout(root, self.model)
        for path in _promise_paths(layout, version, digest):
            stored = self.store.read(_key(str(path.relative_to(root))))
            if stored is not None:
                write_file(path, stored.content)
        path = layout.promise_file(version, digest)
        if not path.is_file() or (found := RenewedPromise.read(path)).digest != digest:
            path.unlink(missing_ok=True)
            raise TamperedError(
                f"{self.store.url} lacks the promise {digest[:12]} that release {version} "
                f"of {self.model} was given. Promote an approved scorecard of it again."
            )
        return found

    def check(self, version: int) -> None:
        """Read every object of a release back.

        Raises:
            TamperedError: one is missing, or is not what was published.
        """
        release = self.release(version)
        files = self._contents(version).files
        engine = f"{self.model}/{version}/"
        stated = {n.removeprefix(engine): d for n, d in files.items() if n.startswith(engine)}
        if stated != release.engine.files:
            raise TamperedError(
                f"{self.store.url}/{self._contents_key(version)} does not fit its manifest."
            )
        self._check(files)

    def fetch(self, version: int, folder: Path) -> ImportedRelease:
        """Download a release below ``folder``, laid out as in a live repository.

        Raises:
            TamperedError: an object is not what was published; nothing may be loaded.
        """
        files = self._contents(version).files
        for name, digest in files.items():
            self.store.download(_key(name), folder / name)
            self._compare(name, FileDigest.of(folder / name), digest)
        return ImportedRelease(Layout(folder, self.model).release(version), folder)

    def release(self, version: int) -> Release:
        """A release's manifest.

        Raises:
            NoReleaseError: there is no such release.
            TamperedError: it is no manifest.
        """
        key = f"{self.model}/releases/{version}.json"
        stored = self.store.read(key)
        if stored is None:
            known = ", ".join(map(str, self.versions())) or "none"
            raise NoReleaseError(
                f"{self.store.url} has no release {version} of {self.model} (releases: {known})."
            )
        try:
            return Release.model_validate_json(stored.content)
        except ValidationError as error:
            raise TamperedError(f"{self.store.url}/{key} is not a release's manifest.") from error

    def release_of(self, pointer: Pointer) -> Release | None:
        """The live release; None when nothing is.

        Raises:
            TamperedError: its manifest is not the one that was made live.
        """
        if pointer.version is None:
            return None
        release = self.release(pointer.version)
        check_same(self.store.url, release, pointer.release or "")
        return release

    def versions(self) -> tuple[int, ...]:
        """Numbers of every release there ever was, oldest first, also where its bytes are gone."""
        names = (PurePosixPath(key).name for key in self.store.keys(f"{self.model}/releases/"))
        return tuple(sorted(int(n[:-5]) for n in names if re.fullmatch(r"[1-9][0-9]*\.json", n)))

    def has_bytes(self, version: int) -> bool:
        """Whether a release can still be fetched."""
        return bool(self.store.keys(f"{self.model}/{version}/"))

    def stray(self) -> tuple[int, ...]:
        """Numbers that have objects and no manifest: what a killed upload left."""
        found = (_OF_VERSION.match(key) for key in self.store.keys(f"{self.model}/"))
        return tuple(sorted({int(m[1]) for m in found if m} - set(self.versions())))

    def remove(self, version: int) -> None:
        """Take a release out that never went live, its manifest first."""
        self.store.delete(f"{self.model}/releases/{version}.json")
        self.forget(version)
        for start in (f"{version}/", f"releases/{version}."):
            for key in self.store.keys(f"{self.model}/{start}"):
                self.store.delete(key)

    def was_written_by(self, version: int, operation: str) -> bool:
        """Whether the objects of a number are this operation's, as its list of contents says."""
        stored = self.store.read(self._contents_key(version))
        return stored is not None and self._contents(version).operation == operation

    def forget_old(self, keep: int, pinned: frozenset[int] | None = frozenset()) -> None:
        """Delete bytes beyond the newest ``keep``; what is live, and what it replaced, stays.

        So does what is ``pinned``; None: that could not be found out, so nothing is deleted.
        """
        if pinned is None:
            return
        pointer, _ = self.pointer()
        live = self.release_of(pointer) if pointer else None
        kept = {*pinned, *((live.version, live.previous_version) if live else ())}
        for version in self.versions()[:-keep]:
            if version not in kept:
                self.forget(version)

    def forget(self, version: int) -> None:
        """Delete the bytes of an old release; its manifest stays as history."""
        if self.store.read(self._contents_key(version)) is not None:
            for name in self._contents(version).files:
                parts = PurePosixPath(name).parts
                if parts[1] != RECORDS or parts[3].startswith(f"{version}.engine-"):
                    self.store.delete(_key(name))

    def _contents(self, version: int) -> Contents:
        key = self._contents_key(version)
        stored = self.store.read(key)
        try:
            contents = Contents.model_validate_json(stored.content if stored else b"")
        except ValidationError as error:
            raise TamperedError(f"{self.store.url}/{key} is missing or damaged.") from error
        for name in contents.files:
            path = PurePosixPath(name)
            ours = path.parts[0] == self.model or name.startswith(f"{self.model}.")
            if path.is_absolute() or ".." in path.parts or not ours:
                raise TamperedError(f"{self.store.url}/{key} names {name!r}: not its own.")
        return contents

    def _check(self, files: dict[str, FileDigest], *, but: str = "") -> None:
        for name, digest in files.items():
            if name != but:
                self._compare(name, self.store.digest(_key(name)), digest)

    def _compare(self, name: str, found: FileDigest, digest: FileDigest) -> None:
        if found != digest:
            raise TamperedError(
                f"{self.store.url}/{_key(name)} is not the object that was published: sha256 "
                f"{found.sha256[:12]}, {found.size_bytes} bytes; it was {digest.sha256[:12]}, "
                f"{digest.size_bytes} bytes. Restore it, or promote its scorecard again."
            )

    @property
    def _pointer_key(self) -> str:
        return f"{self.model}/current.json"

    def _contents_key(self, version: int) -> str:
        return f"{self.model}/releases/{version}.files.json"


def _promise_paths(layout: Layout, version: int, digest: str) -> tuple[Path, Path]:
    """Its signature first: the promise is there when everything is."""
    return layout.promise_signature(version, digest), layout.promise_file(version, digest)


def _key(name: str) -> str:
    model, _, rest = name.partition("/")
    return f"{model}/{rest.removeprefix(f'{RECORDS}/')}"
