"""What one kind of device's workers found out: kept, gathered, and carried between machines."""

from enginegate.devices.bundle import fetch_part, known_part, push_part, read_bundle, write_bundle
from enginegate.devices.part import (
    DeviceQualification,
    PartIdentity,
    PartStore,
    StoredEngine,
    stored_engine,
)

__all__ = [
    "DeviceQualification",
    "PartIdentity",
    "PartStore",
    "StoredEngine",
    "fetch_part",
    "known_part",
    "push_part",
    "read_bundle",
    "stored_engine",
    "write_bundle",
]
