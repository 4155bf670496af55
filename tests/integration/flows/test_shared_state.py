"""Prefect and MLflow on one real PostgreSQL, MLflow's files in object storage; killed under way.

Both servers and every step of a flow are processes of their own, as on several machines.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest

from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from enginegate.triton.endpoint import live_client, live_server
from tests.fakes.family import make_family, samples
from tests.fakes.object_servers import s3_settings
from tests.fakes.postgres import postgres, postgres_is_missing

pytestmark = [pytest.mark.long, pytest.mark.triton, pytest.mark.xdist_group("postgres")]

ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-c", "from enginegate.cli import main; main()")
_STARTS_S, _ENDS_S = 120.0, 240.0


@contextmanager
def serving(command, address, folder, settings):
    """Run a server until the block ends; it answers when the block begins."""
    log = folder / f"{command[2].replace('.', '-')}.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, *command], env=settings, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _STARTS_S
        while True:
            with suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(address, timeout=5).close()  # noqa: S310
                break
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(log.read_text()[-3000:])
            time.sleep(0.3)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def database():
    if problem := postgres_is_missing():
        pytest.skip(problem)
    with postgres() as server:
        for name in ("prefect", "mlflow"):
            server.make_database(name)
        yield server


@pytest.fixture(scope="module")
def shared(database, endpoint, tmp_path_factory):
    """The environment of every process: both servers' addresses, and the model that they share."""
    root = tmp_path_factory.mktemp("shared")
    storage = s3_settings(endpoint)
    prefect, mlflow = free_port(), free_port()
    settings = {
        **os.environ,
        **storage,
        "PREFECT_HOME": str(root / "prefect"),
        "PREFECT_API_DATABASE_CONNECTION_URL": database.url("postgresql+asyncpg", "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_API_URL": f"http://127.0.0.1:{prefect}/api",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(root / "results"),
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow}",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "ENGINEGATE_HOME": str(root / "workspace"),
        "DO_NOT_TRACK": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="mlflow")
        own = {"PREFECT_API_URL": ""}
        prefect_command = ["-m", "prefect", "server", "start", "--host", "127.0.0.1"]
        mlflow_command = ["-m", "mlflow", "server", "--workers", "1", "--port", str(mlflow)]
        mlflow_command += ["--backend-store-uri", database.url("postgresql", "mlflow")]
        mlflow_command += ["--artifacts-destination", "s3://mlflow/artifacts"]
        with (
            serving(
                [*prefect_command, "--port", str(prefect)],
                f"http://127.0.0.1:{prefect}/api/health",
                root,
                settings | own,
            ),
            serving(mlflow_command, f"http://127.0.0.1:{mlflow}/health", root, settings),
        ):
            yield settings, make_family(root)


def call(settings, *command):
    """Run an ``enginegate`` command to its end."""
    return subprocess.run(
        [*COMMAND, *command],
        env=settings,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=_ENDS_S,
        check=False,
    )


def in_own_process(settings, code, *arguments):
    """What a few lines print last, as JSON; they run where a worker would run them."""
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=settings,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=_ENDS_S,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def runs_filed(card):
    """MLflow's runs of one scorecard: of the qualification itself, and of its candidates."""
    import mlflow

    client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    tags = [run.data.tags for run in client.search_runs(ids, max_results=500)]
    tags = [each for each in tags if card.digest in each.values()]
    below = [each for each in tags if "mlflow.parentRunId" in each]
    return len(tags) - len(below), len(below)


def test_qualification_goes_on_after_its_database_was_killed(shared, database):
    """One scorecard, filed once, its files in object storage; no engine is built a second time."""
    settings, family = shared
    with (family.root / "qualify.log").open("wb") as log:
        running = subprocess.Popen(
            [*COMMAND, "qualify", str(family.policy)],
            env=settings,
            stdout=log,
            stderr=log,
            cwd=ROOT,
        )
    engines = family.workspace.engines
    deadline = time.monotonic() + _ENDS_S
    while not any(engines.glob("[!.]*/manifest.json")):
        assert running.poll() is None, (family.root / "qualify.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)

    database.kill()
    time.sleep(3.0)
    database.start()

    first = running.wait(_ENDS_S)
    built = {path: path.stat().st_mtime_ns for path in engines.glob("[!.]*/manifest.json")}
    second = call(settings, "qualify", str(family.policy))

    words = (family.root / "qualify.log").read_text()
    assert first in {0, 5}, words[-3000:]
    assert second.returncode == 0, (second.stdout + second.stderr)[-3000:]
    after = {path: path.stat().st_mtime_ns for path in engines.glob("[!.]*/manifest.json")}
    assert built.items() <= after.items()
    assert len(family.workspace.scorecards()) == 1
    card = family.workspace.scorecards()[0]
    assert runs_filed(card) == (1, len(card.verdicts))
    stored = boto3.client("s3").list_objects_v2(Bucket="mlflow", Prefix="artifacts/")
    assert any(entry["Key"].endswith("scorecard.json") for entry in stored["Contents"])


_BEGIN = """
import json, sys
from prefect.exceptions import Pause
from tests.fakes.deployed import Deployed
run = Deployed(sys.argv[1], sys.argv[2])
try:
    run.step()
except Pause:
    print(json.dumps([str(run.id), run.state]))
"""
_ANSWER = """
import json, sys, uuid
from prefect.flow_runs import resume_flow_run
answer = {"decision": "approve", "approver": "ada", "reason": "margins are wide"}
resume_flow_run(uuid.UUID(sys.argv[1]), run_input=answer)
print(json.dumps("resumed"))
"""
_GO_ON = """
import json, sys, uuid
from tests.fakes.deployed import Deployed
run = Deployed.__new__(Deployed)
run.id = uuid.UUID(sys.argv[1])
release = run.step()
print(json.dumps([release.version, release.scorecard_sha256, run.state]))
"""


def test_suspended_promotion_outlives_its_database(shared, database):
    """It is still suspended when the database is back, and is published once when it is answered.

    The database is killed once more between the answer and the process that reads it.
    """
    settings, family = shared
    call(settings, "qualify", str(family.policy))
    card = family.workspace.scorecards()[-1]
    repository = read_policy(family.policy).target.repository
    with live_server(repository, family.workspace):
        run, state = in_own_process(settings, _BEGIN, family.policy, card.digest)
        assert state == "Suspended"
        database.kill()
        time.sleep(1.0)
        database.start()

        assert in_own_process(settings, _ANSWER, run) == "resumed"
        database.kill()
        database.start()
        released = in_own_process(settings, _GO_ON, run)

        assert released == [1, card.digest, "Completed"]
        client = live_client(read_policy(family.policy).target)
        reply = client.infer("tiny", {"x": samples(1, 9).inputs["x"]})
        assert int(reply.model_version) == 1
    events = [event.event for event in AuditLog(repository).read()]
    assert (events.count("approved"), events.count("published")) == (1, 1)
    tracked = in_own_process(settings, _ALIASES)
    assert tracked == {"champion": "1"}


_ALIASES = """
import json, os, mlflow
client = mlflow.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
print(json.dumps(client.get_registered_model("tiny").aliases))
"""
