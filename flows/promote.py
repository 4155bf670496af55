"""Scorecard -> a person's decision -> the live repository, as one transaction."""

from pathlib import Path

from prefect import flow
from prefect.transactions import transaction

from enginegate.approval_rules import check_decision
from enginegate.atomic_io import mark_used
from enginegate.decision import Release
from enginegate.errors import ApprovalError, PublishError, TamperedError
from enginegate.evidence import Scorecard
from enginegate.policy import Policy, read_policy
from enginegate.repository import ReleaseSigning
from enginegate.retention import marked_as_running
from enginegate.tracking import check_authentic, scorecard_of
from enginegate.workspace import Workspace, now
from flows.approval import decisions_on
from flows.notices import notify_of_releases
from flows.run_names import promotion_name, promotion_title
from flows.states import (
    ALREADY_LIVE,
    PROMISE_RENEWED,
    completed_as,
    end_of_refusal,
    failed_as,
)
from tasks.artifacts import show_live
from tasks.expired_approvals import note_expired_approvals
from tasks.release import (
    PUBLISHED,
    UNDO,
    Publication,
    already_live,
    move_champion,
    publish,
    refuse,
    renew_promise,
)
from tasks.release_events import announce_releases
from tasks.run_page import rename_run


@flow(
    name="promote",
    flow_run_name=promotion_name,
    persist_result=False,
    validate_parameters=False,
)
def promote(policy: Path, scorecard: str) -> Release:
    """Publish the winner of a scorecard that a person approved.

    If the very bytes are live already, nothing is published: the live release is held to the
    scorecard's promise from then on.

    Args:
        policy: the model family's policy file.
        scorecard: digest (or its beginning) of the scorecard that was approved.

    Raises:
        ApprovalError: nobody approved exactly this scorecard, or no longer validly; or nothing
            shows that it is what a qualification found.
        TamperedError: the scorecard is not what MLflow's run holds.
        RepositoryError: another release is live than when the evidence was made.
        PublishError: the release did not prove itself; what was live is live.
    """
    opened = read_policy(Path(policy))
    workspace, tables = Workspace.of(opened), opened.live_tables
    note_expired_approvals(tables, workspace)
    announce_releases(tables.target.repository, workspace)
    with marked_as_running(workspace, "promote", scorecard):
        evidence = scorecard_of(workspace, scorecard)
        mark_used(workspace.scorecard_file(evidence))
        return _promote(_publication(opened, evidence, workspace), opened, policy)


def _promote(publication: Publication, opened: Policy, policy: Path) -> Release:
    tables, workspace = publication.tables, publication.workspace
    rename_run(promotion_title(publication.evidence))
    given = workspace.decisions(publication.evidence.digest)
    live = already_live(publication.approved_by(given))
    if live is not None and not publication.gives_promise(live):
        move_champion(tables, workspace)
        return completed_as(ALREADY_LIVE, live, f"release {live.version} serves these very bytes")
    try:
        signing = ReleaseSigning.of(tables.signing, workspace)
        check_authentic(publication.evidence, workspace, signing)
    except (ApprovalError, TamperedError) as error:
        refuse(publication, str(error))
        return failed_as(end_of_refusal(error), error, Release)
    try:
        answers = decisions_on(publication.evidence, opened, workspace)
        approvals = check_decision(
            answers.decisions,
            publication.evidence,
            opened.approval,
            now=now(),
            record=answers.record,
        )
    except ApprovalError as error:
        refuse(publication, str(error))
        return failed_as(end_of_refusal(error), error, Release)
    approved = publication.approved_by(approvals)
    # Only now it is known which candidate people approved, and they may have taken hours.
    live = already_live(approved)
    if live is None:
        return _publish(approved, policy)
    renewed = renew_promise(approved, live)
    move_champion(tables, workspace)
    show_live(tables, policy, workspace)
    return completed_as(
        PROMISE_RENEWED, live, f"release {live.version} is now held to {renewed.promise}"
    )


def _publication(policy: Policy, evidence: Scorecard, workspace: Workspace) -> Publication:
    return Publication(
        tables=policy.live_tables,
        policy_sha256=policy.with_model(evidence.model_uri).digest,
        options=policy.serving,
        ensemble=policy.ensemble,
        samples=policy.data.evaluation,
        slo_p99_ms=policy.slo.p99_ms,
        workspace=workspace,
        evidence=evidence,
    )


def _publish(publication: Publication, policy: Path) -> Release:
    tables, workspace = publication.tables, publication.workspace
    try:
        with transaction() as change:
            change.set(UNDO, publication)
            release = publish(publication)
            change.set(PUBLISHED, release)
            move_champion(tables, workspace)
    finally:
        # A release that was rolled back was live for a moment.
        announce_releases(tables.target.repository, workspace)
        show_live(tables, policy, workspace)
        notify_of_releases(tables, workspace)
    if not change.is_committed():
        raise PublishError("The promotion was rolled back; the log above says why.")
    return release
