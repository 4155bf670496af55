"""Deployments from an installed package, on a real Prefect server, up to a run of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import InputError
from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from flows.deployments import deploy_policies
from tests.fakes.family import _POLICY as POLICY

pytestmark = pytest.mark.xdist_group("flows")

_ROOT = Path(__file__).parents[3]
_DIGITS = _ROOT / "policies" / "digits.toml"


def there(name):
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(name)


@pytest.fixture
def project(tmp_path):
    """A project of its own: a policy in a folder that is no checkout."""
    (tmp_path / ".enginegate").mkdir()
    (tmp_path / "policies").mkdir()
    path = tmp_path / "policies" / "tiny.toml"
    path.write_text(POLICY.format(root=tmp_path))
    return path


def test_deployments_are_those_of_a_checkout(prefect_server, monkeypatch):
    """What `prefect.yaml` deploys for a policy; it alone has the scan, switched off."""
    del prefect_server  # it only has to run
    monkeypatch.chdir(_ROOT)
    said = CliRunner().invoke(app, ["deploy", str(_DIGITS)])

    assert said.exit_code == 0, said.output
    documents = yaml.safe_load((_ROOT / "prefect.yaml").read_text())["deployments"]
    expected = [each for each in documents if each["name"] != "scan-digits"]
    assert "Next: prefect worker start --pool enginegate" in said.output
    for document in expected:
        found = there(f"{document['entrypoint'].split('.')[1]}/{document['name']}")
        limit = document.get("concurrency_limit")
        assert found.entrypoint == document["entrypoint"]
        assert found.description == document["description"]
        assert found.tags == document["tags"]
        assert found.parameters == document["parameters"]
        assert found.work_pool_name == document["work_pool"]["name"]
        assert found.job_variables == document["work_pool"]["job_variables"]
        assert found.pull_steps == [
            {"enginegate.pipeline.enter_project": {"directory": str(_ROOT)}}
        ]
        options = found.concurrency_options
        assert (options and options.collision_strategy.value) == (
            limit and limit["collision_strategy"]
        )
        assert [(each.schedule.cron, each.slug, each.active) for each in found.schedules] == [
            (each["cron"], each["slug"], each["active"]) for each in document.get("schedules", ())
        ]


def test_deploying_again_keeps_a_paused_schedule(prefect_server, project):
    """Somebody paused the watch while a server is mended; a new version of this package comes."""
    del prefect_server  # it only has to run
    deploy_policies([project], "enginegate")
    watch = there("watch/watch-tiny")
    with get_client(sync_client=True) as client:
        client.update_deployment_schedule(watch.id, watch.schedules[0].id, active=False)

    deploy_policies([project], "enginegate", Path("/srv/elsewhere"))

    again = there("watch/watch-tiny")
    assert again.id == watch.id
    assert [each.active for each in again.schedules] == [False]
    (step,) = again.pull_steps
    assert step["enginegate.pipeline.enter_project"] == {"directory": "/srv/elsewhere"}


def test_policy_with_a_scan_table_is_scanned_for(prefect_server, project):
    """Every five minutes, by the deployment that qualifies."""
    del prefect_server  # it only has to run
    assert "scan/scan-tiny" not in deploy_policies([project], "enginegate")
    project.write_text(project.read_text() + '\n[scan]\nalias = "candidate"\n')

    assert "scan/scan-tiny" in deploy_policies([project], "enginegate")

    scan = there("scan/scan-tiny")
    assert scan.parameters["deployment"] == "qualify/qualify-tiny"
    assert scan.schedules[0].active


def test_worker_runs_it_in_the_project(prefect_server, project, tmp_path):
    """From a folder that is neither the project nor a checkout."""
    del prefect_server  # it only has to run
    root = read_policy(project).target.repository
    root.mkdir()
    AuditLog(root).tell("published", "tiny", why="ada: margins are wide", release=1)
    AuditLog(root).tell("withdrawn", "tiny", why="ada: it was the wrong one", release=1)
    deploy_policies([project], "enginegate")
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(there("watch/watch-tiny").id).id
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Other tests of this process may have a workspace of their own.
    unwanted = {"PYTHONPATH", "ENGINEGATE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "PREFECT__FLOW_RUN_ID": str(run),
    }

    command = [sys.executable, "-m", "prefect.engine"]
    subprocess.run(command, cwd=elsewhere, env=environment, check=True, timeout=300)

    with get_client(sync_client=True) as client:
        ended = client.read_flow_run(run)
    assert ended.state.is_completed(), ended.state
    assert (tmp_path / ".enginegate" / "logs").is_dir() or list(
        (tmp_path / ".enginegate").iterdir()
    )
    assert not list(elsewhere.iterdir())


def test_deploying_needs_a_server_and_distinct_models(prefect_server, project, tmp_path):
    """Two policies of one model would overwrite each other's deployments."""
    del prefect_server  # it only has to run
    (tmp_path / "policies" / "other.toml").write_text(project.read_text())

    with pytest.raises(InputError, match="both for the model 'tiny'"):
        deploy_policies([project, tmp_path / "policies" / "other.toml"], "enginegate")
