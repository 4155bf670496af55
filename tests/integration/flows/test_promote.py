"""The promote and rollback flows on a live Triton, with and without a person."""

import io
import re
import shutil

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.exceptions import Pause
from prefect.flow_runs import resume_flow_run
from rich.console import Console
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.cli.live.release import roll_back_live
from enginegate.errors import ApprovalError, RepositoryError, TamperedError, TrackingError
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.repository import AuditLog, Layout, open_target, verify
from enginegate.tracking import Tracker, deliver
from enginegate.triton.endpoint import live_addresses, live_client
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace, now
from flows.answer import resume_suspended
from flows.approval import ApprovalForm, _candidate
from flows.promote import _publication, promote
from flows.qualify import qualify
from flows.rollback import rollback
from flows.watch import watch
from tests.fakes.authentic import decide
from tests.fakes.deployed import Deployed
from tests.fakes.evidence import FP32, benchmark, decision, finding, scorecard, verdict
from tests.fakes.family import samples
from tests.fakes.told import kept

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]

FIRST_URI = "models:/tiny/1"


@pytest.fixture
def approved(family, live):
    """Decide on the scorecard; forget it afterwards."""

    def approve(card, **changes):
        decide(card, read_policy(live), family.workspace, **changes)
        return card

    yield approve
    shutil.rmtree(family.workspace.root / "decisions", ignore_errors=True)


def serving(policy):
    """Which version of the model answers now, or None."""
    client = live_client(read_policy(policy).target)
    if not client.model_ready("tiny"):
        return None
    return int(client.infer("tiny", {"x": samples(1, 9).inputs["x"]}).model_version)


def champion(family):
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    return f"models:/tiny/{tracker.alias('tiny', 'champion')}"


def test_without_a_decision_nothing_goes_live(live, card):
    """The error teaches how to give one, and the repository stays empty."""
    with pytest.raises(ApprovalError, match="enginegate approve"):
        promote(live, card.digest)

    assert serving(live) is None


def test_approvals_written_by_hand_publish_nothing(live, card, family, approved):
    """Files that check like decisions satisfy nobody, and the audit log does not take them in."""
    text = live.read_text().replace("expires_hours = 1", "expires_hours = 1\nrequired = 2")
    live.write_text(text)
    card = qualify(live)
    for name in ("grace", "joan"):
        forged = decision(card, approver=name, decided_at=now())
        family.workspace.save_decision(forged)

    with pytest.raises(ApprovalError, match="by grace: it is only a file in the workspace"):
        promote(live, card.digest)
    approved(card)
    with pytest.raises(ApprovalError, match="validly approved by ada; the policy needs 2"):
        promote(live, card.digest)

    assert serving(live) is None
    log = AuditLog(read_policy(live).target.repository).read()
    assert [(event.event, event.who == "ada") for event in log] == [
        ("refused", False),
        ("approved", True),
        ("refused", False),
    ]


def test_handmade_scorecard_is_not_published(live, card, approved, family):
    """MLflow's run holds another digest, so nobody is asked, and the log says why."""
    edited = card.model_copy(update={"requested_by": "somebody else"})
    family.workspace.save_scorecard(edited)

    with pytest.raises(TamperedError, match="is not what was filed"):
        promote(live, approved(edited).digest)

    assert serving(live) is None
    last = AuditLog(read_policy(live).target.repository).read()[-1]
    assert (last.event, "is not what was filed" in last.why) == ("refused", True)


def publication_of(path, card):
    policy = read_policy(path)
    return _publication(policy, card, Workspace.of(policy))


def test_approved_winner_goes_live_and_rolls_back(live, card, approved, second_uri, family):
    """Two versions: published, proved, champion moved; rolled back, champion moved back."""
    first = promote(live, approved(card).digest)
    assert (first.version, serving(live), champion(family)) == (1, 1, FIRST_URI)
    assert first.engine.engine_sha256 == card.verdict(first.engine.candidate).engine_sha256
    assert first.engine.settings.parameters["intra_op_threads"] == "1"
    again = promote(live, card.digest)
    assert again.version == 1

    second = promote(live, approved(qualify(live, second_uri)).digest)
    assert (second.version, serving(live), champion(family)) == (2, 2, second_uri)

    back = rollback(live, reason="complaints")
    assert (back.version, serving(live), champion(family)) == (1, 1, FIRST_URI)
    assert publication_of(live, card).repository.pinned == {1}

    assert_on_record(live, family)
    with pytest.raises(ApprovalError, match="was rolled back or withdrawn"):
        promote(live, again_of(second, family).digest)
    assert serving(live) == 1


def again_of(release, family):
    return family.workspace.scorecard(release.scorecard_sha256)


def assert_on_record(live, family):
    """Who approved, what went live and why it went back: signed, chained, and in the registry."""
    repository = open_target(read_policy(live).live_tables, family.workspace)
    assert not [check for check in verify(repository) if check.problem or check.note]
    log = AuditLog(repository.root)
    assert [(e.event, e.release) for e in log.read()] == [
        ("approved", None),
        ("published", 1),
        ("approved", None),
        ("published", 2),
        ("rolled back", 1),
    ]
    assert (log.read()[0].who, log.read()[-1].why) == ("ada", "complaints")
    tags = Tracker(family.workspace.tracking_uri, family.workspace.artifacts).version_tags(
        "tiny", 1
    )
    assert (tags["enginegate.approved_by"], tags["enginegate.approved_why"]) == (
        "ada",
        "margins are wide",
    )
    assert tags["enginegate.audit"] == f"5:{log.head().sha256}"


def test_fleet_canary_is_judged_by_watch_checks(live, approved, family):
    """By the promotion itself, before any other server is told; the watch goes on from there."""
    server = live_addresses(read_policy(live).target).grpc
    fleet = f'canary_s = 1\nfleet = [{{ name = "b", endpoint = "{server}" }}]\n'
    text = live.read_text().replace("\n[approval]", f"{fleet}\n[watch]\nlook_s = 0.5\n\n[approval]")
    live.write_text(text)

    release = promote(live, approved(qualify(live)).digest)

    checks = WatchLog.at(family.workspace, release).read()
    assert [check.number for check in checks] == [1, 2]
    assert {"error_share", "latency", "server_time", "pending"} <= {
        finding.gate for finding in checks[0].findings
    }
    assert checks[0].reading.probe.versions == ("1",)
    assert [(check.number, list(check.others)) for check in watch(live, 0.0).checks] == [(3, ["b"])]


def test_scorecard_of_another_policy_is_refused(live, card, approved, family, tmp_path):
    """Another model's policy, or this one with fewer approvers, needs its own qualification."""
    for number, edit in enumerate(
        [
            ('name = "tiny"', 'name = "other"'),
            ("max_accuracy_loss = 0.02", "max_accuracy_loss = 0.5"),
        ]
    ):
        text = live.read_text().replace(*edit, 1)
        other = tmp_path / f"other-{number}.toml"
        other.write_text(text)
        with pytest.raises(ApprovalError, match="made under another policy"):
            promote(other, approved(card).digest)

    assert serving(live) is None
    assert family.workspace.decision(card.digest) is not None


def test_already_live_is_proved_not_believed(live, card, approved):
    """If the server lost the model, promoting what is live brings it up again."""
    promote(live, approved(card).digest)
    client = live_client(read_policy(live).target)
    client.unload("tiny")
    while client.model_ready("tiny"):
        pass

    assert promote(live, card.digest).version == 1
    assert serving(live) == 1


def test_new_scorecard_of_same_bytes_renews_the_promise(live, card, approved, family, tmp_path):
    """Nothing is published; what the watch compares with, MLflow and the terminal have the new one.

    It needs its own approval, like everything that changes what a release is held to.
    """
    release = promote(live, approved(card).digest)
    again = qualify(live)
    layout, terminal = Layout(read_policy(live).target.repository, "tiny"), CliRunner()
    assert again.replaced.engine_sha256 == release.engine.engine_sha256
    assert again.replaced.benchmark.p99_at_slo == card.benchmark(card.winner).p99_at_slo
    with pytest.raises(ApprovalError, match="Nobody"):
        promote(live, again.digest)
    assert layout.renewed(1) is None

    approved(again)
    said = terminal.invoke(app, ["promote", str(live), again.digest])

    assert said.exit_code == 0, said.exception
    assert "serves these very bytes already" in said.output.replace("\n", " ")
    assert (layout.release(1), len(layout.releases())) == (release, 1)
    renewed = layout.renewed(1)
    assert renewed.scorecard_sha256 == again.digest
    (check,) = watch(live, 0.0).checks
    assert check.scorecard == again.digest
    assert f"scorecard {again.digest[:12]}" in terminal.invoke(app, ["status", str(live)]).output
    page = tmp_path / "decision.html"
    terminal.invoke(app, ["report", again.digest[:12], "-o", str(page), "--policy", str(live)])
    assert "live as release 1" in page.read_text()
    assert "same bytes" in page.read_text()
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    assert again.digest[:12] in tracker.version_tags("tiny", 1)["enginegate.promise"]
    assert promote(live, again.digest).version == 1
    assert layout.renewed(1) == renewed
    with pytest.raises(ApprovalError, match="replaced by another promise"):
        promote(live, card.digest)
    with pytest.raises(RepositoryError, match="made while release none"):
        promote(live, approved(card).digest)


def test_stale_evidence_is_refused(live, card, approved, family):
    """A scorecard made while release 1 was live does not apply while nothing is."""
    stale = card.model_copy(update={"replaces": 1})
    family.workspace.save_scorecard(stale)

    with pytest.raises(RepositoryError, match="Qualify again"):
        promote(live, approved(stale).digest)

    assert serving(live) is None


def test_if_mlflow_fails_the_release_is_taken_back(live, card, approved, monkeypatch):
    """The transaction leaves nothing live that the registry does not call champion."""

    def refuse(*_, **__):
        raise TrackingError("the registry is down")

    monkeypatch.setattr(Tracker, "move_alias", refuse)
    with pytest.raises(TrackingError, match="the registry is down"):
        promote(live, approved(card).digest)

    assert serving(live) is None
    assert Layout(read_policy(live).target.repository, "tiny").current() is None


def told(live, count):
    """What Prefect keeps of this repository's releases."""
    root = read_policy(live).target.repository
    return [(e.event, e.payload["from"], e.payload["to"]) for e in kept(root, "tiny", count)]


def test_rollback_needs_neither_prefect_nor_mlflow(live, card, approved, second_uri, family):
    """The command goes back with the folder and the server alone; both hear of it later."""
    promote(live, approved(card).digest)
    promote(live, approved(qualify(live, second_uri)).digest)
    said = Console(file=io.StringIO(), width=200)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        roll_back_live(live, None, "complaints", said)
    assert (serving(live), champion(family)) == (1, second_uri)
    assert "MLflow does not know yet" in said.file.getvalue()

    assert "Prefect does not know yet" in said.file.getvalue()

    root = read_policy(live).target.repository
    assert len(deliver(family.workspace, root)) == 1
    assert champion(family) == FIRST_URI
    assert deliver(family.workspace, root) == ()
    seen = [
        ("enginegate.release.published", None, 1),
        ("enginegate.release.published", 1, 2),
    ]
    assert told(live, 2) == seen
    assert promote(live, card.digest).version == 1
    assert told(live, 3) == [*seen, ("enginegate.release.rolled-back", 2, 1)]


@pytest.fixture
def lost(family, tmp_path):
    """The machine that qualified is gone: neither scorecards nor engines are here."""
    names = ("scorecards", "store/engines")

    def lose():
        for name in names:
            (family.workspace.root / name).rename(tmp_path / name.replace("/", "-"))

    yield lose
    for name in names:
        away = tmp_path / name.replace("/", "-")
        if away.exists():
            shutil.rmtree(family.workspace.root / name, ignore_errors=True)
            away.rename(family.workspace.root / name)


def test_deployed_promotion_waits_for_two_approvers(live, approved, family, lost):
    """It holds nothing while it waits, asks until enough said yes, and goes on elsewhere."""
    text = live.read_text().replace("expires_hours = 1", "expires_hours = 1\nrequired = 2")
    live.write_text(text)
    card = qualify(live)
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()
    assert run.state == "Suspended"
    assert serving(live) is None

    resume_flow_run(
        run.id, run_input={"decision": "approve", "approver": "ada", "reason": "checks right"}
    )
    with pytest.raises(Pause):
        run.step()
    approved(card, approver="grace", reason="agreed")
    assert resume_suspended(family.workspace.decision(card.digest))
    lost()
    release = run.step()

    assert (release.version, serving(live)) == (1, 1)
    assert [d.approver for d in (*release.further_decisions, release.decision)] == ["ada", "grace"]
    assert "Prefect form 0 of run" in release.further_decisions[0].origin
    assert_shown(run)


def assert_shown(run):
    """Once, though two questions were asked: scorecard, candidates, links; and what is live."""
    shown = {artifact.key: artifact.data for artifact in artifacts_of(run)}
    assert sorted(shown) == ["candidates-tiny", "links-tiny", "live-tiny", "scorecard-tiny"]
    assert len(artifacts_of(run)) == len(shown)
    assert "An approval is for scorecard" in shown["scorecard-tiny"]
    (row,) = [line for line in shown["scorecard-tiny"].splitlines() if "(winner) |" in line]
    assert re.search(r"\| [0-9.]+ [KM]iB \|$", row)
    assert "(http://127.0.0.1:" in shown["links-tiny"]
    assert "**published release 1** by " in shown["live-tiny"]


def artifacts_of(run):
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
        return client.read_artifacts(artifact_filter=mine)


def test_the_form_needs_a_name_and_a_reason_and_its_no_is_heard(live, card, approved):
    """Silence never approves; nor does somebody's yes that comes while Prefect holds a no."""
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()

    with pytest.raises(RuntimeError, match="approver"):
        resume_flow_run(run.id, run_input={"decision": "approve"})
    assert run.state == "Suspended"

    no = {
        "decision": "reject",
        "approver": "grace",
        "reason": "too early",
        "accept_inconclusive": "none of them!",
    }
    resume_flow_run(run.id, run_input=no)
    approved(card)
    with pytest.raises(ApprovalError, match="Rejected by grace: too early"):
        run.step()
    log = AuditLog(read_policy(live).target.repository).read()
    assert [event.event for event in log] == ["approved", "rejected", "refused"]


def test_rejection_after_a_form_approval_counts(live, card, approved):
    """The form was answered when it was sent, not when a worker reads it; the no came after."""
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()
    yes = {"decision": "approve", "approver": "grace", "reason": "checks right"}
    resume_flow_run(run.id, run_input=yes)

    approved(card, answer="reject", reason="wait for more")

    with pytest.raises(ApprovalError, match="Rejected by ada: wait for more"):
        run.step()


@pytest.mark.parametrize("name", ["the best one", "tensorrt-fp8"])
def test_approving_an_unknown_candidate_is_refused(name):
    """With what there is; nothing is approved in its place."""
    answer = ApprovalForm(
        decision="approve", approver="ada", reason="checks right", accept_inconclusive=name
    )

    with pytest.raises(ApprovalError, match=f"{name}.*it has onnxruntime-int8"):
        _candidate(answer, scorecard())


def test_published_candidate_is_the_approved_one(family):
    """The winner, unless people accepted another candidate by name."""
    card = scorecard(
        verdicts=(verdict(), verdict(finding(Outcome.INCONCLUSIVE), candidate=FP32)),
        benchmarks=(benchmark(), benchmark(candidate=FP32)),
    )
    publication = publication_of(family.policy, card)

    named = publication.approved_by((decision(card, candidate=FP32),))

    assert publication.approved_by((decision(card),)).verdict.candidate == card.winner
    assert named.verdict.candidate == FP32


def test_approving_on_the_command_line_resumes_the_run(live, card, approved, family):
    """`enginegate approve` writes the decision and wakes the run that waits for it."""
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()

    approved(card, answer="reject", reason="not today")
    names = resume_suspended(family.workspace.decision(card.digest))

    assert len(names) >= 1
    with pytest.raises(ApprovalError, match="not today"):
        run.step()
