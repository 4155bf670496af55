# ruff: noqa: INP001, S603, S310
"""A copy of the checkout with servers of its own, on which a promotion is run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from docs.screenshots.waiting import WAIT_S, until

CHECKOUT = Path(__file__).resolve().parents[2]
POLICY = "policies/digits.toml"
_COPIED = ("flows", "tasks", "validation", "examples", "policies")
_KEPT = ("store", "data", "triton")
_FOREIGN = ("ENGINEGATE_", "PREFECT_", "MLFLOW_")
_STOP_S = 20.0
_SHOWN = 3000


@dataclass(frozen=True, slots=True)
class Stand:
    """A copy of the checkout, where its commands are, and the addresses of its servers."""

    root: Path
    commands: Path
    prefect: str
    mlflow: str

    @property
    def workspace(self) -> Path:
        return self.root / ".enginegate"

    @property
    def environment(self) -> Mapping[str, str]:
        """This process's, without its own workspace and servers."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        return kept | {
            "PATH": f"{self.commands}{os.pathsep}{kept.get('PATH', '')}",
            "ENGINEGATE_ROOT": str(self.root),
            "PREFECT_HOME": str(self.root / "prefect"),
            "PREFECT_API_URL": f"{self.prefect}/api",
            "PREFECT_SERVER_UI_API_URL": f"{self.prefect}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "MLFLOW_TRACKING_URI": self.mlflow,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
        }

    def run(self, *command: str) -> str:
        """What a command printed; it must succeed."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = f"{done.stdout}\n{done.stderr}"[-_SHOWN:]
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
        return done.stdout

    @contextmanager
    def running(self, *command: str) -> Iterator[None]:
        """A command in the background, ended as Ctrl-C would; a failure tells its last lines."""
        path = self.root / f"{command[0]}-{command[1]}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield
            except SystemExit as error:
                said = path.read_text(errors="replace")[-_SHOWN:]
                raise SystemExit(f"{error}\n\n{path.name} ends with:\n{said}") from None
            finally:
                _end(process)

    def ask(self, path: str, body: Mapping[str, object] | None = None, method: str = "POST") -> Any:
        """What Prefect's API answers."""
        request = urllib.request.Request(
            f"{self.prefect}/api{path}",
            method="GET" if body is None else method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return json.loads(reply.read() or b"null")


def new_stand(root: Path, commands: Path, home: Path | None) -> Stand:
    """A copy of the checkout in ``root``, with what another workspace has built and measured."""
    for name in _COPIED:
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, root / name, ignore=unwanted)
    shutil.copy(CHECKOUT / "prefect.yaml", root)
    stand = Stand(root, commands.absolute(), *(f"http://127.0.0.1:{_port()}" for _ in range(2)))
    stand.workspace.mkdir()
    for name in _KEPT:
        if home is not None and (home / name).is_dir():
            shutil.copytree(home / name, stand.workspace / name, symlinks=True)
    return stand


@contextmanager
def started(stand: Stand) -> Iterator[None]:
    """Servers, deployments, a worker and Triton for as long as the block runs; no schedule runs."""
    with _mlflow(stand), _prefect(stand):
        stand.run("prefect", "work-pool", "create", "enginegate", "--type", "process")
        stand.run("prefect", "--no-prompt", "deploy", "--all")
        for deployment in stand.ask("/deployments/filter", {}):
            if deployment["schedules"]:
                stand.ask(f"/deployments/{deployment['id']}", {"paused": True}, "PATCH")
        worker = ("prefect", "worker", "start", "--pool", "enginegate")
        with stand.running(*worker), stand.running("enginegate", "serve", POLICY):
            yield


@contextmanager
def _mlflow(stand: Stand) -> Iterator[None]:
    where = ("--host", "127.0.0.1", "--port", stand.mlflow.rpartition(":")[2], "--workers", "1")
    store = ("--backend-store-uri", f"sqlite:///{stand.workspace / 'mlflow.db'}")
    files = ("--artifacts-destination", str(stand.workspace / "mlartifacts"))
    with stand.running("mlflow", "server", *where, *store, *files):
        until(lambda: _answers(f"{stand.mlflow}/health"), "MLflow answers", seconds=3 * WAIT_S)
        yield


@contextmanager
def _prefect(stand: Stand) -> Iterator[None]:
    where = ("--host", "127.0.0.1", "--port", stand.prefect.rpartition(":")[2])
    health = f"{stand.prefect}/api/health"
    with stand.running("prefect", "server", "start", *where):
        until(lambda: _answers(health), "Prefect answers", seconds=3 * WAIT_S)
        yield


def qualify(stand: Stand) -> str:
    """The digest of the digits example's scorecard."""
    stand.run("python", "-m", "examples.digits.register")
    stand.run("enginegate", "qualify", POLICY)
    (card,) = (stand.workspace / "scorecards").glob("*.json")
    return card.stem


def promotion(stand: Stand, digest: str) -> str:
    """Start it; the run's id once it waits for a person."""
    promote = stand.ask("/deployments/name/promote/promote-digits")
    asked = {"parameters": {"policy": POLICY, "scorecard": digest[:12]}, "name": "promote-digits"}
    run = str(stand.ask(f"/deployments/{promote['id']}/create_flow_run", asked)["id"])
    reach(stand, run, "Suspended")
    return run


def reach(stand: Stand, run: str, state: str) -> None:
    """Wait until the run is in that state; it must not end otherwise."""

    def there() -> bool:
        name = stand.ask(f"/flow_runs/{run}")["state"]["name"]
        if name in {"Failed", "Crashed", "Cancelled"}:
            raise SystemExit(f"The promotion is {name}, not {state}.")
        return bool(name == state)

    until(there, f"the promotion is {state}", seconds=3 * WAIT_S)


def newest_run(stand: Stand, flow: str) -> str:
    """The id of the newest run of a flow."""
    asked = {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_DESC", "limit": 1}
    return str(stand.ask("/flow_runs/filter", asked)[0]["id"])


def artifacts(stand: Stand, run: str) -> dict[str, dict[str, Any]]:
    """What a run left, by key."""
    asked = {"artifacts": {"flow_run_id": {"any_": [run]}}}
    return {each["key"]: each for each in stand.ask("/artifacts/filter", asked)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, and after a while the end, for it and what it started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _answers(address: str) -> bool:
    with urllib.request.urlopen(address, timeout=WAIT_S) as reply:
        return bool(reply.status == HTTPStatus.OK)


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
