"""The one list of a release's files: copying, signing, checking, uploading and removing go by it.

A staging folder and a download are laid out as a live repository is, so the list fits there too.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from enginegate.candidate import FileDigest
from enginegate.decision import Release, RenewedPromise
from enginegate.errors import TamperedError
from enginegate.repository.history.signing import SignedFiles
from enginegate.repository.store.layout import Layout


@dataclass(frozen=True, slots=True)
class ReleaseFiles:
    """The files of one release, those of its composing models included."""

    layout: Layout
    release: Release

    @property
    def manifest(self) -> Path:
        """It states every digest."""
        return self.layout.release_file(self.release.version)

    @property
    def signature(self) -> Path:
        """Of the manifest and every file with a digest; not every release has one."""
        return self.layout.signature_file(self.release.version)

    @property
    def served(self) -> dict[Path, dict[str, FileDigest]]:
        """Version folders that Triton reads -> their files; retention removes these alone."""
        own = {self.layout.version_folder(self.release.version): self.release.engine.files}
        parts = self.release.engine.parts
        return own | {self.layout.part(p.name).version_folder(p.version): p.files for p in parts}

    @property
    def records(self) -> dict[Path, FileDigest]:
        """What is kept beside the manifest: golden samples, configurations of composing models."""
        version = self.release.version
        found = {self.layout.golden_file(version): self.release.engine.golden}
        for part in self.release.engine.parts:
            found[self.layout.part_file(version, part.name, "pbtxt")] = part.config
            if part.golden is not None:
                found[self.layout.part_file(version, part.name, "golden.npz")] = part.golden
        return found

    @property
    def digests(self) -> dict[Path, FileDigest]:
        """Every file whose digest the manifest states."""
        return self.records | {
            folder / name: digest
            for folder, files in self.served.items()
            for name, digest in files.items()
        }

    def check(self) -> None:
        """Recompute every digest.

        Raises:
            TamperedError: a file is missing, differs or was added.
        """
        for folder, files in self.served.items():
            links = [path for path in (folder, *folder.rglob("*")) if path.is_symlink()]
            if links:
                raise TamperedError(f"{links[0]} is a link; a release holds only its own files.")
            for name, digest in files.items():
                digest.check(folder / name)
            added = sorted(
                str(path.relative_to(folder))
                for path in folder.rglob("*")
                if not path.is_dir() and path.relative_to(folder).as_posix() not in files
            )
            if added:
                raise TamperedError(
                    f"{folder} holds files that were not published: {', '.join(added)}."
                )
        for path, digest in self.records.items():
            digest.check(path)

    def signed(self) -> SignedFiles:
        """What its signature covers."""
        subject = f"release {self.release.version} of {self.layout.model}"
        files = (self.manifest, *self.digests)
        return SignedFiles(self.layout.root, files, self.signature, subject)

    def names(self) -> tuple[str, ...]:
        """Every file that is here, promises it was given included, by path in the repository.

        The manifest is last: whoever copies in this order has a release when it has everything.
        """
        beside = set(record_files(self.layout, self.release.version)) - {self.manifest}
        found = {*self.digests, *beside}
        names = sorted(str(path.relative_to(self.layout.root)) for path in found)
        return (*names, str(self.manifest.relative_to(self.layout.root)))

    def copy_to(self, root: Path) -> None:
        """Copy them below another root; the bytes of a release and its records, no promises."""
        for path in (*self.digests, self.manifest, self.signature):
            if path != self.signature or path.is_file():
                target = root / path.relative_to(self.layout.root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)


def record_files(layout: Layout, version: int) -> tuple[Path, ...]:
    """What is here beside the bytes of a release: manifest, signature, samples, promises."""
    return tuple(sorted(layout.release_file(version).parent.glob(f"{version}.*")))


def signed_promise(layout: Layout, renewed: RenewedPromise) -> SignedFiles:
    """What the signature on a promise covers; it names the digest of its release's manifest."""
    version, digest = renewed.version, renewed.digest
    return SignedFiles(
        layout.root,
        (layout.promise_file(version, digest),),
        layout.promise_signature(version, digest),
        f"the promise of release {version} of {layout.model}",
    )


def check_same(where: object, release: Release, digest: str) -> None:
    """Refuse a manifest that is not the one that was made live.

    Raises:
        TamperedError: it is not.
    """
    if release.digest != digest:
        raise TamperedError(
            f"The manifest of release {release.version} of {release.model} in {where} is not the "
            f"one that was made live: its digest is {release.digest[:12]}, not {digest[:12]}."
        )
