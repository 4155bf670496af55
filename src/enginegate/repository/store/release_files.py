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
    def spare(self) -> dict[Path, dict[str, FileDigest]]:
        """Folders of the engines for other kinds of device; only where they are published from."""
        first, *others = self.release.engines
        if self.release.engine.device != first.device:
            return {}
        return {self.layout.bytes_of(self.release, each): each.files for each in others}

    @property
    def records(self) -> dict[Path, FileDigest]:
        """What is kept beside the manifest: golden samples, configurations of composing models."""
        version = self.release.version
        found = {self.layout.golden_file(version): self.release.engine.golden}
        for part in self.release.engine.parts:
            found[self.layout.part_file(version, part.name, "pbtxt")] = part.config
            if part.golden is not None:
                found[self.layout.part_file(version, part.name, "golden.npz")] = part.golden
        if self.spare:
            others = self.release.engines[1:]
            found |= {self.layout.golden_of(self.release, each): each.golden for each in others}
        return found

    @property
    def digests(self) -> dict[Path, FileDigest]:
        """Every file whose digest the manifest states."""
        return self.records | {
            folder / name: digest
            for folder, files in (self.served | self.spare).items()
            for name, digest in files.items()
        }

    def check(self) -> None:
        """Recompute every digest.

        Raises:
            TamperedError: a file is missing, differs or was added.
        """
        for folder, files in (self.served | self.spare).items():
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
        """What its signature covers.

        Of engines for several kinds of device it is the manifest alone, which states every digest:
        their files lie in other places in the repositories of other kinds.
        """
        subject = f"release {self.release.version} of {self.layout.model}"
        several = len(self.release.engines) > 1
        files = (self.manifest,) if several else (self.manifest, *self.digests)
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

    def copy_for(self, device: str, target: Layout) -> None:
        """Copy what a server of one kind of device needs into an empty layout of that kind.

        Raises:
            RepositoryError: the release has no engine for that kind.
            TamperedError: this repository does not hold that kind's bytes.
        """
        engine = self.release.engine_for(device)
        source = self.layout.bytes_of(self.release, engine)
        if not source.is_dir():
            raise TamperedError(f"{source} is missing: the bytes for {device} are not here.")
        version = self.release.version
        shutil.copytree(source, target.version_folder(version), symlinks=True)
        records = target.release_file(version).parent
        records.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.layout.golden_of(self.release, engine), target.golden_file(version))
        shutil.copy(self.manifest, target.release_file(version))
        if self.signature.is_file():
            shutil.copy(self.signature, target.signature_file(version))


def record_files(layout: Layout, version: int) -> tuple[Path, ...]:
    """What is here beside the bytes of a release: manifest, signature, samples, promises."""
    found = layout.release_file(version).parent.glob(f"{version}.*")
    return tuple(sorted(path for path in found if not path.is_dir()))


def spare_folders(layout: Layout, version: int) -> tuple[Path, ...]:
    """The bytes of a release for other kinds of device, as far as they are here."""
    return tuple(sorted(layout.release_file(version).parent.glob(f"{version}.engine-*")))


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
