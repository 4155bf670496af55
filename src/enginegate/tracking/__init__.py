"""MLflow: what was found out, filed so that people can compare it, and the registry's aliases."""

from enginegate.tracking.artifact_download import engine_of, scorecard_of
from enginegate.tracking.authenticity import check_authentic
from enginegate.tracking.messages import (
    decision_message,
    live_message,
    state_messages,
    state_tag,
    withdrawn_message,
)
from enginegate.tracking.outbox import Outbox
from enginegate.tracking.scorecard_logger import CandidateArtifacts
from enginegate.tracking.tracker import Ledger
from enginegate.tracking.ui_links import ComparisonLink

__all__ = [
    "CandidateArtifacts",
    "ComparisonLink",
    "Ledger",
    "Outbox",
    "check_authentic",
    "decision_message",
    "engine_of",
    "live_message",
    "scorecard_of",
    "state_messages",
    "state_tag",
    "withdrawn_message",
]
