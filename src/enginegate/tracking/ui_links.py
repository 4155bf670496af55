"""Where a qualification is compared in MLflow's UI, and how to start that UI.

A plain visit opens the UI in its mode for language models, so people get deep links only. The
addresses were taken from MLflow 3.17.
"""

import json
import shlex
from dataclasses import dataclass
from urllib.parse import quote

from enginegate.redact import link_base
from enginegate.tracking.connection import Connection

_UI = "http://127.0.0.1:5000"


@dataclass(frozen=True, slots=True)
class ComparisonLink:
    """Two views of one qualification's candidates.

    Attributes:
        runs_url: a chart for each metric, one bar a candidate, sorted by p99.
        compare_url: parallel coordinates, scatter plots and artifacts side by side.
        start_command: what starts the UI; empty when a tracking server shows it already.
    """

    runs_url: str
    compare_url: str
    start_command: str


def comparison_of(
    connection: Connection, experiment: str, parent: str, children: tuple[str, ...]
) -> ComparisonLink:
    """The links for a parent run and its children."""
    base = link_base(connection.tracking_uri) if connection.is_server else _UI
    runs = _query(
        workflowType="machine_learning",
        searchFilter=f"tags.\"mlflow.parentRunId\" = '{parent}'",
        orderByKey="metrics.`perf/p99_ms`",
        orderByAsc="true",
        compareRunsMode="CHART",
    )
    compared = _query(
        # MLflow's page reads it only where it comes first.
        runs=json.dumps(children),
        workflowType="machine_learning",
        experiments=json.dumps([experiment]),
    )
    return ComparisonLink(
        runs_url=f"{base}/#/experiments/{experiment}/runs?{runs}",
        compare_url=f"{base}/#/compare-runs?{compared}",
        start_command="" if connection.is_server else _start_command(connection.shown_uri),
    )


def _query(**values: str) -> str:
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in values.items())


def _start_command(tracking_uri: str) -> str:
    """Without the job runner the server takes a fifth of the memory and starts in five seconds."""
    return (
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --workers 1 --port 5000 "
        f"--backend-store-uri {shlex.quote(tracking_uri)}"
    )
