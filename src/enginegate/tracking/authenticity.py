"""Is a scorecard the one that was filed? Compared with MLflow's run, and by its signature.

A scorecard in a workspace is a file whose name is its digest, so whoever may write there can make
another one. Nobody can change MLflow's run there, or sign.
"""

from pathlib import Path

from enginegate.errors import ApprovalError, TamperedError, TrackingError
from enginegate.evidence import Scorecard
from enginegate.repository import ReleaseSigning
from enginegate.tracking.tracker import Tracker
from enginegate.workspace import Workspace


def check_authentic(scorecard: Scorecard, workspace: Workspace, signing: ReleaseSigning) -> None:
    """Refuse a scorecard that is not the one a qualification filed.

    Args:
        scorecard: as it was read here.
        workspace: where it, its signature and MLflow's address are.
        signing: with which keys, by the policy.

    Raises:
        TamperedError: MLflow's run holds another digest, or a signature does not hold.
        ApprovalError: it could not be compared with MLflow's run, and no signature verifies.
    """
    path = workspace.scorecard_file(scorecard)
    unsigned = signing.check_record(scorecard, path)
    not_compared = _compare(scorecard, path, workspace)
    if not_compared and unsigned:
        raise ApprovalError(
            f"Nothing shows that scorecard {scorecard.digest[:12]} is what a qualification found, "
            f"so it cannot be approved or promoted:\n  {not_compared}\n  {unsigned}\n"
            "Let MLflow answer (MLFLOW_TRACKING_URI must be the one that qualified), or qualify "
            "again here. Where MLflow cannot be reached, sign scorecards: [signing] in the policy."
        )


def _compare(scorecard: Scorecard, path: Path, workspace: Workspace) -> str:
    """Why it could not be compared with what MLflow holds; empty when both are the same."""
    if not scorecard.mlflow_run:
        return "it names no run of MLflow that filed it"
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    try:
        filed = tracker.filed_digest(scorecard.mlflow_run)
    except TrackingError as error:
        return f"it could not be compared with MLflow: {str(error).splitlines()[0]}"
    if filed is None:
        return (
            f"MLflow at {tracker.connection.shown_uri} has no qualification {scorecard.mlflow_run} "
            "to compare it with"
        )
    if filed != scorecard.digest:
        raise TamperedError(
            f"Scorecard {scorecard.digest[:12]} ({path}) is not what was filed: MLflow's run "
            f"{scorecard.mlflow_run} at {tracker.connection.shown_uri} holds the digest "
            f"{filed[:12] or 'none'}. One of them was changed since the qualification. Find out "
            "who changed it, and qualify again."
        )
    return ""
