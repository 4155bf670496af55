"""MLflow's pages of the comparison: a link where a server shows them, else MLflow's UI itself."""

import time

from rich.console import Console

from enginegate.evidence import Scorecard
from enginegate.tracking import ComparisonLink, Tracker, local_ui
from enginegate.workspace import Workspace

_ALIVE_EVERY_S = 1.0


def show_ui(
    workspace: Workspace, scorecard: Scorecard | None, port: int | None, out: Console
) -> None:
    """Print where candidates are compared; for a database, run MLflow's UI until Ctrl-C.

    Args:
        workspace: with MLflow's address.
        scorecard: whose candidates; None: of the newest one that was filed.
        port: on loopback; None: the one that filed links lead to, else any free one.
        out: where it is printed.

    Raises:
        InputError: nothing was recorded yet, or the port is taken.
        TrackingError: MLflow cannot be reached, or its UI does not start.
    """
    tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
    shown = scorecard or next((c for c in reversed(workspace.scorecards()) if c.mlflow_run), None)
    if tracker.connection.is_server:
        _print_links(tracker, shown, "", out)
        return
    with local_ui(tracker.connection, workspace.logs / "mlflow-ui.log", port) as ui:
        out.print(f"MLflow shows {tracker.connection.shown_uri} at:", markup=False, soft_wrap=True)
        out.print(f"  {ui.address}/#/experiments?workflowType=machine_learning", soft_wrap=True)
        _print_links(tracker, shown, ui.address, out)
        if not ui.usual:
            out.print(
                "Links that were filed earlier lead to another port, which another program has "
                "now, or which --port replaced."
            )
        try:
            out.print("Ctrl-C stops it.")
            while True:
                time.sleep(_ALIVE_EVERY_S)
                ui.check_runs()
        except KeyboardInterrupt:
            out.print("\nMLflow's UI was stopped.")


def _print_links(tracker: Tracker, shown: Scorecard | None, base: str, out: Console) -> None:
    if shown is None or not shown.mlflow_run:
        out.print("No scorecard of this workspace is in MLflow yet.")
        return
    links: ComparisonLink = tracker.comparison(shown.mlflow_run, base)
    named = f"{shown.model_uri}, scorecard {shown.digest[:12]}"
    for words, address in (
        (f"Candidates of {named}, the winner first:", links.runs_url),
        ("their charts:", links.charts_url),
        ("decision page:", links.page_url),
    ):
        out.print(words, markup=False)
        out.print(f"  {address}", markup=False, soft_wrap=True)
