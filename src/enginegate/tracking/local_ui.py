"""MLflow's UI on this machine, for a database that no tracking server shows.

It listens on loopback only: it asks nobody who they are, and whoever reaches it may change runs.
"""

import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from enginegate.errors import InputError, TrackingError
from enginegate.tracking.connection import Connection
from enginegate.tracking.ui_links import usual_port
from enginegate.triton.supervised_process import SupervisedProcess, supervise

_HOST = "127.0.0.1"
_SQLITE = "sqlite:///"
# Importing MLflow's server takes seconds, on a busy machine half a minute.
_START_S = 120.0
_GRACE_S = 5.0
_POLL_S = 0.2
_LOG_LINES = 5
_SETTINGS = {
    # Without its job runner it takes a fifth of the memory and starts in a fraction of the time.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True, slots=True)
class LocalUi:
    """A UI that answers.

    Attributes:
        address: of the UI, without a slash at its end.
        usual: whether links that were filed earlier lead to it.
    """

    address: str
    usual: bool
    process: SupervisedProcess
    log: Path

    def check_runs(self) -> None:
        """Raise if it has ended.

        Raises:
            TrackingError: it ended by itself; with its last lines.
        """
        if self.process.status() is not None:
            raise _ended(self.log)


@contextmanager
def local_ui(connection: Connection, log: Path, port: int | None = None) -> Iterator[LocalUi]:
    """Run MLflow's UI on a database for as long as the block runs.

    Args:
        connection: to the database.
        log: file that gets what MLflow prints.
        port: on loopback; None: the database's usual one, and where that is taken any free one.

    Raises:
        InputError: nothing was recorded in the database yet, or the port that was named is taken.
        TrackingError: it does not start; with its last lines.
    """
    _check_recorded(connection)
    usual = usual_port(connection.tracking_uri)
    chosen = _free_port(usual if port is None else port, only=port is not None)
    log.parent.mkdir(parents=True, exist_ok=True)
    # The address of a database may hold a password, which a command line would show to everybody.
    environment = {**_SETTINGS, "MLFLOW_BACKEND_STORE_URI": connection.tracking_uri}
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", _HOST, "--port", str(chosen)),
        *("--workers", "1", "--no-serve-artifacts"),
        *("--default-artifact-root", connection.artifact_root.absolute().as_uri()),
    ]
    with supervise(command, log=log, environment=environment, grace_s=_GRACE_S) as process:
        ui = LocalUi(f"http://{_HOST}:{chosen}", chosen == usual, process, log)
        _wait(ui)
        yield ui


def _check_recorded(connection: Connection) -> None:
    uri = connection.tracking_uri
    if uri.startswith(_SQLITE) and not Path(uri.removeprefix(_SQLITE)).is_file():
        raise InputError(
            f"There is nothing to show: {connection.shown_uri} is not there. Qualify a model first "
            "(enginegate qualify POLICY), or name the database with MLFLOW_TRACKING_URI."
        )


def _free_port(wanted: int, *, only: bool) -> int:
    for candidate in (wanted,) if only else (wanted, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, candidate))
            return int(probe.getsockname()[1])
    raise InputError(
        f"Port {wanted} of {_HOST} is taken by another program. Leave --port out to have a free "
        "one chosen."
    )


def _wait(ui: LocalUi) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        ui.check_runs()
        with suppress(OSError), urllib.request.urlopen(f"{ui.address}/health", timeout=1) as answer:  # noqa: S310 - loopback
            if answer.status == HTTPStatus.OK:
                return
        time.sleep(_POLL_S)
    raise TrackingError(
        f"MLflow's UI did not answer at {ui.address} within {_START_S:g} s. Its log is {ui.log}."
    )


def _ended(log: Path) -> TrackingError:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.is_file() else []
    said = "\n".join(f"  {line}" for line in lines)
    return TrackingError(f"MLflow's UI ended. Its log {log} ends with:\n{said}")
