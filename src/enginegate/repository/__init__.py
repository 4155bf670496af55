"""The live Triton repository: stage, publish, verify, history, restore."""

from enginegate.repository.factory import open_primary, open_storage, open_target
from enginegate.repository.history.audit import (
    AuditLog,
    AuditRecord,
    origin,
    record_act,
    record_decision,
)
from enginegate.repository.history.signing import ReleaseSigning
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.object_repository import ObjectRepository
from enginegate.repository.rollout.target import StoredTarget, Target
from enginegate.repository.store.golden import Golden
from enginegate.repository.store.layout import Current, Layout, models
from enginegate.repository.store.package import Package
from enginegate.repository.verify import VerifyCheck, verify

__all__ = [
    "AuditLog",
    "AuditRecord",
    "Current",
    "Fleet",
    "Golden",
    "Layout",
    "LiveRepository",
    "ObjectRepository",
    "Package",
    "ReleaseSigning",
    "StoredTarget",
    "Target",
    "VerifyCheck",
    "models",
    "open_primary",
    "open_storage",
    "open_target",
    "origin",
    "record_act",
    "record_decision",
    "verify",
]
