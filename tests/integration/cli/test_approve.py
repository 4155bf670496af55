"""Deciding on the terminal: what is written, what is refused, and what the audit log says."""

import io
from dataclasses import replace
from datetime import timedelta

import pytest
from rich.console import Console

from enginegate.cli.approve import PersonAnswer, decide_scorecard, waiting
from enginegate.cli.live.repository import print_audit
from enginegate.cli.output.json_output import Printer
from enginegate.decision import Decision, RenewedPromise
from enginegate.errors import ApprovalError, InputError, RepositoryBusyError
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.repository import (
    AuditLog,
    AuditRecord,
    Layout,
    LiveRepository,
    ReleaseSigning,
    record_act,
)
from enginegate.workspace import Workspace, now
from tests.fakes.authentic import keep
from tests.fakes.evidence import FP32, benchmark, finding, scorecard, verdict
from tests.fakes.family import _POLICY as POLICY
from tests.fakes.live_triton import FakeTriton, package_in


class Desk:
    """Somebody at a terminal, in a checkout with one policy."""

    def __init__(self, folder, approval):
        self.policy = folder / "policies" / "tiny.toml"
        self.policy.parent.mkdir()
        self.policy.write_text(POLICY.format(root=folder) + approval)
        self.rules = read_policy(self.policy)
        self.workspace = Workspace(folder / "workspace")
        self.out = Console(file=io.StringIO(), width=300)

    def card(self, **changes):
        """A scorecard made under that policy, as a qualification leaves it."""
        fields = {"model": "tiny", "model_uri": "models:/tiny/1"}
        made = scorecard(**(fields | {"policy_sha256": self.rules.digest} | changes))
        return keep(made, self.rules, self.workspace)

    def say(self, card, answer="approve", approver="ada", **options):
        given = PersonAnswer(answer, approver, "margins are wide", **options)
        decide_scorecard(card, given, None, self.workspace, Printer(self.out))

    def _waiting(self):
        layout = Layout(self.rules.target.repository, self.rules.name)
        return waiting(
            self.rules,
            self.workspace,
            self.policy,
            releases=layout.releases(),
            cards=self.workspace.scorecards(),
        )

    def waiting(self):
        """What `status` says of each scorecard."""
        return [each.sentence for each in self._waiting()]

    def commands(self):
        """The command that `status` names for each scorecard."""
        return [each.next for each in self._waiting()]

    @property
    def said(self):
        return self.out.file.getvalue()

    @property
    def log(self):
        return AuditLog(self.rules.target.repository)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Make one; the argument is what its policy says besides about approvals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return lambda approval="": Desk(tmp_path, approval)


def test_approval_is_stored_and_audited(desk):
    """In the workspace with where it came from, and in the audit log; the next command is named."""
    ada = desk()
    card = ada.card()

    ada.say(card)

    decision = ada.workspace.decision(card.digest)
    assert (decision.answer, decision.candidate) == ("approve", None)
    assert decision.origin.endswith(", command")
    (event,) = ada.log.read()
    assert (event.event, event.who, event.scorecard) == ("approved", "ada", card.digest)
    assert f"enginegate promote {ada.policy} {card.digest[:12]}" in ada.said


def test_the_first_of_two_is_told_that_one_is_missing(desk):
    """And the second that it can be promoted."""
    both = desk("required = 2\n")
    card = both.card()

    both.say(card)
    assert "Still missing: 1 approval" in both.said
    both.say(card, approver="grace")

    assert "enginegate promote" in both.said
    assert len(both.workspace.decisions(card.digest)) == 2


def test_status_says_who_approved_who_may_and_until_when(desk):
    """Of a scorecard that needs two; once it has them, what is left to do is the command."""
    both = desk('approvers = ["ada", "grace", "linus"]\nrequired = 2\n')
    card = both.card()
    named = f"{card.digest[:12]} (models:/tiny/1)"
    short = card.digest[:12]

    assert both.waiting() == [f"waits for a decision: {named}"]
    assert both.commands() == [f"enginegate approve {short} --reason WHY"]
    both.say(card)
    until = both.workspace.decision(card.digest).decided_at + timedelta(hours=1)
    (sentence,) = both.waiting()
    assert sentence == (
        f"waits for more approvals: {named}: approved by ada "
        f"(valid until {until:%Y-%m-%d %H:%M:%S} UTC); 1 more needed, by grace or linus"
    )
    both.say(card, approver="grace")
    last = both.workspace.decision(card.digest).decided_at + timedelta(hours=1)
    (sentence,) = both.waiting()
    assert sentence == (
        f"approved and not promoted: {named}: approved by ada (valid until "
        f"{until:%Y-%m-%d %H:%M:%S} UTC), grace (valid until {last:%Y-%m-%d %H:%M:%S} UTC)"
    )
    assert both.commands() == [f"enginegate promote {both.policy} {short}"]


def test_status_passes_over_who_may_not_approve(desk):
    """Whoever asked for it, and everybody once the policy names nobody else; a no ends it."""
    four = desk('approvers = ["ada", "grace"]\nrequired = 2\nrequester_may_approve = false\n')
    card = four.card(requested_by="grace@host")
    four.say(card)

    (sentence,) = four.waiting()
    assert sentence.endswith("1 more needed, by nobody that the policy names")

    four.say(card, "reject", approver="grace")
    assert four.waiting() == []


def test_rejection_is_audited(desk):
    """Somebody may approve it later; the log keeps both."""
    ada = desk()
    card = ada.card()

    ada.say(card, "reject")
    ada.say(card, approver="grace")

    assert [event.event for event in ada.log.read()] == ["rejected", "approved"]


def test_rejection_is_stored_when_audit_log_is_unwritable(desk, monkeypatch):
    """While somebody changes the repository, for example; a yes is not kept without the log."""
    here = desk()
    card = here.card()

    def busy(*_):
        raise RepositoryBusyError("live is being changed by pid 7.")

    monkeypatch.setattr("enginegate.cli.approve.record_decision", busy)
    with pytest.raises(RepositoryBusyError):
        here.say(card)
    assert here.workspace.decisions(card.digest) == ()

    here.say(card, "reject")

    assert here.workspace.decision(card.digest).answer == "reject"
    assert "gets it at the promotion: live is being changed by pid 7." in here.said


def test_stranger_cannot_reject(desk):
    """Silence would let them believe that it was stopped; a person the policy names is known."""
    here = desk('approvers = ["ada"]\n')
    card = here.card()

    with pytest.raises(ApprovalError, match=r"would not count: 'mallory'.*names: ada"):
        here.say(card, "reject", approver="mallory")
    assert here.workspace.decisions(card.digest) == ()
    here.say(card, "reject", approver="ada@host")
    here.say(card)

    assert "Still missing: 1" not in here.said
    assert [event.event for event in here.log.read()] == ["rejected", "approved"]


@pytest.mark.parametrize(
    ("approval", "approver", "changes", "message"),
    [
        ('approvers = ["grace"]\n', "ada", {}, "may not approve"),
        ("requester_may_approve = false\n", "ada", {"requested_by": "ada@h"}, "somebody else"),
        ("", "ada", {"winner": None, "verdicts": ()}, "nothing to approve"),
    ],
    ids=["not-named", "own-request", "no-winner"],
)
def test_approval_that_promotion_would_refuse_is_refused(
    desk, approval, approver, changes, message
):
    """Nothing is written."""
    here = desk(approval)
    card = here.card(**changes)

    with pytest.raises(ApprovalError, match=message):
        here.say(card, approver=approver)

    assert here.workspace.decisions(card.digest) == ()
    assert here.log.read() == ()


def test_unpromotable_scorecard_is_not_approved(desk):
    """Nothing is written, status does not ask for it, and a no is no harm."""
    here = desk()
    card, won = here.card(replaces=3), here.card()
    changed = here.card(policy_sha256="f" * 64)
    for event in ("published", "withdrawn"):
        deed = AuditRecord(
            event=event, model="tiny", who="joan", why="why", origin="here", release=3
        )
        record_act(here.rules.target.repository, deed)

    with pytest.raises(ApprovalError, match=r"while release 3 was live; now it is nothing.*again"):
        here.say(card)
    with pytest.raises(ApprovalError, match=r"other rules than .*tiny.toml has now. Qualify"):
        here.say(changed)

    assert [event.event for event in here.log.read()] == ["published", "withdrawn"]
    assert not (here.workspace.root / "decisions").exists()
    asked, sentence = here.waiting()
    assert asked.startswith(f"waits for a decision: {won.digest[:12]}")
    assert sentence.startswith("not promoted, and cannot be any more: 2 of the scorecards")
    here.say(changed, "reject")
    here.say(won)


def test_where_nothing_is_known_of_what_is_live_an_answer_can_be_given(desk):
    """On a machine without the live repository: it wakes the suspended run, which compares."""
    here = desk()
    card = here.card(replaces=3)

    here.say(card)

    assert "Approved by ada" in here.said
    (sentence,) = here.waiting()
    assert sentence.startswith("approved and not promoted")


def test_scorecard_renewed_as_promise_is_not_waiting(desk, tmp_path):
    """The live release is held to it; the one that it was published with is over."""
    here = desk()
    first, second, late = here.card(), here.card(replaces=1), here.card(reason="another")
    here.say(first)
    here.say(second)
    root = here.rules.target.repository
    made = replace(package_in(tmp_path, 1.0), model="tiny", scorecard_sha256=first.digest)
    live = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    published = live.publish(made, expected=None)
    sentence, past = here.waiting()
    assert sentence.startswith(f"approved and not promoted: {second.digest[:12]}")

    live.renew(
        RenewedPromise(
            model="tiny",
            version=1,
            release_sha256=published.digest,
            scorecard_sha256=second.digest,
            promise=published.promise,
            decision=here.workspace.decision(second.digest),
            renewed_at=now(),
        )
    )

    assert here.waiting() == [past]
    with pytest.raises(ApprovalError, match="while nothing was live; now it is release 1"):
        here.say(late)


def test_expired_approval_is_listed_again(desk, monkeypatch):
    """Status says when and why; it could still be promoted."""
    here = desk()
    card = here.card()
    here.workspace.save_scorecard(card)
    here.say(card)
    monkeypatch.setattr("enginegate.cli.approve.now", lambda: now() + timedelta(hours=2))

    (sentence,) = here.waiting()

    assert sentence.startswith(f"waits for a new decision: {card.digest[:12]}")
    assert "2.0 h old; an approval stands for 1 h" in sentence


def test_unreadable_decision_blocks_only_its_scorecard(desk):
    """It may be a no: it is named, nothing is added to it, and the others are still listed."""
    here = desk()
    card, other = here.card(), here.card(model_uri="models:/tiny/1", requested_by="ada")
    here.say(card)
    (path,) = (here.workspace.root / "decisions").rglob("*.json")
    path.write_text(path.read_text()[:40])

    with pytest.raises(InputError, match=f"{path.name} is not a valid Decision"):
        here.say(card, approver="grace")

    assert list(path.parent.glob("*.json")) == [path]
    said = here.waiting()
    assert f"waits for a decision: {other.digest[:12]} (models:/tiny/1)" in said
    assert any(line.startswith(f"cannot be decided: {card.digest[:12]}") for line in said)


def test_approval_needs_its_policy_but_rejection_does_not(desk):
    """Without it no audit log would have the approval, so it would count for nothing."""
    here = desk()
    card = here.card()
    here.policy.unlink()

    with pytest.raises(InputError, match="so name the policy: --policy FILE"):
        here.say(card)
    assert here.workspace.decisions(card.digest) == ()
    here.say(card, "reject")
    assert "at the promotion" in here.said


def test_unauthenticated_scorecard_is_not_approved(desk):
    """Neither MLflow nor a signature: it may have been written by hand. Nothing is written."""
    here = desk()
    card = here.card()
    (signature,) = here.workspace.root.glob("scorecards/*.sig")
    signature.unlink()

    with pytest.raises(ApprovalError, match="Nothing shows that scorecard"):
        here.say(card)

    assert here.workspace.decisions(card.digest) == ()
    assert here.log.read() == ()


def test_decision_is_signed_like_a_release(desk):
    """With the workspace's key where the policy names none; the log has it first."""
    ada = desk()
    ada.say(ada.card())

    (path,) = ada.workspace.root.glob("decisions/*/*.json")
    signing = ReleaseSigning.of(ada.rules.signing, ada.workspace)
    assert signing.check_record(Decision.read(path), path) == ""
    edited = Decision.read(path).model_copy(update={"approver": "grace"})
    assert "not on this content" in signing.check_record(edited, path)


def unsure(desk):
    """FP32 is inconclusive, and nothing won."""
    judged = (verdict(finding(Outcome.INCONCLUSIVE), candidate=FP32),)
    measured = (benchmark(candidate=FP32),)
    return desk.card(verdicts=judged, benchmarks=measured, winner=None, reason="too few samples")


def test_inconclusive_candidate_is_accepted_by_name(desk):
    """The findings are listed until the person says so; the decision then holds them."""
    ada = desk("accept_inconclusive = true\n")
    card = unsure(ada)

    with pytest.raises(ApprovalError, match=r"samples/evaluation.*(?s:.*)--accept-inconclusive"):
        ada.say(card, candidate="onnxruntime-fp32")
    with pytest.raises(InputError, match="Say which candidate"):
        ada.say(card, accept_inconclusive=True)
    ada.say(card, candidate="onnxruntime-fp32", accept_inconclusive=True)

    decision = ada.workspace.decision(card.digest)
    assert (decision.candidate, decision.accepts) == (FP32, ("samples/evaluation",))


def test_inconclusive_candidate_is_refused_when_policy_forbids(desk):
    """Not even by name."""
    ada = desk()

    with pytest.raises(ApprovalError, match="nothing to approve"):
        ada.say(unsure(ada), candidate="onnxruntime-fp32", accept_inconclusive=True)


def test_the_audit_log_is_shown_and_verified(desk):
    """As a table or as JSON lines; a changed line is an error that names it."""
    ada = desk()
    ada.say(ada.card())
    ada.say(ada.card(), approver="grace")

    assert print_audit(ada.rules, Printer(ada.out))
    assert print_audit(ada.rules, Printer(ada.out, ada.out.file))
    assert "The chain holds: 2 lines" in ada.said
    assert '"who":"grace"' in ada.said

    ada.log.path.write_bytes(ada.log.path.read_bytes().replace(b'"ada"', b'"eve"'))
    assert not print_audit(ada.rules, Printer(ada.out))
    assert "jsonl, line 2: the chain is broken" in ada.said
