"""What runs leave in Prefect for people: a scorecard, and what is live of a model.

A scorecard is left once on the page of each run that it is about: its candidates, all of its
evidence, and where more of it is. What is live has one key for each model.
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import Candidate
from enginegate.errors import EnginegateError, TrackingError
from enginegate.evidence import Scorecard
from enginegate.messages import escape_markdown
from enginegate.policy.operating import LiveTables
from enginegate.report import (
    EngineSizes,
    approval_markdown,
    change_heading,
    live_timeline,
    row_of,
    short_digest,
)
from enginegate.repository import AuditLog, Layout
from enginegate.tracking import Tracker
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace
from tasks.run_page import RunArtifact, artifact_key, extend_history, leave_artifacts, model_version

_BRACKETS = re.compile(r" \([^()]*\)")
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
    rows = [_table_row(scorecard, candidate, sizes) for candidate in _winner_first(scorecard)]
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


def _winner_first(scorecard: Scorecard) -> list[Candidate]:
    named = [verdict.candidate for verdict in scorecard.verdicts]
    return sorted(
        named,
        key=lambda each: (each != scorecard.winner, scorecard.outcome(each), named.index(each)),
    )


def _table_row(scorecard: Scorecard, candidate: Candidate, sizes: EngineSizes) -> dict[str, str]:
    """A row without intervals, which the scorecard has: Prefect cuts a wide table at the right."""
    row = row_of(scorecard, candidate, sizes)
    shown = {
        "candidate": row.candidate,
        "outcome": row.outcome,
        "rate, req/s": row.throughput,
        "p99, ms": row.p99,
        change_heading(scorecard).replace("acc.", "accuracy"): row.accuracy,
        "size": row.size,
    }
    return {
        name: text if name == "candidate" else _BRACKETS.sub("", text)
        for name, text in shown.items()
    }


@task(task_run_name="show-live-{tables.model}", cache_policy=NO_CACHE)
def show_live(tables: LiveTables, policy: Path, workspace: Workspace) -> str:
    """Show in Prefect what is live and whether it keeps its promise; the state in a few words.

    The artifact of the model's key is renewed while nothing happens, and gets a successor when
    something does. A repository that cannot be read is others' to report.
    """
    try:
        return _show_live(tables, policy, workspace)
    except EnginegateError as error:
        _log.warning("Prefect is not shown what is live: %s", error)
    except Exception:  # noqa: BLE001 - logged whole
        # It is shown last, and what was published or rolled back before it stands.
        _log.exception("Prefect is not shown what is live of %s", tables.model)
    return "not read"


def _show_live(tables: LiveTables, policy: Path, workspace: Workspace) -> str:
    layout = Layout(tables.target.repository, tables.model)
    current = layout.current()
    release = layout.release(current.version) if current else None
    checks = WatchLog.at(workspace, release).read() if release else ()
    events = AuditLog(layout.root).of(tables.model) if layout.root.is_dir() else ()
    held = layout.held_to(release) if release else None
    shown = live_timeline(tables.model, held, events, checks, policy=str(policy))
    place = tables.target.objects or str(layout.root.resolve())
    extend_history(
        RunArtifact(
            artifact_key("live", tables.model), "markdown", shown.markdown, shown.state, place
        )
    )
    return shown.word


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
