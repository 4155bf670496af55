"""What hosts share in object storage: folders of the content store, and parts of qualifications."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from enginegate.object_storage import ObjectStore, SharedFolders
from enginegate.retention.plan import EntryKind, StoredEntry

_FOLDERS: dict[str, EntryKind] = {"engines": "shared engine", "onnx": "shared onnx"}
_PARTS = "parts/"


@dataclass(frozen=True, slots=True)
class SharedListing:
    """What is in the storage that ``ENGINEGATE_STORE`` names, and in the stores of devices.

    Attributes:
        part_stores: URLs that workers leave parts in.
    """

    part_stores: tuple[str, ...] = ()

    def entries(self) -> Iterator[StoredEntry]:
        """Everything that could be deleted.

        An object of a folder is named after its content, so references know it by that.

        Raises:
            EnginegateError: storage cannot be read.
        """
        for folders in _shared():
            for each in folders.folders():
                names = frozenset({each.name, *each.objects})
                yield StoredEntry(
                    kind=_FOLDERS[folders.kind],
                    place=f"{folders.store.url}/{folders.kind}/{each.name}",
                    size_bytes=each.size_bytes,
                    used_at=each.used_at,
                    names=names,
                )
        for url in self.part_stores:
            for found in ObjectStore(url).entries(_PARTS):
                key = found.key.removeprefix(_PARTS).partition(".")[0]
                yield StoredEntry(
                    kind="shared part",
                    place=f"{url.rstrip('/')}/{found.key}",
                    size_bytes=found.size_bytes,
                    used_at=found.modified_at,
                    names=frozenset({key}),
                )

    def delete_unused(self, entry: StoredEntry, unused_since: datetime) -> bool:
        """Delete an entry of this listing unless it was used since; whether it is gone.

        Raises:
            EnginegateError: storage refuses.
        """
        for folders in _shared():
            if _FOLDERS[folders.kind] == entry.kind:
                return folders.delete_unused(entry.place.rpartition("/")[2], unused_since)
        url, _, name = entry.place.rpartition(f"/{_PARTS}")
        store, key = ObjectStore(url), f"{_PARTS}{name}"
        if any(found.modified_at >= unused_since for found in store.entries(key)):
            return False
        store.delete(key)
        return True


def _shared() -> Iterator[SharedFolders]:
    found = (SharedFolders.of_environment(kind) for kind in _FOLDERS)
    return (folders for folders in found if folders is not None)
