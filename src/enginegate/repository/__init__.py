"""The live Triton repository: stage, publish, verify, history, restore."""

from enginegate.repository.audit import AuditLog, Deed, origin, record_decision, record_deed
from enginegate.repository.fleet import Fleet
from enginegate.repository.golden import Golden
from enginegate.repository.layout import Current, Layout, models
from enginegate.repository.live import LiveRepository
from enginegate.repository.objects import ObjectRepository
from enginegate.repository.opening import open_lead
from enginegate.repository.signing import ReleaseSigning
from enginegate.repository.staging import Package
from enginegate.repository.targets import LiveTarget, open_repository, open_storage
from enginegate.repository.verify import Check
from enginegate.repository.verify_target import verify

__all__ = [
    "AuditLog",
    "Check",
    "Current",
    "Deed",
    "Fleet",
    "Golden",
    "Layout",
    "LiveRepository",
    "LiveTarget",
    "ObjectRepository",
    "Package",
    "ReleaseSigning",
    "models",
    "open_lead",
    "open_repository",
    "open_storage",
    "origin",
    "record_decision",
    "record_deed",
    "verify",
]
