"""Checks of a live release in MLflow: one run a release, numbers over time beside the promise."""

from enginegate.decision import Promise, Release
from enginegate.repository.history.broken_promises import ShownState
from enginegate.tracking.connection import Connection
from enginegate.tracking.metrics import live_metrics
from enginegate.tracking.scorecard_logger import experiment_name
from enginegate.watch.log import WatchCheck


def log_check(
    connection: Connection, check: WatchCheck, release: Release, state: ShownState, promise: Promise
) -> str:
    """Add a check to its release's run, which the first check makes; the run's id.

    The numbers are the check's; the run's gate and note are the release's state.
    """
    from mlflow.entities import Metric, RunTag  # noqa: PLC0415

    stamp = int(check.at.timestamp() * 1000)
    run = _run_of(connection, release)
    connection.client.log_batch(
        run,
        metrics=[
            Metric(name, value, stamp, check.number)
            for name, value in live_metrics(check, promise).items()
        ],
        tags=[RunTag(name, text) for name, text in state_tags(state).items()],
    )
    return run


def state_tags(state: ShownState) -> dict[str, str]:
    """The tags of a release's run: *failed* until a person acknowledges it."""
    return {"gate": state.word, "mlflow.note.content": str(state)}


def watch_run(connection: Connection, model: str, release_sha256: str) -> str | None:
    """The run of a release's checks; None: none was ever filed."""
    found = connection.client.search_runs(
        [connection.experiment(experiment_name(model))],
        filter_string=f"tags.kind = 'watch' and tags.release_sha256 = '{release_sha256}'",
    )
    return str(found[0].info.run_id) if found else None


def _run_of(connection: Connection, release: Release) -> str:
    experiment = connection.experiment(experiment_name(release.model))
    found = watch_run(connection, release.model, release.digest)
    if found is not None:
        return found
    tags = {
        "kind": "watch",
        "release_sha256": release.digest,
        "scorecard_sha256": release.scorecard_sha256,
        "model": release.model,
        "model_uri": release.model_uri,
        "release": str(release.version),
    }
    with connection.run(experiment, f"{release.model} release {release.version} live", tags) as run:
        return run
