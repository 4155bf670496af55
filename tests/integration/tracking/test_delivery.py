"""The audit log reaches MLflow: in order, once, and never held up by what is gone."""

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.atomic_io import file_lock, write_file
from enginegate.errors import InputError, TrackingError
from enginegate.repository import (
    AuditLog,
    AuditRecord,
    Current,
    Layout,
    record_act,
    record_decision,
)
from enginegate.repository.history.audit import REPLICATION, Cursor
from enginegate.repository.rollout.rollout_state import LOCK, RolloutProgress, RolloutState
from enginegate.tracking import deliver, try_deliver
from enginegate.workspace import Workspace
from tasks.release import PUBLISHED, UNDO, take_back
from tests.fakes.evidence import WHEN, decision, release, scorecard

AWAY = "http://127.0.0.1:9"


class Site:
    """A live repository and a workspace whose MLflow is the tests' own."""

    def __init__(self, folder, tracker):
        self.root, self.tracker = folder / "live", tracker
        self.workspace = Workspace(folder / "workspace")
        self.root.mkdir()

    @property
    def cursor(self):
        return Cursor.of(self.workspace, self.workspace.tracking_uri, self.root)

    def act(self, event, version, *, origin="ada@host, command", **fields):
        deed = {"model": "digits", "release": version, "who": "ada", "why": "margins are wide"}
        record_act(self.root, AuditRecord(event=event, origin=origin, **deed | fields))

    def commit(self, version, uri, previous_version=None):
        """What is on disk when a release is live, before the audit log has it."""
        layout = Layout(self.root, "digits")
        made = release(version=version, model_uri=uri, previous_version=previous_version)
        write_file(layout.release_file(version), made.pretty_json())
        current = Current(version=version, known=(version,), changed_at=WHEN)
        write_file(layout.current_file, current.pretty_json())
        return made

    def go_live(self, version, uri, event="published", *, previous_version=None, **fields):
        made = self.commit(version, uri, previous_version)
        self.act(event, version, **fields)
        return made

    def withdraw(self, version, card):
        Layout(self.root, "digits").current_file.unlink()
        why = "it answers nonsense"
        self.act("withdrawn", version, scorecard=card.digest, why=why)

    def deliver(self):
        return deliver(self.workspace, self.root)

    def champion(self, name):
        return self.tracker.alias(name, "champion")


@pytest.fixture
def site(tracker, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.tracking_uri)
    return Site(tmp_path, tracker)


def test_changes_while_mlflow_was_away_are_delivered_once(site, registered, monkeypatch):
    """The newest stands for all; a cursor says that there is nothing left."""
    first, second = registered("waiting"), registered("waiting")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", AWAY)
        site.go_live(1, f"models:/waiting/{first}")
        assert "could not be reached" in try_deliver(site.workspace, site.root)
        site.go_live(2, f"models:/waiting/{second}")
        with pytest.raises(TrackingError):
            site.deliver()

    assert site.deliver() == (f"MLflow was updated: waiting@champion is version {second}.",)

    assert site.champion("waiting") == second
    assert site.tracker.version_tags("waiting", second)["enginegate.release"] == "2"
    assert site.cursor.read() == AuditLog(site.root).head()
    assert site.deliver() == ()


def test_line_is_redelivered_until_mlflow_accepts_it(site, registered, monkeypatch):
    """The cursor stands before the line that was refused, and after the one that arrived."""
    card = scorecard(model="digits")
    run = site.tracker.record(card, {})
    card = card.model_copy(update={"mlflow_run": run})
    site.workspace.save_scorecard(card)
    record_decision(site.root, decision(card), "digits")
    version = registered("refused")
    site.go_live(1, f"models:/refused/{version}")
    with monkeypatch.context() as patch:

        def refuse(*_):
            raise TrackingError("the registry is down")

        patch.setattr("enginegate.tracking.tracker.Tracker.move_alias", refuse)
        with pytest.raises(TrackingError, match="the registry is down"):
            site.deliver()
        assert site.cursor.read().count == 1

    assert len(site.deliver()) == 1
    assert site.champion("refused") == version


def test_missing_versions_and_runs_hold_nothing_up(site, registered):
    """A deleted version, a scorecard that nobody has, and a damaged cursor are left behind."""
    version = registered("present")
    site.act("approved", None, scorecard="f" * 64)
    site.go_live(1, "models:/never/7", model="digits")
    site.cursor.path.parent.mkdir(parents=True)
    site.cursor.path.write_text("{")
    assert site.deliver() == ()

    site.go_live(2, f"models:/present/{version}")

    assert len(site.deliver()) == 1
    assert site.champion("present") == version


def test_interrupted_change_is_delivered_by_its_own_line(site, registered):
    """Killed between the commit and the log: recovery writes the line, which MLflow then gets."""
    first, second = registered("cut-short"), registered("cut-short")
    site.go_live(1, f"models:/cut-short/{first}")
    site.commit(2, f"models:/cut-short/{second}")
    assert site.deliver() == ()

    site.act("published", 2)

    assert len(site.deliver()) == 1
    assert site.champion("cut-short") == second


def test_another_process_is_waited_for_no_longer_than_said(site, registered):
    """A rollback gets a refusal; a promotion is patient."""
    version = registered("busy")
    site.go_live(1, f"models:/busy/{version}")
    with ThreadPoolExecutor(1) as promoter:
        with site.cursor.exclusive():
            with pytest.raises(TrackingError, match="is being delivered to MLflow"):
                deliver(site.workspace, site.root, patience_s=0.0)
            promotion = promoter.submit(deliver, site.workspace, site.root, patience_s=30.0)
            wait([promotion], 0.2)
            assert not promotion.done()
        assert len(promotion.result()) == 1
    assert site.champion("busy") == version


def test_replicated_decision_is_delivered_by_its_own_host(site, registered):
    """A replica has followed it; its own next change is delivered."""
    first, second = registered("replica"), registered("replica")
    site.go_live(1, f"models:/replica/{first}", origin=f"ada@host, {REPLICATION}")
    assert site.deliver() == ()
    assert site.champion("replica") is None

    site.go_live(2, f"models:/replica/{second}")
    site.deliver()

    assert site.champion("replica") == second


def test_old_log_does_not_flood_new_workspace(site, registered, monkeypatch):
    """Without a cursor only the newest change is delivered, and what people said this week."""
    for number in (1, 2):
        site.act("approved", None, scorecard=f"{number}" * 64)
    version = registered("old")
    site.go_live(1, f"models:/old/{version}")
    asked = []

    def unknown(_, digest):
        asked.append(digest)
        raise InputError("nobody has it")

    monkeypatch.setattr("enginegate.tracking.delivery.scorecard_of", unknown)
    monkeypatch.setattr("enginegate.tracking.delivery._FIRST_CONTACT", timedelta(0))

    assert len(site.deliver()) == 1
    assert not {"1" * 64, "2" * 64} & set(asked)


def test_alias_moved_by_hand_returns_to_what_is_live(site, registered):
    """With nothing left to deliver; another alias stays where it was put."""
    live, other = registered("by-hand"), registered("by-hand")
    site.go_live(1, f"models:/by-hand/{live}")
    site.deliver()
    for champion in (other, None):
        site.tracker.remove_alias("by-hand", "champion", live)
        if champion is not None:
            site.tracker.move_alias("by-hand", "champion", champion)
        site.tracker.move_alias("by-hand", "another", other)

        assert site.deliver() == (f"MLflow was updated: by-hand@champion is version {live}.",)

        assert site.champion("by-hand") == live
        assert site.tracker.alias("by-hand", "another") == other
        assert site.deliver() == ()


def test_alias_that_another_repository_moved_is_taken_by_a_promotion_alone(
    site, registered, tmp_path
):
    """Two watches do not take it from each other every ten minutes."""
    first, second = registered("shared"), registered("shared")
    site.go_live(1, f"models:/shared/{first}")
    site.deliver()
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Site(tmp_path / "elsewhere", site.tracker)
    elsewhere.go_live(1, f"models:/shared/{second}")
    elsewhere.deliver()

    assert site.deliver() == ()
    assert site.champion("shared") == second

    assert len(deliver(site.workspace, site.root, reclaim=True)) == 1
    assert site.champion("shared") == first


def test_change_delivered_beside_an_undone_one_moves_the_alias(site, registered):
    """Another release was about to go live and was undone, which the log calls refused."""
    first, second = registered("beside"), registered("beside")
    made = site.go_live(1, f"models:/beside/{first}")
    site.commit(2, f"models:/beside/{second}")
    assert site.deliver() == ()
    assert site.champion("beside") is None

    site.commit(made.version, made.model_uri)
    site.act("refused", 2)
    site.deliver()

    assert site.champion("beside") == first


def test_champion_left_on_a_withdrawn_version_is_removed(site, registered):
    """Somebody put it back by hand."""
    version = registered("put-back")
    card = scorecard(model_uri=f"models:/put-back/{version}")
    site.workspace.save_scorecard(card)
    site.go_live(1, card.model_uri)
    site.withdraw(1, card)
    site.deliver()
    site.tracker.move_alias("put-back", "champion", version)

    assert len(site.deliver()) == 1

    assert site.champion("put-back") is None


def test_kill_between_delivery_and_cursor_delivers_once_more(site, registered, monkeypatch):
    """A line that arrives twice changes nothing."""
    version = registered("killed")
    site.go_live(1, f"models:/killed/{version}")
    with monkeypatch.context() as patch:

        def die(*_):
            raise SystemExit

        patch.setattr(Cursor, "move", die)
        with pytest.raises(SystemExit):
            site.deliver()
    assert site.champion("killed") == version
    assert site.cursor.read() is None

    assert len(site.deliver()) == 1
    assert site.champion("killed") == version
    assert site.cursor.read() == AuditLog(site.root).head()


def test_log_that_began_anew_is_delivered_from_its_first_line(site, registered):
    """Its cursor stands further than the new log goes."""
    first, second = registered("anew"), registered("anew")
    site.go_live(1, f"models:/anew/{first}")
    site.act("refused", 2)
    site.deliver()
    log = AuditLog(site.root)
    log.path.unlink()
    log.head_file.unlink()
    site.go_live(2, f"models:/anew/{second}")

    assert len(site.deliver()) == 1

    assert site.champion("anew") == second
    assert site.cursor.read() == log.head()


def test_delivery_that_waited_delivers_what_is_live_by_then(site, registered):
    """A release goes live while another process delivers: the one that waits reads it after."""
    first, second = registered("overtaken"), registered("overtaken")
    site.go_live(1, f"models:/overtaken/{first}")
    with ThreadPoolExecutor(1) as promoter:
        with site.cursor.exclusive():
            promotion = promoter.submit(deliver, site.workspace, site.root, patience_s=30.0)
            wait([promotion], 0.2)
            assert not promotion.done()
            site.go_live(2, f"models:/overtaken/{second}")
        assert promotion.result() == (
            f"MLflow was updated: overtaken@champion is version {second}.",
        )
    assert site.champion("overtaken") == second


def test_canary_is_not_champion(site, registered):
    """Not while it is watched, nor after it failed; but once it has held."""
    rollouts = RolloutState(site.root)
    first, second = registered("canary"), registered("canary")
    site.go_live(1, f"models:/canary/{first}")
    site.deliver()
    progress = RolloutProgress(model="digits", before=1, canary=2)
    for holds in (False, True):
        with file_lock(site.root / LOCK):
            rollouts.note(progress.model_copy(update={"canary_passed": holds}))
            site.go_live(2, f"models:/canary/{second}")
            assert site.deliver() == ()
        if not holds:
            assert site.deliver() == ()
            site.go_live(1, f"models:/canary/{first}", event="rolled back")
        assert site.champion("canary") == first
        rollouts.settle("digits")

        site.deliver()

        assert site.champion("canary") == (second if holds else first)


def test_read_only_workspace_still_delivers(site, registered):
    """The audit log is there; only the cursor cannot be kept, so a line may arrive twice."""
    version = registered("read-only")
    site.go_live(1, f"models:/read-only/{version}")
    site.workspace.root.mkdir()
    site.workspace.cursors.write_text("no folder")

    assert try_deliver(site.workspace, site.root) == ""
    assert try_deliver(site.workspace, site.root) == ""

    assert site.champion("read-only") == version


def test_rolled_back_promotion_corrects_the_alias(site, registered, monkeypatch):
    """MLflow moved the alias and its answer was lost: what is live again is delivered."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(site.workspace.root))
    first, second = registered("taken-back"), registered("taken-back")
    made = site.go_live(2, f"models:/taken-back/{second}")
    site.deliver()

    def withdraw(*_):
        site.go_live(1, f"models:/taken-back/{first}", event="rolled back")
        return "release 1 is live again"

    publication = SimpleNamespace(
        tables=SimpleNamespace(
            target=SimpleNamespace(repository=site.root), model="digits", approval=None
        ),
        workspace=site.workspace,
        layout=Layout(site.root, "digits"),
        repository=SimpleNamespace(roll_back_promotion=withdraw),
    )
    take_back(SimpleNamespace(get={UNDO: publication, PUBLISHED: made}.get))

    assert site.champion("taken-back") == first


def test_the_alias_does_not_stay_on_a_withdrawn_version(site, registered):
    """The version says by whom and why; another alias stays."""
    version, other = registered("withdrawn"), registered("withdrawn")
    card = scorecard(model_uri=f"models:/withdrawn/{version}")
    site.workspace.save_scorecard(card)
    site.go_live(1, card.model_uri)
    site.deliver()
    site.tracker.move_alias("withdrawn", "another", other)
    site.withdraw(1, card)

    (sentence,) = site.deliver()

    assert "is not champion any more" in sentence
    assert site.champion("withdrawn") is None
    assert site.tracker.alias("withdrawn", "another") == other
    tag = site.tracker.version_tags("withdrawn", version)["enginegate.withdrawn"]
    assert tag.startswith("release 1 by ada at ")
    assert tag.endswith(": it answers nonsense")


def test_late_withdrawal_keeps_alias_of_newer_release(site, registered, monkeypatch):
    """It happened while MLflow was away; by now another release is live."""
    first, second = registered("late"), registered("late")
    card = scorecard(model_uri=f"models:/late/{first}")
    site.workspace.save_scorecard(card)
    site.go_live(1, card.model_uri)
    site.withdraw(1, card)
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", AWAY)
        assert try_deliver(site.workspace, site.root)
    site.go_live(2, f"models:/late/{second}")

    site.deliver()

    assert site.champion("late") == second


def test_acknowledgement_changes_the_shown_state(site, registered):
    """The version shows it from then on; a withdrawn release has nothing left to show it."""
    version = registered("acknowledged")
    site.go_live(1, f"models:/acknowledged/{version}")
    site.act("promise broken", 1, check=3)
    site.act("acknowledged", 1, check=3)
    site.act("acknowledged", 9, check=1)

    assert site.deliver()[-1].endswith("release 1 of digits is shown as not checked.")

    tags = site.tracker.version_tags("acknowledged", version)
    assert tags["enginegate.watch"] == "not checked: release 1"
    assert site.deliver() == ()


def test_run_shows_the_decision(site):
    """Name, answer, reason and origin as tags, also of a scorecard that only MLflow has."""
    card = scorecard(model="decided")
    run = site.tracker.record(card, {})
    card = card.model_copy(update={"mlflow_run": run})
    record_decision(site.root, decision(card, origin="ada@host, command"), "decided")

    assert len(site.deliver()) == 1

    tags = site.tracker.client.get_run(run).data.tags
    assert (tags["decision"], tags["decision.by"]) == ("approve", "ada")
    assert tags["decision.why"] == decision(card).reason
    assert tags["decision.origin"] == "ada@host, command"


def described(site, name, version):
    found = site.tracker.client.get_model_version(name, str(version))
    return found.description, found.tags["enginegate.state"]


def test_versions_say_where_they_stand(site, registered):
    """Live, and the one before, which the alias of a rollback's target stands for."""
    first, second = registered("stands"), registered("stands")
    site.go_live(1, f"models:/stands/{first}")
    site.go_live(2, f"models:/stands/{second}", previous_version=1)
    site.deliver()

    text, state = described(site, "stands", second)
    assert text.startswith("LIVE r2 onnxruntime-int8\n")
    assert state == "live, release 2"
    text, state = described(site, "stands", first)
    assert text.startswith("PREVIOUS r1 onnxruntime-int8\n")
    assert state == "previous, release 1"
    assert site.tracker.alias("stands", "previous") == first


def test_rolled_back_version_says_so(site, registered):
    """By whom and why; nothing is left that a rollback would return to."""
    first, second = registered("undone"), registered("undone")
    site.go_live(1, f"models:/undone/{first}")
    site.go_live(2, f"models:/undone/{second}", previous_version=1)
    site.deliver()
    site.go_live(1, f"models:/undone/{first}", "rolled back", why="p99 rose")
    site.deliver()

    text, state = described(site, "undone", second)
    assert text.startswith("ROLLED BACK r2 onnxruntime-int8\n")
    assert "by ada: p99 rose." in text
    assert state == "rolled back, release 2"
    assert described(site, "undone", first)[0].startswith("LIVE r1")
    assert site.tracker.alias("undone", "previous") is None
    assert site.champion("undone") == first


def test_broken_promise_is_in_the_live_versions_state(site, registered):
    """Until a person acknowledges it."""
    version = registered("broke")
    site.go_live(1, f"models:/broke/{version}")
    site.act("promise broken", 1, check=3, why="p99 31 ms")
    site.deliver()
    broken, _ = described(site, "broke", version)
    site.act("acknowledged", 1, check=3)
    site.deliver()

    assert broken.startswith("LIVE, PROMISE BROKEN r1")
    assert "p99 31 ms" in broken
    assert described(site, "broke", version)[0].startswith("LIVE r1")


def test_page_is_filed_anew_when_something_happened(site):
    """Once for each change: a delivery of nothing draws the same page and writes none."""
    drawn = []

    def draw(filed, found, links):
        drawn.append(filed.digest)
        return f"{[event.event for event in found.events]} {sorted(links)}"

    card = scorecard(model="digits", reason="its page is filed anew")
    run = site.tracker.record(card, {}, make_page=draw)
    card = card.model_copy(update={"mlflow_run": run})
    site.workspace.save_scorecard(card)
    record_decision(site.root, decision(card), "digits")
    for _ in range(2):
        deliver(site.workspace, site.root, make_page=draw)

    path = site.tracker.client.download_artifacts(run, "decision.html")
    assert Path(path).read_text().startswith("['approved'] ['Candidates compared in MLflow'")
    assert set(drawn) == {card.digest}
    assert try_deliver(site.workspace, site.root, make_page=draw) == ""


@pytest.mark.parametrize("error", [TrackingError("no room for pages"), ValueError("no JSON")])
def test_page_that_cannot_be_filed_undoes_no_promotion(site, registered, monkeypatch, error):
    """The alias stands for what is live; the page follows with the next delivery."""
    version = registered("pageless")
    card = scorecard(model="digits", reason=f"its page is refused: {error}")
    run = site.tracker.record(card, {})
    card = card.model_copy(update={"mlflow_run": run})
    site.workspace.save_scorecard(card)
    site.commit(1, f"models:/pageless/{version}")
    site.act("published", 1, scorecard=card.digest)
    with monkeypatch.context() as patch:

        def refuse(*_):
            raise error

        patch.setattr("enginegate.tracking.delivery.file_page", refuse)
        assert len(deliver(site.workspace, site.root, make_page=lambda *_: "page")) == 1
    assert site.champion("pageless") == version

    deliver(site.workspace, site.root, make_page=lambda *_: "page")

    path = site.tracker.client.download_artifacts(run, "decision.html")
    assert Path(path).read_text() == "page"


def test_version_that_cannot_be_described_holds_up_no_answer(site, monkeypatch):
    """The run has the decision, and what is behind it in the log is delivered."""
    card = scorecard(model="undescribed")
    run = site.tracker.record(card, {})
    record_decision(site.root, decision(card := card.model_copy(update={"mlflow_run": run})), "x")

    def refuse(*_):
        raise TrackingError("value too long for type character varying(5000)")

    monkeypatch.setattr("enginegate.tracking.delivery.note_answer", refuse)

    assert len(site.deliver()) == 1
    assert site.tracker.client.get_run(run).data.tags["decision"] == "approve"
    assert site.deliver() == ()
