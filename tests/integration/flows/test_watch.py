"""The scheduled flow that watches what is live, recorded traffic and the live repository."""

import re
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from prefect.events import AutomationCore
from prefect.events.clients import AssertingEventsClient
from prefect.events.worker import EventsWorker
from typer.testing import CliRunner

from enginegate.atomic_io import file_lock
from enginegate.cli.app import app
from enginegate.decision import Promise
from enginegate.engines import open_engine, serving
from enginegate.errors import ExitCode, RepositoryError, ServerError
from enginegate.evidence import Outcome
from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.traffic import Traffic
from enginegate.policy import read_policy
from enginegate.policy.recording import Shadow
from enginegate.repository import (
    AuditLog,
    Golden,
    Layout,
    LiveRepository,
    Package,
    open_target,
)
from enginegate.repository.deploy.upgrades import UpgradeFinding
from enginegate.repository.history.journal import Journal
from enginegate.repository.lock import hold_lock
from enginegate.repository.rollout.rollout_state import LOCK, RolloutProgress, RolloutState
from enginegate.shadow import import_sample, latest_sample
from enginegate.tracking import Tracker
from enginegate.triton.endpoint import live_addresses, live_client, live_server
from enginegate.watch.log import PromiseBrokenError, WatchCheck, WatchLog
from enginegate.workspace import Workspace, now
from flows.qualify import qualify
from flows.rollback import rollback
from flows.scan import scan
from flows.watch import _acted, watch
from flows.withdraw import withdraw
from tasks.build import build, export
from tasks.live_sample import compare_live
from tasks.release import recover_interrupted
from tasks.watch import RolledBack, deliver_to_mlflow, roll_back_failed
from tests.fakes.evidence import FP32, SERVING, decision, scorecard, sha
from tests.fakes.family import classifier, register, samples
from validation.live import live_finding
from validation.outputs import outputs_to_compare

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]

_WATCH = """
[watch]
look_s = 0.3
p99_over_promise = 1000
min_requests = 5
window_s = 600
"""


def compared(policy, release):
    return compare_live.fn(
        release,
        policy.live_tables,
        policy.traffic_tables,
        policy.gates,
        outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices),
        Workspace.of(policy),
    )


@pytest.fixture(scope="module")
def policy(family, tmp_path_factory):
    """The family's, with short checks and a live repository of its own."""
    root = tmp_path_factory.mktemp("watched")
    path = family.edited(root / "policy.toml", (f"{family.root}/live", f"{root}/live"))
    path.write_text(path.read_text() + _WATCH)
    return path


@pytest.fixture(scope="module")
def released(policy, family):
    """Two releases of the FP32 engine, of two registered versions, the second one live."""
    rules, serving_as = read_policy(policy), SERVING.model_copy(update={"max_batch_size": 4})
    workspace = Workspace.of(rules)
    source = export.fn(rules.model, rules.data.evaluation, workspace)
    engine = build.fn(FP32, rules.engine_tables, source, workspace)
    served = serving(engine.value, engine.folder)
    inputs = dict(samples(8, 6).inputs)
    with open_engine(engine.value, engine.folder) as runner:
        golden = Golden(inputs, runner.run(inputs))
    with live_server(rules.target.repository, family.workspace) as server, server.client() as asker:
        repository = LiveRepository(rules.target.repository, asker)
        for before, uri in [
            (None, "models:/tiny/1"),
            (1, register(family.workspace, classifier())),
        ]:
            card = scorecard(model="tiny", model_uri=uri, onnx_sha256=source.value.file.sha256)
            family.workspace.save_scorecard(card)
            package = Package(
                model="tiny",
                model_uri=uri,
                candidate=FP32,
                engine_sha256=engine.value.file.sha256,
                approved={engine.value.filename: engine.value.file},
                files=dict(served.files),
                backend=served.backend,
                gpu=served.gpu,
                inputs=engine.value.inputs,
                outputs=engine.value.outputs,
                serving=serving_as,
                golden=golden,
                golden_max_abs_error=1e-3,
                scorecard_sha256=card.digest,
                decision=decision(card),
                promise=Promise(p99_ms=9, throughput_per_s=400, slo_p99_ms=250, server_ms=2),
            )
            repository.publish(package, expected=before)
        yield policy


@pytest.fixture
def alerts(prefect_server, monkeypatch):
    """What Prefect would have been told, caught by its own client for tests."""
    del prefect_server  # it only has to run
    worker = EventsWorker.instance(AssertingEventsClient)
    monkeypatch.setattr(EventsWorker, "instance", lambda *_: worker)

    def told():
        worker.wait_until_empty()
        sent = worker._client.events
        return [event.payload for event in sent if event.event == "enginegate.watch.failed"]

    yield told
    worker.drain()


def edited(path, target, *edits):
    """A copy of a policy with replacements."""
    text = path.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    target.write_text(text)
    return target


def release_of(path):
    layout = Layout(read_policy(path).target.repository, "tiny")
    return layout.release(layout.current().version)


def visitors(path):
    """Users' requests, eighty a second without a gap, until the block ends."""
    address = live_addresses(read_policy(path).target).grpc
    traffic = Traffic.from_data("tiny", samples(50, 9))
    return BackgroundLoad(address, traffic, rate_per_s=80)


def gates(check):
    return {finding.gate: finding for finding in check.findings}


def test_old_samples_are_deleted_and_young_ones_stay(policy, tmp_path, monkeypatch):
    """The policy's age counts, whoever recorded them; nothing is live, so nothing is looked at."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    source = tmp_path / "sample.npz"
    np.savez(source, **{"input.x": np.zeros((3, 16), np.float32)})
    home = tmp_path / "workspace" / "shadow"
    sample, _ = import_sample(source, "tiny", Shadow(), home=home)
    empty = edited(policy, tmp_path / "empty.toml", ('/live"', '/nothing"'))

    assert watch(empty).done == ()
    assert sample.is_dir()
    later = now() + timedelta(days=40)
    monkeypatch.setattr("tasks.watch.now", lambda: later)
    done = watch(empty)

    assert any(sample.name in sentence for sentence in done.done)
    assert done.checks == ()
    assert not sample.exists()


@pytest.fixture
def three_looks(monkeypatch):
    """A run for two seconds has three, whatever a check takes here."""
    clock = SimpleNamespace(monotonic=count(0.0, 0.6).__next__)
    monkeypatch.setattr("flows.watch.time", clock)


def test_healthy_release_passes_every_check(released, tmp_path, family, alerts, three_looks):
    """Checks in a row in its window, then one a run; kept, and in MLflow beside the promise.

    Every server of a fleet is looked at: here two more names of the same one.
    """
    del three_looks  # it only has to be there
    steady = edited(released, tmp_path / "steady.toml", ("window_s = 600", "window_s = 0"))
    same = live_addresses(read_policy(released).target)
    member = f'[[target.fleet]]\nendpoint = "{same.grpc}"'
    steady.write_text(
        f'{steady.read_text()}\n{member}\nname = "b"\nmetrics = "{same.metrics}"\n'
        f'{member}\nname = "c"\n'
    )
    with visitors(released):
        young = watch(released, 2.0).checks
        old = watch(steady, 2.0).checks

    assert len(young) == 3
    assert all(check.intensive and check.outcome is Outcome.PASSED for check in young), young
    assert [(check.number, check.intensive) for check in old] == [(len(young) + 1, False)]
    assert gates(young[0])["pending"].outcome is Outcome.PASSED
    assert list(old[0].others) == ["b", "c"]
    assert {finding.scope for finding in old[0].findings} == {"live", "live/b", "live/c"}
    queues = {f.scope: (f.outcome, f.advisory) for f in old[0].findings if f.gate == "pending"}
    assert queues["live/b"] == (Outcome.PASSED, False)
    assert queues["live/c"] == (Outcome.INCONCLUSIVE, True)
    assert old[0].outcome is Outcome.PASSED
    assert WatchLog.at(family.workspace, release_of(released)).read() == (*young, *old)
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    run = tracker.watch_run("tiny", release_of(released).digest)
    for name in ("live/server_ms", "live/promised_server_ms"):
        steps = {point.step for point in tracker.client.get_metric_history(run, name)}
        assert steps == {check.number for check in (*young, *old)}
    version = int(release_of(released).model_uri.rpartition("/")[2])
    tags = tracker.version_tags("tiny", version)
    assert tags["enginegate.watch"].startswith("passed: release 2")
    assert alerts() == []


def test_rollout_in_progress_is_not_checked(released):
    """Whoever promotes checks at the canary; a roll-out that a kill cut short is nobody's."""
    rollouts = RolloutState(read_policy(released).target.repository)
    rollouts.note(RolloutProgress(model="tiny", before=1, canary_passed=True))
    try:
        with file_lock(rollouts.root / LOCK):
            assert watch(released, 0.0).checks == ()
        assert len(watch(released, 0.0).checks) == 1
    finally:
        rollouts.settle("tiny")


def test_no_traffic_is_inconclusive_and_does_nothing(released, tmp_path, alerts):
    """It is said, and even a policy that rolls back leaves the release where it is."""
    rules = edited(released, tmp_path / "p.toml", ("look_s", 'on_failure = "rollback"\nlook_s'))

    (check,) = watch(rules, 0.0).checks

    assert (check.outcome, check.action) == (Outcome.INCONCLUSIVE, "none")
    assert "5 are needed" in str(check)
    assert release_of(released).version == 2
    assert alerts() == []


def test_fresh_sample_is_compared_once(released, tmp_path, monkeypatch):
    """Live answers are compared with FP32's, by slice too, and inputs with calibration."""
    monkeypatch.setattr("tasks.live_sample.latest_sample", _only_here(tmp_path / "shadow"))
    source, data = tmp_path / "sample.npz", samples(120, 4)
    np.savez(source, **{"input.x": data.inputs["x"], "slice.light": data.slices["light"]})
    import_sample(source, "tiny", Shadow(), home=tmp_path / "shadow")

    first, second = (watch(released, 0.0).checks[0] for _ in range(2))

    found = gates(first)
    assert found["agreement"].outcome is Outcome.PASSED
    assert found["agreement"].samples == 120
    assert found["slice_agreement"].outcome is Outcome.PASSED
    assert found["input_drift"].samples == 120
    assert first.sample is not None
    assert second.sample is None
    assert "agreement" not in gates(second)


def test_live_requests_are_recorded_where_the_policy_lets_them(released, tmp_path, monkeypatch):
    """Without traffic of its own the policy means live traffic; what users were answered counts."""
    monkeypatch.setattr("tasks.live_sample.latest_sample", _only_here(tmp_path))
    root = read_policy(released).data.evaluation.parent
    mock = (f'traffic = "{root}/traffic.npz"\nrate_per_s = 200\n', "")
    rules = edited(released, tmp_path / "p.toml", mock, ("trace_rate = 2", "trace_rate = 1"))
    with visitors(released):
        (check,) = watch(rules, 0.0).checks

    agreement = gates(check)["agreement"]
    assert check.sample is not None
    assert agreement.samples > 0
    assert agreement.value == 1.0


def broken(path, *run):
    """The checks of a run in which a promise was broken, and what it said."""
    with pytest.raises(PromiseBrokenError) as raised:
        watch(path, *run)
    return raised.value.watched.checks, str(raised.value)


def shown(path, family):
    """What MLflow shows of the live release: its run's gate and note, its version's tag."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    release = release_of(path)
    tags = tracker.client.get_run(tracker.watch_run("tiny", release.digest)).data.tags
    version = tracker.version_tags("tiny", int(release.model_uri.rpartition("/")[2]))
    return tags["gate"], tags["mlflow.note.content"], version["enginegate.watch"]


def test_broken_promise_stays_red_until_acknowledged(released, tmp_path, family, alerts):
    """In Prefect, MLflow and the terminal: two inconclusive checks after it change nothing."""
    slow = edited(
        released, tmp_path / "p.toml", ("p99_over_promise = 1000", "p99_over_promise = 1e-6")
    )
    terminal = CliRunner()
    with visitors(released):
        run = watch(slow, 0.0, return_state=True)

    assert run.is_failed()
    for said in ["Release 2 of tiny (onnxruntime-fp32, models:/tiny/", "promised <= 2e-06 ms"]:
        assert said in run.message
    assert f"enginegate acknowledge {slow} --release 2 --reason WHY" in run.message
    for _ in range(2):
        (check,), said = broken(released, 0.0)
        assert check.outcome is Outcome.INCONCLUSIVE
        assert "Nobody has acknowledged this" in said
    gate, note, tag = shown(released, family)
    assert gate == "failed"
    assert "server_time: promised" in note
    assert "inconclusive" in note
    assert tag.startswith("failed: release 2")
    once = terminal.invoke(app, ["watch", str(released), "--once"])
    assert once.exit_code != 0
    assert once.exception.exit_code is ExitCode.GATES_FAILED
    assert "inconclusive" in once.output
    status = terminal.invoke(app, ["status", str(released)]).output
    assert "promise broken, not acknowledged: release 2" in status
    assert len(alerts()) == 1

    why = ["--approver", "ada", "--reason", "a noisy neighbour"]
    done = terminal.invoke(app, ["acknowledge", str(released), *why])

    assert done.exit_code == 0, done.output
    assert shown(released, family)[0] == "inconclusive"
    assert shown(released, family)[2].startswith("inconclusive: release 2")
    assert watch(released, 0.0, return_state=True).is_completed()
    assert "promise broken" not in terminal.invoke(app, ["status", str(released)]).output


def test_answers_unlike_fp32_alert(released, tmp_path, monkeypatch, alerts):
    """What this release answered when it was recorded counts, not what it would answer now."""
    monkeypatch.setattr("tasks.live_sample.latest_sample", _only_here(tmp_path / "shadow"))
    source, x = tmp_path / "sample.parquet", samples(120, 5).inputs["x"]
    wrong = np.zeros((120, 4), np.float32)
    columns = {
        "input.x": pa.FixedSizeListArray.from_arrays(x.reshape(-1), 16),
        "output.logits": pa.FixedSizeListArray.from_arrays(wrong.reshape(-1), 4),
        "model_version": np.full(120, 2),
    }
    pq.write_table(pa.table(columns), source)
    import_sample(source, "tiny", Shadow(), home=tmp_path / "shadow")

    (check,), _ = broken(released, 0.0)
    CliRunner().invoke(app, ["acknowledge", str(released), "--reason", "a test"])

    assert gates(check)["agreement"].outcome is Outcome.FAILED
    assert check.action == "alert"
    (alert,) = alerts()
    assert (alert["release"], alert["action"]) == (2, "alert")
    assert "answers agree with FP32's" in alert["why"]


def test_without_a_server_the_watch_is_errored(released, tmp_path, alerts):
    """It alerts, the run fails, the check is kept, and nothing is rolled back."""
    repository = read_policy(released).target.repository
    rules = edited(
        released,
        tmp_path / "p.toml",
        ("look_s", 'on_failure = "rollback"\nlook_s'),
        (f'"{repository}"', f'"{repository}"\nendpoint = "127.0.0.1:1"'),
    )

    with pytest.raises(ServerError, match=r"check \d+ of release 2 of tiny: errored"):
        watch(rules, 0.0)

    kept = WatchLog.at(Workspace.here(), release_of(released)).read()[-1]
    assert (kept.outcome, kept.action) == (Outcome.ERRORED, "alert")
    assert release_of(released).version == 2
    (alert,) = alerts()
    assert "127.0.0.1:1" in alert["why"]


def test_dead_fleet_server_is_errored(released, tmp_path, alerts):
    """The others are measured all the same."""
    rules = edited(released, tmp_path / "p.toml")
    rules.write_text(
        f'{rules.read_text()}\n[[target.fleet]]\nname = "b"\nendpoint = "127.0.0.1:1"\n'
    )

    with pytest.raises(RepositoryError, match="Server 'b' does not answer"):
        watch(rules, 0.0)

    kept = WatchLog.at(Workspace.here(), release_of(released)).read()[-1]
    assert [(f.gate, f.scope) for f in kept.problems if f.outcome is Outcome.ERRORED] == [
        ("measured", "live/b")
    ]
    assert kept.reading is not None
    assert len(alerts()) == 1


@pytest.mark.parametrize("fault", ["no FP32", "damaged"])
def test_incomparable_sample_is_errored(released, tmp_path, monkeypatch, fault):
    """Nobody watches agreement then, so it is not fine."""
    home, release = tmp_path / "shadow", release_of(released)
    monkeypatch.setattr("tasks.live_sample.latest_sample", _only_here(home))
    source = tmp_path / "sample.npz"
    np.savez(source, **{"input.x": samples(20, 4).inputs["x"]})
    sample, _ = import_sample(source, "tiny", Shadow(), home=home)
    if fault == "no FP32":
        card = scorecard(model="tiny", onnx_sha256=sha("9"))
        Workspace.here().save_scorecard(card)
        release = release.model_copy(update={"scorecard_sha256": card.digest})
    else:
        data = next(path for path in sample.rglob("*") if path.suffix != ".json" and path.is_file())
        data.chmod(0o600)
        data.write_bytes(b"something else")

    (found,) = compared(read_policy(released), release).findings

    assert (found.outcome, found.advisory) == (Outcome.ERRORED, False)


def test_without_anything_to_compare_it_is_advisory(released, tmp_path, monkeypatch):
    """Nobody visits while live traffic is recorded: said, and no fault."""
    monkeypatch.setattr("tasks.live_sample.latest_sample", _only_here(tmp_path))
    root = read_policy(released).data.evaluation.parent
    mock = (f'traffic = "{root}/traffic.npz"\nrate_per_s = 200\n', "")
    rules = read_policy(edited(released, tmp_path / "p.toml", mock))

    (found,) = compared(rules, release_of(released)).findings

    assert (found.outcome, found.advisory) == (Outcome.INCONCLUSIVE, True)


def slow_look(release):
    """One that the policy answers with a rollback."""
    return WatchCheck(
        model="tiny",
        version=release.version,
        release_sha256=release.digest,
        number=1,
        at=now(),
        intensive=True,
        reading=None,
        findings=(live_finding("server_time", Outcome.FAILED, "slow"),),
        action="rollback",
    )


def test_rollback_alerts_before_the_registry_changes(released, monkeypatch, alerts):
    """Whatever happens to MLflow or to this process then, people were told."""
    rules, live = read_policy(released), release_of(released)

    def killed(*_):
        raise InterruptedError

    monkeypatch.setattr("flows.watch.roll_back_failed", lambda *_: RolledBack(live, "It is live."))
    monkeypatch.setattr("flows.watch.update_mlflow", killed)
    with pytest.raises(InterruptedError):
        _acted(rules.live_tables, live, slow_look(live), Workspace.of(rules))

    assert [alert["action"] for alert in alerts()] == ["rollback"]


def test_only_the_release_that_failed_is_rolled_back(released, monkeypatch, alerts):
    """Somebody promotes while the watch decides: theirs stays, which is said and no alert."""
    rules, failed = read_policy(released), release_of(released)
    real = open_target(rules.live_tables, Workspace.here())
    asked = []

    class Faster:
        """Another operator's rollback comes first."""

        def rollback(self, model, to, **options):
            asked.append(options.get("expected"))
            real.rollback("tiny", 1, reason="somebody else")
            return real.rollback(model, to, **options)

    monkeypatch.setattr("tasks.watch.open_target", lambda *_, **__: Faster())
    monkeypatch.setattr("flows.watch.roll_back_failed", roll_back_failed.fn)
    try:
        acted = _acted(rules.live_tables, failed, slow_look(failed), Workspace.of(rules))
        assert release_of(released).version == 1
    finally:
        real.rollback("tiny", failed.version, reason="as it was")

    assert (asked, acted.action) == ([failed.version], "none")
    assert alerts() == []


def test_dead_fleet_server_does_not_silence_a_rollback(
    released, tmp_path, family, monkeypatch, alerts
):
    """The others went back, which is what is alerted, with the dead one named; and told MLflow."""
    path = edited(released, tmp_path / "p.toml")
    path.write_text(f'{path.read_text()}\n[[target.fleet]]\nname = "b"\nendpoint = "127.0.0.1:1"\n')
    rules, failed = read_policy(path), release_of(released)
    monkeypatch.setattr("flows.watch.roll_back_failed", roll_back_failed.fn)
    checks = WatchLog.at(Workspace.here(), failed)
    try:
        acted = _acted(rules.live_tables, failed, slow_look(failed), Workspace.of(rules))
        assert (release_of(released).version, checks.rolled_back) == (1, True)
    finally:
        checks.return_claim()
        alone = open_target(read_policy(released).live_tables, Workspace.here())
        alone.rollback("tiny", failed.version, reason="as it was")

    assert acted.action == "rollback"
    (alert,) = alerts()
    assert (alert["release"], alert["action"]) == (2, "rollback")
    assert re.search(
        r"(?s)1 of tiny is live again on the primary, but not.*b: No live", alert["why"]
    )
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    assert tracker.alias("tiny", "champion") == 1


def test_slower_release_is_rolled_back_once(released, tmp_path, family, alerts, monkeypatch):
    """The reason is in the audit log, `champion` follows, and it happens once a release."""
    rules = edited(
        released,
        tmp_path / "p.toml",
        ("p99_over_promise = 1000", 'p99_over_promise = 1e-6\non_failure = "rollback"'),
    )
    root = read_policy(rules).target.repository
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    with visitors(released):
        (check,), said = broken(rules)

        assert "It was rolled back: release 1 is live again." in said
        assert (check.outcome, check.action) == (Outcome.FAILED, "rollback")
        assert release_of(released).version == 1
        assert tracker.alias("tiny", "champion") == 1
        noted, last = AuditLog(root).read()[-2:]
        assert (noted.event, noted.release, noted.check) == ("promise broken", 2, check.number)
        assert (last.event, last.release) == ("rolled back", 1)
        assert "check" in last.why
        assert "server_time" in last.why
        assert "watch" in last.origin
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
        (first,), _ = broken(rules)
        rollback(rules, 2)
        (again,), _ = broken(rules)
    waiting = CliRunner().invoke(app, ["acknowledge", str(rules), "--reason", "a test"]).output
    assert [waiting.count(f"release {number} broke") for number in (1, 2)] == [1, 2]

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    opened = read_policy(released)
    updated = deliver_to_mlflow.fn(opened.live_tables, Workspace.of(opened))
    assert any("champion" in sentence for sentence in updated)
    assert (first.version, first.outcome, first.action) == (1, Outcome.FAILED, "alert")
    assert (again.version, again.outcome, again.action) == (2, Outcome.FAILED, "alert")
    assert release_of(released).version == 2
    assert [(a["release"], a["action"]) for a in alerts()] == [
        (2, "rollback"),
        (1, "alert"),
        (2, "alert"),
    ]


def test_modified_release_fails_the_watch(released, alerts):
    """One byte is enough; the run says which file, alerts, and no check makes up for it."""
    folder = read_policy(released).target.repository / "tiny" / "2"
    engine = next(folder.glob("model.onnx"))
    content, mode = engine.read_bytes(), engine.stat().st_mode
    engine.chmod(0o644)
    engine.write_bytes(content + b"x")
    try:
        with pytest.raises(RepositoryError, match=r"2/model\.onnx"):
            watch(released, 0.0)
    finally:
        engine.write_bytes(content)
        engine.chmod(mode)

    assert "model.onnx" in alerts()[-1]["why"]


def test_upgrade_that_the_live_release_would_not_survive_fails_the_watch(
    released, monkeypatch, alerts
):
    """What was read from the server's machine alerts; what is usual for its version is said."""
    usual = UpgradeFinding(certain=False, words="its images had TensorRT 11.0")
    surely = UpgradeFinding(certain=True, words="TensorRT 11.0.0 was installed beneath it")
    monkeypatch.setattr("tasks.watch.find_upgrades", lambda *_, **__: (usual,))
    assert usual.words in watch(released, 0.0).done

    monkeypatch.setattr("tasks.watch.find_upgrades", lambda *_, **__: (surely, usual))
    with pytest.raises(RepositoryError, match="installed beneath it"):
        watch(released, 0.0)

    assert surely.words in alerts()[-1]["why"]


def test_interrupted_change_is_recovered_by_the_watch(policy, tmp_path, monkeypatch):
    """Undone by the next flow; a busy or a missing repository is no reason to fail."""
    root = tmp_path / "nothing"
    rules = read_policy(edited(policy, tmp_path / "p.toml", ('/live"', '/nothing"')))
    target = rules.target.model_copy(update={"repository": root})
    rules = rules.model_copy(update={"target": target})

    assert recover_interrupted.fn(rules.live_tables, Workspace.of(rules)) == ()
    assert not root.exists()
    root.mkdir()
    Journal(root).open("publish", "tiny", 7)
    monkeypatch.setattr("enginegate.repository.lock.LOCK_TIMEOUT_S", 0.0)
    with hold_lock(root, timeout_s=0.0):
        assert recover_interrupted.fn(rules.live_tables, Workspace.of(rules)) == ()
    (said,) = recover_interrupted.fn(rules.live_tables, Workspace.of(rules))

    assert "publish of tiny release 7 was cut short" in said
    assert recover_interrupted.fn(rules.live_tables, Workspace.of(rules)) == ()


@pytest.mark.parametrize("flow", [qualify, watch, scan], ids=lambda flow: flow.name)
def test_every_flow_begins_by_picking_up(policy, prefect_server, monkeypatch, flow):
    """Before anything else: here it gets no further."""
    del prefect_server  # it only has to run

    def begun(*_):
        raise InterruptedError(flow.name)

    monkeypatch.setattr(f"flows.{flow.name}.recover_interrupted", begun)
    with pytest.raises(InterruptedError, match=flow.name):
        flow(policy)


def test_first_release_is_withdrawn(released, family):
    """The last test that has one: nothing serves, the alias stands for nothing, `status` says why.

    The release before the live one is what to go back to, so that is asked for instead.
    """
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    why = ["--approver", "ada", "--reason", "it answers nonsense"]
    terminal = CliRunner()
    with pytest.raises(RepositoryError, match="enginegate rollback POLICY"):
        withdraw(released, "it answers nonsense", "ada")
    rollback(released)
    refused = terminal.invoke(app, ["rollback", str(released)]).exception
    assert "enginegate withdraw POLICY --reason WHY" in str(refused)
    without = terminal.invoke(app, ["withdraw", str(released), "--reason", " "]).exception
    assert without.exit_code is ExitCode.BAD_INPUT
    assert tracker.alias("tiny", "champion") == 1

    done = terminal.invoke(app, ["withdraw", str(released), *why])

    assert done.exit_code == 0, (done.output, done.exception)
    assert "Nothing is live" in done.output
    assert tracker.alias("tiny", "champion") is None
    assert "by ada" in tracker.version_tags("tiny", 1)["enginegate.withdrawn"]
    with live_client(read_policy(released).target) as client:
        assert not client.model_ready("tiny")
    status = terminal.invoke(app, ["status", str(released)]).output
    assert "nothing is live; release 1 was withdrawn by ada at " in status
    assert "it answers nonsense" in status
    assert terminal.invoke(app, ["verify", str(released)]).exit_code == 0
    assert watch(released, 0.0).checks == ()


def test_the_automation_of_the_page_is_prefects():
    """What docs/watching.md tells people to create themselves is what Prefect takes."""
    page = (Path(__file__).parents[3] / "docs" / "watching.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)

    (made,) = [AutomationCore.model_validate(yaml.safe_load(block)) for block in blocks]

    assert "promote" in str(made.trigger.match_related)


def _only_here(home):
    """The session's workspace is shared, so a test's samples are kept in a folder of its own."""

    def find(_, model):
        return latest_sample(home, model)

    return find
