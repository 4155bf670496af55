"""The live Triton repository: stage, publish, verify, history, restore."""

from enginegate.repository.golden import Golden
from enginegate.repository.layout import Current, Layout, models
from enginegate.repository.live import LiveRepository
from enginegate.repository.staging import Package
from enginegate.repository.verify import Check, verify

__all__ = [
    "Check",
    "Current",
    "Golden",
    "Layout",
    "LiveRepository",
    "Package",
    "models",
    "verify",
]
