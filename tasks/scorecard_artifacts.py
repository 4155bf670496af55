"""A scorecard on the page of its run in Prefect: candidates, evidence, and where more of it is."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.errors import TrackingError
from enginegate.evidence import Scorecard
from enginegate.report import (
    COLUMNS,
    approval_markdown,
    escape_markdown,
    row_of,
    short_digest,
)
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace
from tasks.run_page import RunArtifact, artifact_key, leave_artifacts, model_version

_log = logging.getLogger("enginegate.result")


@dataclass(frozen=True, slots=True)
class EvidencePlaces:
    """Where people see a scorecard's evidence; empty where MLflow cannot say.

    Attributes:
        page: address of the decision page.
        candidates: address of the table of candidates.
        start_command: starts the pages that both are on; empty: a server has them already.
    """

    page: str = ""
    candidates: str = ""
    start_command: str = ""


def places_of(scorecard: Scorecard, workspace: Workspace) -> EvidencePlaces:
    """The addresses of a filed scorecard in MLflow."""
    if not scorecard.mlflow_run:
        return EvidencePlaces()
    try:
        tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
        tracker.check_answers()
        link = tracker.comparison(scorecard.mlflow_run)
    except TrackingError as error:
        _log.warning("MLflow cannot be linked to: %s", error)
        return EvidencePlaces()
    return EvidencePlaces(link.page_url, link.runs_url, link.start_command)


@task(task_run_name="show-scorecard-{scorecard.model}", cache_policy=NO_CACHE)
def show_scorecard(scorecard: Scorecard, workspace: Workspace) -> None:
    """Leave the scorecard on the run's page: its table, its text, and links; once for each run."""
    places, sizes = places_of(scorecard, workspace), workspace.engine_sizes(scorecard)
    title = f"**{model_version(scorecard.model, scorecard.model_uri)}**, "
    title += f"scorecard {short_digest(scorecard)}"
    winner = f"winner {scorecard.winner}" if scorecard.winner else "no winner"
    rows = [
        dict(zip(COLUMNS, row_of(scorecard, verdict.candidate, sizes), strict=True))
        for verdict in scorecard.verdicts
    ]
    leave_artifacts(
        [
            RunArtifact(
                artifact_key("links", scorecard.model),
                "markdown",
                _links(places, scorecard),
                f"{title}: where its evidence is",
            ),
            RunArtifact(
                artifact_key("candidates", scorecard.model),
                "table",
                json.dumps(rows),
                f"{title}: {winner}",
            ),
            RunArtifact(
                artifact_key("scorecard", scorecard.model),
                "markdown",
                approval_markdown(scorecard, sizes),
                f"{title}: {winner}",
            ),
        ]
    )


def log_result(scorecard: Scorecard, policy: Path) -> None:
    """The last lines of a qualification's log: winner, why, and the next command."""
    digest = short_digest(scorecard)
    name = model_version(scorecard.model, scorecard.model_uri)
    _log.info("winner of %s: %s", name, scorecard.winner or "none")
    _log.info("why: %s", scorecard.reason)
    if scorecard.winner is None:
        _log.info("next: enginegate explain %s", digest)
    else:
        _log.info(
            "next: enginegate approve %s --reason WHY, then enginegate promote %s %s",
            digest,
            policy,
            digest,
        )


def _links(places: EvidencePlaces, scorecard: Scorecard) -> str:
    lines = [f"# {escape_markdown(model_version(scorecard.model, scorecard.model_uri))}", ""]
    if places.page:
        lines += [f"- [Decision page]({places.page}): all evidence on one page"]
    if places.candidates:
        lines += [f"- [Candidates in MLflow]({places.candidates}): a table and charts"]
    if places.start_command:
        lines += ["", "These pages are there while this runs:", "", f"    {places.start_command}"]
    if not places.page:
        lines += ["MLflow did not answer when this was written, so there is nothing to link to."]
    digest = short_digest(scorecard)
    lines += ["", "In a terminal:", "", f"    enginegate explain {digest}"]
    if scorecard.winner is not None:
        lines += [f"    enginegate approve {digest} --reason WHY"]
    return "\n".join(lines) + "\n"
