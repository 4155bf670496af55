"""The decision page in MLflow: filed beside its scorecard, and anew when something happened to it.

What draws the page is given, since tracking and reporting do not import one another. A tag of the
run says which events its page shows, so that nothing is written where nothing happened.
"""

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from enginegate.atomic_io import write_file
from enginegate.evidence import Scorecard
from enginegate.records import sha256_bytes
from enginegate.repository.store.scorecard_history import ScorecardHistory
from enginegate.tracking.connection import Connection
from enginegate.tracking.ui_links import DECISION_PAGE, comparison_of

SHOWS_TAG = "decision_page.shows"
_DIGEST_LENGTH = 16
_log = logging.getLogger("enginegate.tracking")


class PageMaker(Protocol):
    """Draws a scorecard's decision page as HTML."""

    def __call__(
        self,
        scorecard: Scorecard,
        found: ScorecardHistory,
        links: Mapping[str, str],
    ) -> str:
        """The whole page.

        Args:
            scorecard: as it is filed.
            found: what the repository and the workspace know of it.
            links: where MLflow shows it: words -> address.
        """


def file_page(
    connection: Connection,
    scorecard: Scorecard,
    history: ScorecardHistory,
    make_page: PageMaker,
) -> bool:
    """File a scorecard's page at its run's root, if it shows something else than the filed one.

    Returns:
        Whether it was filed. Not where MLflow has no run of the scorecard, where nothing happened
        to it since, or where it cannot be drawn, which is logged.
    """
    run = scorecard.mlflow_run
    found = connection.found(lambda client: client.get_run(run)) if run else None
    if found is None:
        return False
    at = comparison_of(connection, str(found.info.experiment_id), run, ())
    links = {"Candidates compared in MLflow": at.runs_url, "charts": at.charts_url}
    try:
        page = make_page(scorecard, history, links).encode()
    except Exception:  # noqa: BLE001 - logged whole
        # A page that cannot be drawn must not undo the promotion that it would show.
        _log.exception("The decision page of scorecard %s was not drawn", scorecard.digest[:12])
        return False
    shows = sha256_bytes(page)[:_DIGEST_LENGTH]
    if found.data.tags.get(SHOWS_TAG) == shows:
        return False
    with tempfile.TemporaryDirectory(prefix="enginegate-page-") as folder:
        path = Path(folder, DECISION_PAGE)
        write_file(path, page)
        connection.client.log_artifact(run, str(path))
    connection.client.set_tag(run, SHOWS_TAG, shows)
    return True


def is_page_filed(connection: Connection, run: str) -> bool:
    """Whether a run has a decision page; runs of earlier versions have none."""
    return SHOWS_TAG in connection.client.get_run(run).data.tags
