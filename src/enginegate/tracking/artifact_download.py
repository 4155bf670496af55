"""Getting back from MLflow what another machine's workspace held: scorecards and engines.

A promotion that was suspended on one machine may go on where nothing was qualified.
"""

import re
import tempfile
from pathlib import Path

from enginegate.atomic_io import new_folder
from enginegate.candidate import Engine, Sha256
from enginegate.errors import EnginegateError, InputError, ModelError
from enginegate.evidence import Scorecard
from enginegate.tracking.connection import Connection
from enginegate.tracking.tracker import Tracker
from enginegate.workspace import Workspace

_SHARE = (
    "Give this machine the same ENGINEGATE_HOME as the one that qualified the model, or the same "
    "MLFLOW_TRACKING_URI."
)
_REFERENCE = re.compile(r"[0-9a-f]{6,64}")


def scorecard_of(workspace: Workspace, reference: str) -> Scorecard:
    """A scorecard of the workspace, else of MLflow; then the workspace has it too.

    Raises:
        InputError: neither has it, or the workspace's was changed; the message says what to share.
    """
    here = workspace.root / "scorecards"
    try:
        return workspace.scorecard(reference)
    except InputError as error:
        if not _REFERENCE.fullmatch(reference) or any(here.glob(f"{reference}*.json")):
            raise
        try:
            found = _fetched_scorecard(_tracker(workspace), reference)
        except EnginegateError as refusal:
            raise InputError(f"{error}\nNor could MLflow be asked: {refusal}\n{_SHARE}") from error
        if found is None:
            raise InputError(f"{error}\nNor does MLflow have it. {_SHARE}") from error
        workspace.save_scorecard(found)
        return found


def engine_of(workspace: Workspace, scorecard: Scorecard, sha256: Sha256) -> tuple[Engine, Path]:
    """An engine of the workspace's store, else of MLflow, and its folder; the digest is checked.

    Raises:
        InputError: neither has it; the message says what to share.
        TamperedError: its bytes are not what its manifest says.
    """
    try:
        return workspace.engine(sha256)
    except InputError as error:
        try:
            _fetch_engine(_tracker(workspace), scorecard, sha256, workspace.engines)
        except EnginegateError as refusal:
            raise InputError(f"{error}\nNor could MLflow give it: {refusal}\n{_SHARE}") from error
    return workspace.engine(sha256)


def _tracker(workspace: Workspace) -> Tracker:
    return Tracker(workspace.tracking_uri, workspace.artifacts)


def _fetched_scorecard(tracker: Tracker, reference: str) -> Scorecard | None:
    tracker.check_answers()
    with tracker.connection.explained(f"look for the scorecard {reference}"):
        experiments = tracker.client.search_experiments(filter_string="name LIKE 'promotions/%'")
        runs = tracker.client.search_runs(
            [experiment.experiment_id for experiment in experiments],
            filter_string=f"tags.scorecard_sha256 LIKE '{reference}%' "
            "and tags.kind = 'qualification'",
        )
        if len(runs) != 1:
            return None
        with tempfile.TemporaryDirectory(prefix="enginegate-mlflow-") as folder:
            path = tracker.client.download_artifacts(runs[0].info.run_id, "scorecard.json", folder)
            found = Scorecard.read(Path(path))
    return found if found.digest.startswith(reference) else None


def _fetch_engine(tracker: Tracker, scorecard: Scorecard, sha256: Sha256, store: Path) -> None:
    tracker.check_answers()
    with (
        tracker.connection.explained(f"give back the engine {sha256[:12]}"),
        tempfile.TemporaryDirectory(prefix="enginegate-mlflow-") as scratch,
    ):
        engine = _filed_manifest(tracker, scorecard, sha256, scratch)
        if engine.external:
            raise ModelError(
                f"{engine.candidate} has weight files beside it, which MLflow does not hold."
            )
        location = _location(tracker, scorecard, sha256)
        with new_folder(store / sha256) as folder:
            _download(tracker.connection, f"{location}/{engine.filename}", folder)
            engine.check(folder)
            (folder / "manifest.json").write_bytes(engine.pretty_json())


def _filed_manifest(tracker: Tracker, scorecard: Scorecard, sha256: Sha256, scratch: str) -> Engine:
    """The manifest of an engine, from the run of its candidate."""
    parent = scorecard.mlflow_run
    experiment = tracker.client.get_run(parent).info.experiment_id
    children = tracker.client.search_runs(
        [experiment], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'"
    )
    for run in children:
        if tracker.client.list_artifacts(run.info.run_id, "engine"):
            folder = Path(scratch, run.info.run_id)
            folder.mkdir()
            path = tracker.client.download_artifacts(
                run.info.run_id, "engine/manifest.json", str(folder)
            )
            engine = Engine.read(Path(path))
            if engine.file.sha256 == sha256:
                return engine
    raise ModelError(f"The run {parent} has no engine {sha256[:12]}.")


def _location(tracker: Tracker, scorecard: Scorecard, sha256: Sha256) -> str:
    experiment = tracker.client.get_run(scorecard.mlflow_run).info.experiment_id
    found = tracker.client.search_logged_models(
        [experiment], filter_string=f"tags.sha256 = '{sha256}'"
    )
    if not found:
        raise ModelError(f"MLflow has no logged model with the engine {sha256[:12]}.")
    return str(found[0].artifact_location)


def _download(connection: Connection, uri: str, folder: Path) -> None:
    from mlflow.artifacts import download_artifacts  # noqa: PLC0415

    download_artifacts(artifact_uri=uri, dst_path=str(folder), tracking_uri=connection.tracking_uri)
