"""MLflow: what was found out, filed so that people can compare it, and the registry's aliases."""

from enginegate.ledger.authenticity import check_authentic
from enginegate.ledger.fetching import engine_of, scorecard_of
from enginegate.ledger.filing import Exhibit
from enginegate.ledger.ledger import Ledger
from enginegate.ledger.link import Comparison
from enginegate.ledger.messages import (
    decision_message,
    live_message,
    state_messages,
    state_tag,
    withdrawn_message,
)
from enginegate.ledger.outbox import Outbox
from enginegate.ledger.plot import plots_available

__all__ = [
    "Comparison",
    "Exhibit",
    "Ledger",
    "Outbox",
    "check_authentic",
    "decision_message",
    "engine_of",
    "live_message",
    "plots_available",
    "scorecard_of",
    "state_messages",
    "state_tag",
    "withdrawn_message",
]
