"""The promote and rollback flows on a live Triton, with and without a person."""

import shutil
import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.flow_runs import resume_flow_run
from prefect.states import Pending

from enginegate.errors import ApprovalError, LedgerError, RepositoryError
from enginegate.ledger import Ledger
from enginegate.policy import read_policy
from enginegate.repository import Layout
from enginegate.triton.live import live_client
from flows.answer import answer_suspended
from flows.promote import promote
from flows.qualify import qualify
from flows.rollback import rollback
from tests.fakes.evidence import decision
from tests.fakes.family import samples

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


@pytest.fixture
def approved(family):
    """Decide on the scorecard; forget it afterwards."""
    from enginegate.workspace import now

    def decide(card, **changes):
        family.workspace.save_decision(decision(card, decided_at=now(), **changes))
        return card

    yield decide
    shutil.rmtree(family.workspace.root / "decisions", ignore_errors=True)


def serving(policy):
    """Which version of the model answers now, or None."""
    client = live_client(read_policy(policy).target)
    if not client.model_ready("tiny"):
        return None
    return int(client.infer("tiny", {"x": samples(1, 9).inputs["x"]}).model_version)


def champion(family):
    return Ledger(family.workspace.tracking_uri, family.workspace.artifacts).alias(
        "tiny", "champion"
    )


def test_without_a_decision_nothing_goes_live(live, card):
    """The error teaches how to give one, and the repository stays empty."""
    with pytest.raises(ApprovalError, match="enginegate approve"):
        promote(live, card.digest)

    assert serving(live) is None


def test_an_approved_winner_goes_live_and_comes_back(live, card, approved, second_uri, family):
    """Two versions: published, proved, champion moved; rolled back, champion moved back."""
    first = promote(live, approved(card).digest)
    assert (first.version, serving(live), champion(family)) == (1, 1, 1)
    assert first.engine_sha256 == card.verdict(first.candidate).engine_sha256
    again = promote(live, approved(card).digest)
    assert again.version == 1

    second = promote(live, approved(qualify(live, second_uri)).digest)
    assert (second.version, serving(live), champion(family)) == (2, 2, 2)

    back = rollback(live)
    assert (back.version, serving(live), champion(family)) == (1, 1, 1)


def test_a_scorecard_made_under_other_rules_is_refused(live, card, approved, family, tmp_path):
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
        with pytest.raises(ApprovalError, match="made under other rules"):
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


def test_stale_evidence_is_refused(live, card, approved, family):
    """A scorecard made while release 1 was live does not apply while nothing is."""
    stale = card.model_copy(update={"replaces": 1})
    family.workspace.save_scorecard(stale)

    with pytest.raises(RepositoryError, match="Qualify again"):
        promote(live, approved(stale).digest)

    assert serving(live) is None


def test_if_the_ledger_fails_the_release_is_taken_back(live, card, approved, monkeypatch):
    """The transaction leaves nothing live that the registry does not call champion."""

    def refuse(*_, **__):
        raise LedgerError("the registry is down")

    monkeypatch.setattr(Ledger, "move_alias", refuse)
    with pytest.raises(LedgerError, match="the registry is down"):
        promote(live, approved(card).digest)

    assert serving(live) is None
    assert Layout(read_policy(live).target.repository, "tiny").current() is None


def test_a_rollback_stands_even_if_the_ledger_fails(live, card, approved, second_uri, monkeypatch):
    """Going back must not depend on MLflow."""
    promote(live, approved(card).digest)
    promote(live, approved(qualify(live, second_uri)).digest)

    def refuse(*_, **__):
        raise LedgerError("the registry is down")

    monkeypatch.setattr(Ledger, "move_alias", refuse)
    assert rollback(live).version == 1
    assert serving(live) == 1


class Deployed:
    """A run of the promote flow as a worker would run it: one process a step, here one call."""

    def __init__(self, policy, scorecard):
        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(
                flow_id=client.create_flow(promote),
                name=f"test-{uuid.uuid4().hex[:6]}",
                entrypoint="flows.promote.promote",
            )
            parameters = {"policy": str(policy), "scorecard": scorecard}
            self.id = client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def step(self):
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self.id, Pending())
            run = client.read_flow_run(self.id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT__FLOW_RUN_ID", str(self.id))
            return run_flow(promote, flow_run=run, parameters=run.parameters)

    @property
    def state(self):
        with get_client(sync_client=True) as client:
            return client.read_flow_run(self.id).state.name


@pytest.mark.usefixtures("approved")
def test_a_deployed_promotion_waits_for_a_person(live, card):
    """It suspends with a form, holds nothing while it waits, and goes on with the answer."""
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()
    assert run.state == "Suspended"
    assert serving(live) is None

    resume_flow_run(
        run.id, run_input={"decision": "approve", "approver": "ada", "reason": "looks right"}
    )
    release = run.step()

    assert (release.version, serving(live)) == (1, 1)
    assert release.decision.approver == "ada"


def test_the_form_needs_a_name_and_a_reason(live, card):
    """An empty form is refused by the server, so silence never approves."""
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()

    with pytest.raises(RuntimeError, match="approver"):
        resume_flow_run(run.id, run_input={"decision": "approve"})
    assert run.state == "Suspended"


def test_approving_on_the_command_line_resumes_the_run(live, card, approved, family):
    """`enginegate approve` writes the decision and wakes the run that waits for it."""
    run = Deployed(live, card.digest)
    with pytest.raises(Pause):
        run.step()

    approved(card, answer="reject", reason="not today")
    names = answer_suspended(family.workspace.decision(card.digest))

    assert len(names) >= 1
    with pytest.raises(ApprovalError, match="not today"):
        run.step()
