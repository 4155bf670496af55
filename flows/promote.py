"""Scorecard -> a person's decision -> the live repository, as one transaction."""

from pathlib import Path

from prefect import flow
from prefect.transactions import transaction

from enginegate.decision import Release, check_decision
from enginegate.errors import PublishError
from enginegate.policy import read_policy
from enginegate.workspace import Workspace, now
from flows.approval import decision_on
from tasks.release import PUBLISHED, UNDO, Publication, already_live, move_champion, publish


@flow(name="promote", persist_result=False, validate_parameters=False)
def promote(policy: Path, scorecard: str) -> Release:
    """Publish the winner of a scorecard that a person approved.

    Args:
        policy: the model family's policy file.
        scorecard: digest (or its beginning) of the scorecard that was approved.

    Raises:
        ApprovalError: nobody approved exactly this scorecard, or no longer validly.
        RepositoryError: another release is live than when the evidence was made.
        PublishError: the release did not prove itself; what was live is live.
    """
    rules, workspace = read_policy(Path(policy)), Workspace.here()
    publication = Publication(rules, workspace.scorecard(scorecard))
    live = already_live(publication)
    if live is not None:
        move_champion(live)
        return live
    decision = decision_on(publication.evidence, rules, workspace)
    approved = check_decision(decision, publication.evidence, rules.approval, now=now())
    return _publish(publication.approved_by(approved))


def _publish(publication: Publication) -> Release:
    with transaction() as change:
        change.set(UNDO, publication)
        release = publish(publication)
        change.set(PUBLISHED, release)
        move_champion(release)
    if not change.is_committed():
        raise PublishError("The promotion was rolled back; the log above says why.")
    return release
