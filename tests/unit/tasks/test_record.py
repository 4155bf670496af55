"""What is remembered of a scorecard, which is filed and signed as it is."""

from datetime import timedelta

from enginegate.evidence import Outcome
from enginegate.workspace import Workspace
from tasks.record import first_made
from tests.fakes.evidence import WHEN, finding, scorecard, verdict


def test_the_same_evidence_stays_the_scorecard_that_was_made_first(tmp_path):
    """When it was asked for, and by whom, too; an edited file is not believed and made again."""
    workspace = Workspace(tmp_path)
    failed = scorecard(verdicts=(verdict(finding(Outcome.FAILED)),), winner=None, reason="none")
    later = failed.model_copy(update={"created_at": WHEN + timedelta(hours=1)})
    assert first_made(failed, workspace) == first_made(later, workspace) == failed

    (path,) = workspace.results.rglob("*.json")
    path.write_bytes(scorecard().pretty_json())

    assert first_made(later, workspace) == later
    assert first_made(failed, workspace) == later
