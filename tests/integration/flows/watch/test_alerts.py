"""Promises that are broken, and what cannot be checked: who is told, and for how long."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect.events import AutomationCore
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import ExitCode, RepositoryError, ServerError
from enginegate.evidence import Outcome
from enginegate.policy import read_policy
from enginegate.policy.recording import Shadow
from enginegate.repository.deploy.upgrades import UpgradeFinding
from enginegate.shadow import import_sample
from enginegate.tracking import Tracker
from enginegate.watch.log import WatchLog
from enginegate.workspace import Workspace
from flows.watch import watch
from tests.fakes.family import samples
from tests.fakes.watched import broken, edited, gates, only_here, release_of, visitors

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def shown(path, family):
    """What MLflow shows of the live release: its run's gate and note, its version's tag."""
    tracker = Tracker(family.workspace.tracking_uri, family.workspace.artifacts)
    release = release_of(path)
    tags = tracker.client.get_run(tracker.watch_run("tiny", release.digest)).data.tags
    version = tracker.version_tags("tiny", int(release.model_uri.rpartition("/")[2]))
    return tags["gate"], tags["mlflow.note.content"], version["enginegate.watch"]


def timeline(path):
    """The first words of each of Prefect's artifacts about what is live there, oldest first."""
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["live-tiny"])),
            sort=ArtifactSort.CREATED_DESC,
        )
    place = str(read_policy(path).target.repository.resolve())
    here = [each for each in found if each.metadata_ == {"enginegate.place": place}]
    return [each.description.partition(" release ")[0] for each in reversed(here)]


def test_broken_promise_stays_red_until_acknowledged(released, tmp_path, family, alerts):
    """In Prefect, MLflow and the terminal: two inconclusive checks after it change nothing."""
    slow = edited(
        released, tmp_path / "p.toml", ("p99_over_promise = 1000", "p99_over_promise = 1e-6")
    )
    terminal = CliRunner()
    with visitors(released):
        run = watch(slow, 0.0, return_state=True)

    assert (run.is_failed(), run.name) == (True, "Broken promise")
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
    assert timeline(released) == [
        "**Promise broken at check 1, not acknowledged:**",
        "**Broken promise acknowledged by ada:**",
    ]
    assert "promise broken" not in terminal.invoke(app, ["status", str(released)]).output


def test_answers_unlike_fp32_alert(released, tmp_path, monkeypatch, alerts):
    """What this release answered when it was recorded counts, not what it would answer now."""
    monkeypatch.setattr("tasks.live_sample.latest_sample", only_here(tmp_path / "shadow"))
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


def test_the_automation_of_the_page_is_prefects():
    """What docs/watching.md tells people to create themselves is what Prefect takes."""
    page = (Path(__file__).parents[4] / "docs" / "watching.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)

    (made,) = [AutomationCore.model_validate(yaml.safe_load(block)) for block in blocks]

    assert "promote" in str(made.trigger.match_related)
