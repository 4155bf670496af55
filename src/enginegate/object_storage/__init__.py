"""The one door to object storage: S3, Google Cloud Storage and Azure Blob Storage."""

from enginegate.object_storage.client import ObjectEntry, ObjectStore, Stored
from enginegate.object_storage.folders import SharedFolders, fetch_or_make
from enginegate.object_storage.providers import OBJECT_URL

__all__ = ["OBJECT_URL", "ObjectEntry", "ObjectStore", "SharedFolders", "Stored", "fetch_or_make"]
