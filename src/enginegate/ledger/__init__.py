"""MLflow: what was found out, filed so that people can compare it, and the registry's aliases."""

from enginegate.ledger.filing import Exhibit
from enginegate.ledger.ledger import Ledger
from enginegate.ledger.link import Comparison
from enginegate.ledger.plot import plots_available

__all__ = ["Comparison", "Exhibit", "Ledger", "plots_available"]
