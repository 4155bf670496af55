"""Telling MLflow later: in order, once, and never held up by what is gone."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from enginegate.candidate import FileDigest
from enginegate.decision import Promise, Release
from enginegate.durable import file_lock, write_file
from enginegate.errors import LedgerError, PublishError
from enginegate.ledger import Outbox, decision_message
from enginegate.ledger.outbox import Message
from enginegate.repository import Current, Layout
from enginegate.workspace import Workspace
from tests.fakes.evidence import FP32, SERVING, WHEN, decision, scorecard, sha


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
    card = scorecard(model="digits")
    layout = Layout(root, "digits")
    release = Release(
        model="digits",
        version=version,
        model_uri=uri,
        candidate=FP32,
        engine_sha256=sha("e"),
        serving=SERVING,
        backend="python",
        inputs=(),
        outputs=(),
        golden=FileDigest(sha256=sha("a"), size_bytes=1),
        golden_max_abs_error=0.1,
        files={},
        scorecard_sha256=card.digest,
        decision=decision(card),
        previous_version=None,
        promise=Promise(p99_ms=9, throughput_per_s=50, slo_p99_ms=25),
        published_at=WHEN,
    )
    write_file(layout.release_file(version), release.pretty_json())
    current = Current(version=version, known=(version,), changed_at=WHEN)
    write_file(layout.current_file, current.pretty_json())


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
    outbox, registered, monkeypatch
):
    """What is kept stays kept, and nothing but a refusal comes back."""
    monkeypatch.setattr("enginegate.ledger.outbox._LOCK_TIMEOUT_S", 0.0)
    version = registered("busy")
    outbox.workspace.outbox.mkdir()
    with file_lock(outbox.workspace.outbox / ".lock"):
        refusal = outbox.tell_or_keep(live("busy", version, 1))

        assert "just being told" in refusal
        with pytest.raises(LedgerError, match="just being told"):
            outbox.deliver()
    assert len(outbox.deliver()) == 1


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


def test_a_run_is_told_who_decided(outbox, ledger):
    """Name, answer, reason and origin as tags."""
    run = ledger.record(scorecard(), {}, slo_p99_ms=25.0)

    outbox.tell(decision_message(decision(scorecard(), origin="ada@host, command"), run))

    tags = ledger.client.get_run(run).data.tags
    assert (tags["decision"], tags["decision.by"]) == ("approve", "ada")
    assert tags["decision.origin"] == "ada@host, command"
