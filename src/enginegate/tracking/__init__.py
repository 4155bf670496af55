"""MLflow: what was found out, filed so that people can compare it, and the registry's aliases."""

from enginegate.tracking.artifact_download import engine_of, scorecard_of
from enginegate.tracking.authenticity import check_authentic
from enginegate.tracking.delivery import (
    PROMOTION_TIMEOUT_S,
    deliver,
    state_tag,
    try_deliver,
)
from enginegate.tracking.local_ui import local_ui
from enginegate.tracking.page_filing import PageMaker
from enginegate.tracking.scorecard_logger import CandidateArtifacts
from enginegate.tracking.tracker import Tracker
from enginegate.tracking.ui_links import START_COMMAND, ComparisonLink

__all__ = [
    "PROMOTION_TIMEOUT_S",
    "START_COMMAND",
    "CandidateArtifacts",
    "ComparisonLink",
    "PageMaker",
    "Tracker",
    "check_authentic",
    "deliver",
    "engine_of",
    "local_ui",
    "scorecard_of",
    "state_tag",
    "try_deliver",
]
