"""Two real work pools whose workers have different devices, and a host that dies half-way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.settings import PREFECT_API_URL

from enginegate.candidate import Engine
from enginegate.policy import read_policy
from tests.fakes.family import make_family

pytestmark = [pytest.mark.triton, pytest.mark.long, pytest.mark.xdist_group("flows")]

_CHECKOUT = Path(__file__).parents[3]
_DEVICES = """
[devices.one-thread]
pool = "one-thread"

[devices.two-threads]
pool = "two-threads"

[devices.two-threads.tables.onnxruntime]
threads = 2

[approval]"""
# Two heartbeats of Prefect's that are missing; the program itself waits for six.
_QUALIFY = """
import sys, pathlib
import flows.pools
from flows.qualify import qualify
flows.pools._SILENT_S = 65.0
qualify(pathlib.Path(sys.argv[1]))
"""
_LIMIT_S = 420.0


@pytest.fixture
def environment(prefect_server, tmp_path, monkeypatch):
    """What the qualification and its workers share: server, workspace and code."""
    del prefect_server  # it only has to run
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    kept = {n: v for n, v in os.environ.items() if not n.startswith("PREFECT_LOGGING")}
    return kept | {
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PYTHONPATH": str(_CHECKOUT),
    }


@pytest.fixture
def policy(environment, tmp_path):
    del environment
    family = make_family(tmp_path)
    text = family.policy.read_text()
    start, end = text.index("[shadow]"), text.index("[candidates]")
    text = text[:start] + text[end:]
    text = text.replace('tensorrt = ["fp16"]\n', "").replace("[approval]", _DEVICES.strip())
    family.policy.write_text(text)
    return family.policy


@pytest.fixture
def start(environment, tmp_path):
    """Start a program whose output is kept; whatever is left of it ends with the test."""
    started = []

    def run(name, *command):
        with (tmp_path / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=_CHECKOUT,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        process.wait(60)


def worker(start, name, pool):
    return start(name, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process")


def runs_of(client, device):
    deployment = client.read_deployment_by_name(f"qualify-device/tiny-{device}")
    mine = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
    return client.read_flow_runs(flow_run_filter=mine)


def wait_for(condition, what):
    deadline_s = time.monotonic() + _LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)
    return found


def test_another_worker_takes_over_from_a_host_that_died(start, policy, tmp_path):
    """Both kinds on one scorecard; what the dead run had finished is not done again."""
    workspace = tmp_path / "workspace"
    with get_client(sync_client=True) as client:
        for pool in ("one-thread", "two-threads"):
            client.create_work_pool(WorkPoolCreate(name=pool, type="process"), overwrite=True)
        worker(start, "one", "one-thread")
        doomed = worker(start, "doomed", "two-threads")
        qualifying = start("qualify", "-c", _QUALIFY, str(policy))

        def engines():
            """Engines with two threads, and when each was made."""
            manifests = (workspace / "store" / "engines").glob("[!.]*/manifest.json")
            return {
                path: path.stat().st_mtime_ns
                for path in manifests
                if Engine.read(path).flags["intra_op_threads"] == "2"
            }

        wait_for(lambda: len(engines()) == 2, "no engine with two threads was built")
        built = engines()
        (run,) = wait_for(lambda: list(runs_of(client, "two-threads")), "no run")
        doomed.kill()
        os.kill(int(client.read_flow_run(run.id).infrastructure_pid.rpartition(":")[2]), 9)
        worker(start, "heir", "two-threads")

        assert wait_for(lambda: qualifying.poll() is not None, "qualify did not end")
        states = [r.state.type.value for r in runs_of(client, "two-threads")]

    assert qualifying.returncode == 0, (tmp_path / "qualify.log").read_text()
    assert sorted(states) == ["COMPLETED", "CRASHED"]
    assert len(runs_of_part := list((workspace / "store/results/devices").glob("*.json"))) == 2, (
        runs_of_part
    )
    assert engines() == built
    (card,) = [
        card for card in _scorecards(policy) if card.devices == ("one-thread", "two-threads")
    ]
    assert [view.winner is not None for view in card.by_device] == [True, True]


def _scorecards(policy):
    from enginegate.workspace import Workspace

    return Workspace.of(read_policy(policy)).scorecards()
