"""Checks of what is live: what is measured, compared, recorded, and what is nobody's fault."""

from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from enginegate.atomic_io import file_lock
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.policy.recording import Shadow
from enginegate.repository.history.journal import Journal
from enginegate.repository.lock import hold_lock
from enginegate.repository.rollout.rollout_state import LOCK, RolloutProgress, RolloutState
from enginegate.shadow import import_sample
from enginegate.tracking import Tracker
from enginegate.triton.endpoint import live_addresses
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace, now
from flows.qualify import qualify
from flows.scan import scan
from flows.watch import watch
from tasks.live_sample import compare_live
from tasks.release import recover_interrupted
from tests.fakes.evidence import scorecard, sha
from tests.fakes.family import samples
from tests.fakes.watched import edited, gates, only_here, release_of, visitors
from validation.outputs import outputs_to_compare

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def compared(policy, release):
    return compare_live.fn(
        release,
        policy.live_tables,
        policy.traffic_tables,
        policy.gates,
        outputs_to_compare(policy.task, policy.outputs, policy.metrics, policy.slices),
        Workspace.of(policy),
    )


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
    monkeypatch.setattr("tasks.live_sample.latest_sample", only_here(tmp_path / "shadow"))
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
    monkeypatch.setattr("tasks.live_sample.latest_sample", only_here(tmp_path))
    root = read_policy(released).data.evaluation.path.parent
    mock = (f'traffic = "{root}/traffic.npz"\nrate_per_s = 200\n', "")
    rules = edited(released, tmp_path / "p.toml", mock, ("trace_rate = 2", "trace_rate = 1"))
    with visitors(released):
        (check,) = watch(rules, 0.0).checks

    agreement = gates(check)["agreement"]
    assert check.sample is not None
    assert agreement.samples > 0
    assert agreement.value == 1.0


@pytest.mark.parametrize("fault", ["no FP32", "damaged"])
def test_incomparable_sample_is_errored(released, tmp_path, monkeypatch, fault):
    """Nobody watches agreement then, so it is not fine."""
    home, release = tmp_path / "shadow", release_of(released)
    monkeypatch.setattr("tasks.live_sample.latest_sample", only_here(home))
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
    monkeypatch.setattr("tasks.live_sample.latest_sample", only_here(tmp_path))
    root = read_policy(released).data.evaluation.path.parent
    mock = (f'traffic = "{root}/traffic.npz"\nrate_per_s = 200\n', "")
    rules = read_policy(edited(released, tmp_path / "p.toml", mock))

    (found,) = compared(rules, release_of(released)).findings

    assert (found.outcome, found.advisory) == (Outcome.INCONCLUSIVE, True)


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
