"""What a worker's flow runs log on Prefect's server, as `prefect.yaml` has them started."""

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.settings import PREFECT_API_URL

from enginegate.data import write_data
from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from enginegate.repository.history.journal import Journal
from flows.qualify import qualify
from flows.watch import watch
from tests.fakes.family import _POLICY as POLICY
from tests.fakes.family import samples

pytestmark = pytest.mark.xdist_group("flows")

_CHECKOUT = Path(__file__).parents[3]


def variables():
    """The environment that every deployment gives its flow runs."""
    deployments = yaml.safe_load((_CHECKOUT / "prefect.yaml").read_text())["deployments"]
    (found,) = {
        tuple(sorted(each["work_pool"]["job_variables"]["env"].items())) for each in deployments
    }
    return dict(found)


def test_flow_run_shows_library_logs(prefect_server, tmp_path):
    """Warnings, and what is no more than progress: here what a killed promotion left."""
    del prefect_server  # it only has to run
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.format(root=tmp_path))
    root = read_policy(path).target.repository
    root.mkdir()
    Journal(root).open("publish", "tiny", 7)
    AuditLog(root).tell("published", "tiny", why="ada: margins are wide", release=1)
    AuditLog(root).tell("withdrawn", "tiny", why="ada: it was the wrong one", release=1)

    said = {}
    for _ in range(3):
        said |= logged(started(path), path)
        if "the next run sends it" not in said["enginegate.announce"]:
            break

    assert "publish of tiny release 7 was cut short" in said["enginegate.release"]
    assert "nothing is live of tiny after 1" in said["enginegate.announce"]


def test_prefect_keeps_nothing_of_how_one_signs_in_at_mlflow(prefect_server, tmp_path):
    """Neither in the logs, where a failure comes with everything it was raised from, nor in the
    run itself."""
    del prefect_server  # it only has to run
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.format(root=tmp_path))
    for seed, name in enumerate(("evaluation", "calibration", "traffic")):
        write_data(samples(600, seed), tmp_path / f"{name}.npz")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://ada:secret@127.0.0.1:{closed.getsockname()[1]}/?token=t0ken"

        run = started(path, qualify, "flows.qualify.qualify")
        said = logged(run, path, check=False, MLFLOW_TRACKING_URI=nobody)

    with get_client(sync_client=True) as client:
        kept = f"{client.read_flow_run(run)} {client.read_flow_run_states(run)} {said}"
    assert "MLflow at http://***@127.0.0.1" in kept
    assert "Traceback" in kept
    assert "secret" not in kept
    assert "t0ken" not in kept


def started(policy, flow=watch, entrypoint="flows.watch.watch"):
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            flow_id=client.create_flow(flow),
            name=f"test-{uuid.uuid4().hex[:6]}",
            entrypoint=entrypoint,
        )
        parameters = {"policy": str(policy)}
        return client.create_flow_run_from_deployment(deployment, parameters=parameters).id


def logged(run, policy, *, check=True, **further):
    """Run it in a process of its own, as a worker does; the lines on the server, by logger."""
    # A test before this one may have set some, as the command does for a terminal.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_LOGGING")
    }
    environment |= variables() | {
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "PREFECT__FLOW_RUN_ID": str(run),
        "ENGINEGATE_HOME": str(policy.parent / "workspace"),
        "PYTHONPATH": str(_CHECKOUT),
        **further,
    }
    command = [sys.executable, "-m", "prefect.engine"]
    subprocess.run(command, cwd=_CHECKOUT, env=environment, check=check, timeout=300)
    with get_client(sync_client=True) as client:
        mine = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
        lines = client.read_logs(mine, limit=200)
    said: dict[str, list[str]] = {}
    for line in lines:
        said.setdefault(line.name, []).append(line.message)
    return {name: "\n".join(messages) for name, messages in said.items()}
