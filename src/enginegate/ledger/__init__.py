"""MLflow: what was found out, filed so that people can compare it, and the registry's aliases."""

from enginegate.ledger.filing import Exhibit
from enginegate.ledger.ledger import Ledger
from enginegate.ledger.link import Comparison

__all__ = ["Comparison", "Exhibit", "Ledger"]
