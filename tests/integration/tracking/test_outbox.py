"""Telling MLflow later: in order, once, and never held up by what is gone."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from types import SimpleNamespace

import pytest

from enginegate.atomic_io import file_lock, write_file
from enginegate.errors import LedgerError, PublishError
from enginegate.repository import AuditRecord, Current, Layout, record_act
from enginegate.repository.rollout.rollout_state import LOCK, RolloutProgress, RolloutState
from enginegate.tracking import Outbox, decision_message, live_message, withdrawn_message
from enginegate.tracking.messages import Message
from enginegate.workspace import Workspace
from tasks.release import PUBLISHED, UNDO, take_back
from tests.fakes.evidence import WHEN, decision, release, scorecard


@pytest.fixture
def outbox(ledger, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger.tracking_uri)
    return Outbox(Workspace(tmp_path))


def live(name, version, minutes):
    when = WHEN + timedelta(minutes=minutes)
    return Message(at=when, model=name, version=version, alias="champion", tags={"n": str(minutes)})


def test_what_could_not_be_told_is_told_later_in_order(outbox, ledger, registered, monkeypatch):
    """The last one wins; what is told directly comes after what had to wait."""
    first, second = registered("waiting"), registered("waiting")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert "could not be reached" in outbox.tell_or_keep(live("waiting", second, 1))
        outbox.tell_or_keep(live("waiting", first, 2))
        with pytest.raises(LedgerError):
            outbox.tell(live("waiting", second, 3))
    assert len(outbox.waiting()) == 2

    said = outbox.deliver()

    assert len(said) == 2
    assert ledger.alias("waiting", "champion") == first
    assert ledger.version_tags("waiting", second)["n"] == "1"
    assert outbox.waiting() == outbox.deliver() == ()


def test_what_is_gone_holds_nothing_up(outbox, ledger, registered):
    """A deleted version, a deleted run and a damaged file are dropped; the next one arrives."""
    version = registered("kept")
    outbox.workspace.outbox.mkdir()
    (outbox.workspace.outbox / "2026-damaged.json").write_text("{")
    for message in (live("never", 7, 1), decision_message(decision(scorecard()), "f" * 32)):
        path = outbox.workspace.outbox / f"{message.at:%Y%m%dT%H%M%S}-{message.digest[:8]}.json"
        path.write_bytes(message.pretty_json())

    assert outbox.tell_or_keep(live("kept", version, 5)) == ""

    assert outbox.waiting() == ()
    assert ledger.alias("kept", "champion") == version


def go_live(root, version, uri):
    """What is on disk when a release is live."""
    layout = Layout(root, "digits")
    made = release(version=version, model_uri=uri, previous_version=None)
    write_file(layout.release_file(version), made.pretty_json())
    current = Current(version=version, known=(version,), changed_at=WHEN)
    write_file(layout.current_file, current.pretty_json())
    return made


def test_a_change_that_was_cut_short_before_it_was_told_is_told(outbox, ledger, registered):
    """Killed between the commit and the alias: whoever delivers next tells what is live."""
    root, version = outbox.workspace.root / "live", registered("cut-short")
    with outbox.expecting(root, "digits"):
        assert outbox.deliver() == ()
        go_live(root, 3, f"models:/cut-short/{version}")

    (said,) = outbox.deliver()

    assert "cut-short@champion" in said
    assert ledger.alias("cut-short", "champion") == version
    assert ledger.version_tags("cut-short", version)["enginegate.release"] == "3"
    assert outbox.deliver() == ()


def test_a_change_that_was_refused_or_told_leaves_no_note(outbox):
    """And a workspace that cannot be written to keeps nobody from changing what is live."""
    root = outbox.workspace.root / "live"
    go_live(root, 1, "models:/digits/1")
    with pytest.raises(PublishError), outbox.expecting(root, "digits"):
        raise PublishError("it did not prove itself")
    assert list(outbox.workspace.outbox.iterdir()) == []

    with outbox.expecting(root, "digits"):
        go_live(root, 2, "models:/digits/2")
    outbox.told("digits")
    assert list(outbox.workspace.outbox.iterdir()) == []

    outbox.workspace.outbox.rmdir()
    outbox.workspace.outbox.write_text("no folder")
    with outbox.expecting(root, "digits"):
        go_live(root, 3, "models:/digits/3")


def test_while_another_process_tells_it_waits_no_longer_than_it_says(
    outbox, ledger, registered, monkeypatch
):
    """What is kept stays kept, and nothing but a refusal comes back; a promotion is patient."""
    monkeypatch.setattr("enginegate.tracking.outbox._LOCK_TIMEOUT_S", 0.0)
    version = registered("busy")
    outbox.workspace.outbox.mkdir()
    with ThreadPoolExecutor(1) as promoter:
        with file_lock(outbox.workspace.outbox / ".lock"):
            refusal = outbox.tell_or_keep(live("busy", version, 1))

            assert "just being told" in refusal
            with pytest.raises(LedgerError, match="just being told"):
                outbox.deliver()
            telling = promoter.submit(outbox.tell, live("busy", version, 2))
            wait([telling], 0.2)
        telling.result()
    assert outbox.waiting() == ()
    assert ledger.version_tags("busy", version)["n"] == "2"


def test_what_was_live_is_not_told_after_what_is(outbox, ledger, registered, monkeypatch):
    """A delivery has read that release 2 is live when 3 becomes live: whoever tells 3 waits."""
    root = outbox.workspace.root / "live"
    second, third = registered("overtaken"), registered("overtaken")
    with outbox.expecting(root, "digits"):
        go_live(root, 2, f"models:/overtaken/{second}")
    send, read, telling = Outbox._send, threading.Event(), threading.Event()

    def late(self, message):
        if message.version == second:
            read.set()
            telling.wait(0.5)
        send(self, message)
        if message.version == third:
            telling.set()

    monkeypatch.setattr(Outbox, "_send", late)
    with ThreadPoolExecutor(1) as watcher:
        delivery = watcher.submit(outbox.deliver)
        assert read.wait(30.0)
        outbox.tell(live("overtaken", third, 3))
        delivery.result()

    assert ledger.alias("overtaken", "champion") == third


@pytest.mark.parametrize("way", ["tell", "tell_or_keep"])
def test_whatever_waited_what_is_live_is_told(outbox, ledger, registered, way):
    """A promotion, or a rollback, waits for its turn while somebody else rolls back to 1."""
    root = outbox.workspace.root / "live"
    first, second = registered(way), registered(way)
    waits = live_message(go_live(root, 2, f"models:/{way}/{second}"), root)
    back = live_message(go_live(root, 1, f"models:/{way}/{first}"), root)

    assert outbox.tell_or_keep(back) == ""
    getattr(outbox, way)(waits)

    assert ledger.alias(way, "champion") == first
    assert ledger.version_tags(way, first)["enginegate.release"] == "1"


def test_a_canary_is_no_champion(outbox, ledger, registered):
    """Not while it is watched, by any message, nor after it failed; but once it has held."""
    root, rollouts = outbox.workspace.root / "live", RolloutState(outbox.workspace.root / "live")
    first, second = registered("canary"), registered("canary")
    before = live_message(go_live(root, 1, f"models:/canary/{first}"), root)
    outbox.tell(before)
    progress = RolloutProgress(model="digits", before=1, canary=2)
    for holds in (False, True):
        with outbox.expecting(root, "digits"):
            with file_lock(root / LOCK):
                rollouts.note(progress.model_copy(update={"held": holds}))
                go_live(root, 2, f"models:/canary/{second}")
                assert outbox.deliver() == ()
                assert outbox.tell_or_keep(before) == ""
                outbox.tell(before)
                outbox.told("digits")
                assert outbox.deliver() == ()
            if not holds:
                assert outbox.deliver() == ()
                go_live(root, 1, f"models:/canary/{first}")
            assert ledger.alias("canary", "champion") == first
            rollouts.settle("digits")

        outbox.deliver()

        assert ledger.alias("canary", "champion") == (second if holds else first)
        assert outbox.waiting() == ()


def test_where_nothing_can_be_kept_it_is_told_now(outbox, ledger, registered, monkeypatch):
    """Or it is said that it is lost; what cannot be deleted is told, and holds nothing up."""
    version, folder = registered("kept-nowhere"), outbox.workspace.outbox
    folder.write_text("no folder")

    assert outbox.tell_or_keep(live("kept-nowhere", version, 1)) == ""
    assert ledger.alias("kept-nowhere", "champion") == version
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        refusal = outbox.tell_or_keep(live("kept-nowhere", version, 2))
    assert "could not be reached" in refusal
    assert "Nor could it be kept" in refusal

    folder.unlink()
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", read_only)
        assert outbox.tell_or_keep(live("kept-nowhere", version, 3)) == ""
    assert ledger.version_tags("kept-nowhere", version)["n"] == "3"


def read_only(*_, **__):
    raise PermissionError("read-only")


def test_a_promotion_that_is_taken_back_is_corrected(outbox, ledger, registered, monkeypatch):
    """MLflow moved the alias and its answer was lost: whoever delivers next tells what is live."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(outbox.workspace.root))
    root = outbox.workspace.root / "live"
    first, second = registered("taken-back"), registered("taken-back")
    release = go_live(root, 2, f"models:/taken-back/{second}")
    outbox.tell(live_message(release, root))

    def withdraw(*_):
        go_live(root, 1, f"models:/taken-back/{first}")
        return "release 1 is live again"

    tables = SimpleNamespace(target=SimpleNamespace(repository=root), model="digits")
    publication = SimpleNamespace(
        tables=tables,
        workspace=Workspace.here(),
        layout=Layout(root, "digits"),
        repository=SimpleNamespace(withdraw=withdraw),
    )
    take_back(SimpleNamespace(get={UNDO: publication, PUBLISHED: release}.get))
    outbox.deliver()

    assert ledger.alias("taken-back", "champion") == first


def withdrawn(root, version):
    """What is on disk when a release was withdrawn."""
    Layout(root, "digits").current_file.unlink()
    deed = {"model": "digits", "release": version, "who": "ada", "why": "it answers nonsense"}
    record_act(root, AuditRecord(event="withdrawn", origin="ada@host, command", **deed))


@pytest.mark.parametrize("by", ["the command", "whoever delivers next"])
def test_the_alias_does_not_stay_on_what_was_withdrawn(outbox, ledger, registered, by):
    """Also where the process died between the commit and MLflow; the version says why."""
    root, version = outbox.workspace.root / "live", registered("withdrawn")
    other = registered("withdrawn")
    uri = f"models:/withdrawn/{version}"
    outbox.tell(live_message(go_live(root, 1, uri), root))
    ledger.move_alias("withdrawn", "another", other)
    with outbox.expecting(root, "digits"):
        assert outbox.deliver() == ()
        withdrawn(root, 1)

    if by == "the command":
        assert outbox.tell_or_keep(withdrawn_message(uri, root, "digits")) == ""
        outbox.told("digits")
        assert outbox.deliver() == ()
    else:
        (said,) = outbox.deliver()
        assert "is not champion any more" in said

    assert ledger.alias("withdrawn", "champion") is None
    assert ledger.alias("withdrawn", "another") == other
    tag = ledger.version_tags("withdrawn", version)["enginegate.withdrawn"]
    assert tag.startswith("release 1 by ada at ")
    assert tag.endswith(": it answers nonsense")
    assert list(outbox.workspace.outbox.glob("*.change")) == []


def test_a_withdrawal_told_late_takes_no_alias_from_a_newer_release(
    outbox, ledger, registered, monkeypatch
):
    """It was kept while MLflow was away; by then another release is live."""
    root = outbox.workspace.root / "live"
    first, second = registered("late"), registered("late")
    go_live(root, 1, f"models:/late/{first}")
    withdrawn(root, 1)
    message = withdrawn_message(f"models:/late/{first}", root, "digits")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert outbox.tell_or_keep(message)
    go_live(root, 2, f"models:/late/{second}")
    ledger.move_alias("late", "champion", second)

    outbox.deliver()

    assert ledger.alias("late", "champion") == second


def test_a_run_is_told_who_decided(outbox, ledger):
    """Name, answer, reason and origin as tags."""
    run = ledger.record(scorecard(), {})

    outbox.tell(decision_message(decision(scorecard(), origin="ada@host, command"), run))

    tags = ledger.client.get_run(run).data.tags
    assert (tags["decision"], tags["decision.by"]) == ("approve", "ada")
    assert tags["decision.origin"] == "ada@host, command"
