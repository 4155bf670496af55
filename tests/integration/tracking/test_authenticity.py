"""A scorecard made by hand: compared with what MLflow's run holds, and with its signature."""

from dataclasses import replace

import pytest

from enginegate.errors import ApprovalError, TamperedError
from enginegate.evidence import Outcome
from enginegate.policy.operating import Signing
from enginegate.repository import ReleaseSigning
from enginegate.tracking import check_authentic
from enginegate.workspace import Workspace
from tests.fakes.evidence import benchmark, finding, scorecard, verdict


@pytest.fixture
def workspace(tracker, tmp_path, monkeypatch):
    """One whose MLflow is the tests' database."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.tracking_uri)
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def signing(workspace):
    return ReleaseSigning.of(Signing(), workspace)


@pytest.fixture(scope="module")
def failed(tracker):
    """What a qualification filed, and how its file was edited: everything passed, and it won."""
    judged = (verdict(finding(Outcome.FAILED)),)
    card = scorecard(model="forged", verdicts=judged, winner=None, reason="nothing passed")
    run = tracker.record(card, {})
    filed = card.model_copy(update={"mlflow_run": run})
    won = scorecard(model="forged", mlflow_run=run)
    return filed, won


def test_edited_failed_scorecard_is_refused(failed, workspace, signing):
    """Its digest fits its content, and MLflow's run holds another; the message names both."""
    filed, edited = failed
    for card in failed:
        workspace.save_scorecard(card)
    assert workspace.scorecard(edited.digest).winner is not None

    check_authentic(filed, workspace, signing)
    with pytest.raises(TamperedError, match="is not what was filed") as refusal:
        check_authentic(edited, workspace, signing)

    assert edited.mlflow_run in str(refusal.value)
    assert filed.digest[:12] in str(refusal.value)


def test_signature_does_not_override_mlflow(failed, workspace, signing):
    """Where the two disagree, a person finds out why."""
    _, edited = failed
    assert signing.sign_record(edited, workspace.save_scorecard(edited)) == ""

    with pytest.raises(TamperedError, match="is not what was filed"):
        check_authentic(edited, workspace, signing)


@pytest.mark.parametrize(
    "case",
    [
        ({"mlflow_run": ""}, None, "it names no run of MLflow"),
        ({"mlflow_run": "0" * 32}, None, f"has no qualification {'0' * 32}"),
        ({}, "http://127.0.0.1:9", "could not be compared with MLflow: MLflow at http://127"),
    ],
    ids=["no-run", "unknown-run", "mlflow-away"],
)
def test_uncomparable_scorecard_needs_a_signature(failed, workspace, signing, monkeypatch, case):
    """Without one it is refused, and what to do is said."""
    changes, address, why = case
    card = failed[0].model_copy(update=changes)
    path = workspace.save_scorecard(card)
    if address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)

    with pytest.raises(ApprovalError, match=f"(?s){why}.*is not signed.*MLFLOW_TRACKING_URI must"):
        check_authentic(card, workspace, signing)
    assert signing.sign_record(card, path) == ""
    check_authentic(card, workspace, signing)


def test_another_keys_signature_is_none(failed, workspace, signing, tmp_path):
    """A note where the policy names no key and MLflow agrees; else a refusal."""
    card, stranger = failed[0], replace(signing, keys=tmp_path / "theirs")
    path = workspace.save_scorecard(card)
    own = workspace.save_scorecard(failed[1])
    assert signing.sign_record(failed[1], own) == ""
    assert stranger.sign_record(card, path) == ""

    check_authentic(card, workspace, signing)
    named = replace(signing, public_key=workspace.keys / "release.pub")
    for strict in (named, replace(signing, required=True)):
        with pytest.raises(TamperedError, match=r"\.sig is not valid: it is not by the key"):
            check_authentic(card, workspace, strict)


def test_contradictory_scorecard_is_not_read(workspace):
    """An outcome was edited and its numbers were forgotten."""
    late = finding(gate="p99_ms", value=80.0, limit=25.0, relation="<=", low=79.0, high=81.0)
    measured = benchmark().model_copy(update={"findings": (late,)})
    card = scorecard(benchmarks=(measured,))
    workspace.save_scorecard(card)

    with pytest.raises(Exception, match="passed with 80, which is not <= 25"):
        workspace.scorecard(card.digest)
