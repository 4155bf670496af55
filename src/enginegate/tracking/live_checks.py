"""Checks at a live release in MLflow: one run a release, numbers over time beside the promise."""

from enginegate.decision import Promise, Release
from enginegate.repository.history.broken_promises import ShownState
from enginegate.tracking.connection import Connection
from enginegate.tracking.scorecard_logger import experiment_name
from enginegate.watch.log import WatchCheck

_PERCENT = 100.0
_DECIMALS = 6


def log_check(
    connection: Connection, check: WatchCheck, release: Release, state: ShownState, promise: Promise
) -> str:
    """Add a check to its release's run, which is made by the first one; the run's id.

    Its numbers are the check's; the run's gate and note are the release's state.
    """
    from mlflow.entities import Metric, RunTag  # noqa: PLC0415

    stamp = int(check.at.timestamp() * 1000)
    run = _run_of(connection, release)
    connection.client.log_batch(
        run,
        metrics=[
            Metric(name, round(value, _DECIMALS), stamp, check.number)
            for name, value in live_metrics(check, promise).items()
        ],
        tags=[RunTag(name, text) for name, text in state_tags(state).items()],
    )
    return run


def state_tags(state: ShownState) -> dict[str, str]:
    """What a release's run shows of its state: *failed* until a person acknowledges it."""
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


def live_metrics(check: WatchCheck, promise: Promise) -> dict[str, float]:
    """A check's numbers by their name in MLflow; what was promised is logged at every step too."""
    reading = check.reading
    found: dict[str, float | None] = {
        "gate/outcome_0_is_passed": float(check.outcome),
        "live/slo_p99_ms": promise.slo_p99_ms,
        "live/promised_per_s": promise.throughput_per_s,
        "live/promised_server_ms": promise.server_ms,
        "live/promised_p50_ms": promise.p50_ms,
    }
    if reading is not None:
        ended = max(reading.answered + reading.failed, 1)
        memory = reading.gpu_memory_share
        found |= {
            "live/arrived_per_s": reading.arrived_per_s,
            "live/answered_per_s": reading.answered / reading.lasted_s,
            "live/failed_pct": _PERCENT * reading.failed / ended,
            "live/server_ms": reading.server_ms,
            "live/queue_ms": reading.queue_ms,
            "live/pending_requests": reading.pending,
            "live/gpu_memory_pct": None if memory is None else _PERCENT * memory,
            "live/probe_median_ms": reading.probe.median_ms,
            "live/probe_slowest_ms": reading.probe.slowest_ms,
        }
    for finding in check.findings:
        if finding.gate in {"agreement", "slice_agreement"} and finding.value is not None:
            found[f"live/{finding.gate}_pct"] = _PERCENT * finding.value
        elif finding.gate == "input_drift":
            found["live/input_drift_psi"] = finding.value
    return {name: float(value) for name, value in found.items() if value is not None}
