"""Where a qualification is seen in MLflow's UI, and the command that starts that UI.

A plain visit opens the UI in its mode for language models, so people get deep links only. The
addresses were taken from MLflow 3.17.
"""

import json
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

from enginegate.redact import link_base
from enginegate.tracking.connection import Connection

DECISION_PAGE = "decision.html"
START_COMMAND = "enginegate ui"
# Below the ports that Linux, macOS and Windows give to outgoing connections, so that the port of a
# link which was filed weeks ago is free; each database has its own, so that two never mix.
_FIRST_PORT, _PORTS = 20_000, 10_000
_TRAINING = {"workflowType": "machine_learning"}


@dataclass(frozen=True, slots=True)
class ComparisonLink:
    """Views of one qualification.

    Attributes:
        runs_url: its candidates as a table, the winner first.
        charts_url: its section of charts.
        compare_url: parallel coordinates, scatter plots and artifacts side by side.
        page_url: the decision page.
        start_command: starts the UI that the links lead to; empty where a server shows it already.
    """

    runs_url: str
    charts_url: str
    compare_url: str
    page_url: str
    start_command: str


def comparison_of(
    connection: Connection,
    experiment: str,
    parent: str,
    children: tuple[str, ...],
    base: str = "",
) -> ComparisonLink:
    """The links for a parent run and its children.

    Args:
        connection: to MLflow.
        experiment: its id.
        parent: the parent run's id.
        children: ids of the candidates' runs.
        base: where a UI was started; empty: where one is started as a rule.
    """
    base = base or ui_base(connection)
    compared = _query(
        # MLflow's page reads it only where it comes first.
        runs=json.dumps(children),
        **_TRAINING,
        experiments=json.dumps([experiment]),
    )
    return ComparisonLink(
        runs_url=f"{base}/{runs_place(experiment, parent)}",
        charts_url=f"{base}/{runs_place(experiment, parent)}&compareRunsMode=CHART",
        compare_url=f"{base}/#/compare-runs?{compared}",
        page_url=f"{base}/{page_place(experiment, parent)}",
        start_command="" if connection.is_server else START_COMMAND,
    )


def view_key(run: str) -> str:
    """The key of a qualification's shared view, by its parent run."""
    return f"enginegate-{run[:12]}"


def runs_place(experiment: str, parent: str) -> str:
    """The shared view of a qualification, relative to MLflow's UI: for notes that MLflow shows."""
    query = _query(**_TRAINING, viewStateShareKey=view_key(parent))
    return f"#/experiments/{experiment}/runs?{query}"


def page_place(experiment: str, parent: str) -> str:
    """The decision page of a parent run as MLflow's UI shows it, relative to the UI.

    Through the UI also for a database, where it is there while `enginegate ui` runs: browsers open
    no ``file://`` link from Prefect's pages or MLflow's.
    """
    page = f"#/experiments/{experiment}/runs/{parent}/artifacts/{DECISION_PAGE}"
    return f"{page}?{_query(**_TRAINING)}"


def ui_base(connection: Connection) -> str:
    """The UI's address: the tracking server's own, or the one `enginegate ui` listens at first."""
    if connection.is_server:
        return link_base(connection.tracking_uri)
    return f"http://127.0.0.1:{usual_port(connection.tracking_uri)}"


def usual_port(tracking_uri: str) -> int:
    """The loopback port at which a database's UI is started unless another program has it."""
    digest = sha256(tracking_uri.encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _PORTS


def _query(**values: str) -> str:
    return "&".join(f"{name}={quote(value, safe='')}" for name, value in values.items())
