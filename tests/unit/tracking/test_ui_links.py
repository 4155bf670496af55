"""Links into MLflow's UI."""

from pathlib import Path
from urllib.parse import unquote

import pytest

from enginegate.tracking import Tracker
from enginegate.tracking.connection import Connection
from enginegate.tracking.ui_links import comparison_of, usual_port


def test_database_needs_a_ui():
    """For a database the links come with the command that starts the UI where they lead."""
    database = "sqlite:////data/my mlflow.db"
    links = comparison_of(Connection(database, Path("a")), "7", "0123456789abcdef", ("x",))
    base = f"http://127.0.0.1:{usual_port(database)}/#"

    assert links.runs_url == (
        f"{base}/experiments/7/runs?workflowType=machine_learning"
        "&viewStateShareKey=enginegate-0123456789ab"
    )
    assert links.charts_url == f"{links.runs_url}&compareRunsMode=CHART"
    assert links.page_url == (
        f"{base}/experiments/7/runs/0123456789abcdef/artifacts/decision.html"
        "?workflowType=machine_learning"
    )
    assert links.start_command == "enginegate ui"


def test_compare_page_names_its_runs_first():
    """MLflow's page breaks where another key of the query comes before them."""
    links = comparison_of(Connection("http://mlflow.local", Path("a")), "7", "p", ("x",))

    assert unquote(links.compare_url) == (
        'http://mlflow.local/#/compare-runs?runs=["x"]'
        '&workflowType=machine_learning&experiments=["7"]'
    )


def test_port_is_the_databases_own():
    """Always one and the same, so that a link which was filed leads there weeks later."""
    ports = {usual_port(f"sqlite:////data/{name}.db") for name in ("a", "b", "c")}

    assert len(ports) == 3
    assert all(20_000 <= port < 30_000 for port in ports)


def test_server_is_its_own_ui():
    """For a tracking server the links lead there, and nothing needs to be started."""
    links = comparison_of(Connection("http://mlflow.local:80/", Path("a")), "7", "p", ())

    assert links.runs_url.startswith("http://mlflow.local:80/#/experiments/7/runs?")
    assert links.page_url.startswith("http://mlflow.local:80/#/experiments/7/runs/p/artifacts/")
    assert links.start_command == ""


def test_links_do_not_carry_how_to_sign_in():
    """They go to Prefect's artifacts and onto pages; a query in the middle would break them too."""
    uri = "https://ada:secret@mlflow.local/team?token=t0ken"
    links = comparison_of(Connection(uri, Path("a")), "7", "p", ())

    assert links.runs_url.startswith("https://mlflow.local/team/#/experiments/7/runs?")
    assert "secret" not in f"{links}"
    assert "t0ken" not in f"{links}"


@pytest.mark.parametrize(
    ("uri", "server"),
    [
        ("sqlite:////data/mlflow.db", False),
        ("postgresql+psycopg2://ada:secret@db/mlflow", False),
        ("http://127.0.0.1:5000", True),
        ("databricks", True),
    ],
)
def test_artifact_location_depends_on_the_server(uri, server):
    """Behind a server the server decides; with a database we do."""
    assert Connection(uri, Path("a")).is_server is server


def test_passwords_are_not_shown():
    """A tracking URI appears in messages, so its password does not."""
    tracker = Tracker("postgresql://ada:secret@db/mlflow", Path("a"))

    assert tracker.connection.shown_uri == "postgresql://***@db/mlflow"
