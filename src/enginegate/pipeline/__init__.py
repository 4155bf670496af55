"""The one door from the library up to the flows, for its verbs and for a person's own Python.

``flows``, ``tasks`` and ``validation`` are top-level packages. In a checkout they lie in its root;
in an installed wheel they lie beside this file, in ``packages/``, where they cannot meet another
distribution's ``tasks``. They can be imported in a process that has come through here, and in those
that it starts. docs/adr/0014-installed-flows.md says why.
"""

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from enginegate.errors import EnginegateError, InputError
from enginegate.policy.hooks import TAKEN_NAMES

_log = logging.getLogger("enginegate.pipeline")
# While the process ends they count what is left to be sent; by then the terminal is ours no more.
_COUNTING = ("EventsWorker", "APILogWorker")

# Before Prefect is imported: a server inside this process may take a while on its first start, its
# own chatter is not for this terminal, and nothing is sent home.
_PREFECT = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    # Of each answer; by itself six times a minute. A server restarts within four times half of one.
    "PREFECT_API_REQUEST_TIMEOUT": "30",
    "PREFECT_CLIENT_MAX_RETRIES": "3",
    # Its answer while its database is away; a PostgreSQL that restarts is back in seconds.
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "enginegate",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
}

# They tell of a decision that is made already, or tell people by other ways: a server that does not
# answer is no reason to fail.
_NOT_NEEDING = frozenset({"flows.answer", "flows.notices"})
# They tell a server that somebody named, and start none.
_TELLING = frozenset({*_NOT_NEEDING, "flows.automations", "flows.deployments", "flows.prune"})


def pipeline_module(name: str) -> ModuleType:
    """A module such as ``flows.qualify``, in a process whose Prefect is set up for a command.

    Raises:
        InputError: this process has imported other packages of these names.
        EnginegateError: the Prefect server that is named does not answer.
    """
    open_pipeline()
    for variable, value in _PREFECT.items():
        os.environ.setdefault(variable, value)
    for name_of_logger in _COUNTING:
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)
    started_here = "PREFECT_API_URL" not in os.environ and name not in _TELLING
    if started_here and "prefect" not in sys.modules:
        _log.info("starting Prefect inside this process; this takes a few seconds")
    # Not loaded before this: Prefect reads its settings when it is imported.
    import flows  # noqa: PLC0415 - the one edge that runs up

    if name not in _NOT_NEEDING:
        flows.check_prefect_answers()
    return importlib.import_module(name)


def open_pipeline() -> None:
    """Make ``flows``, ``tasks`` and ``validation`` importable here and in processes started here.

    A worker of Dask or Ray that gets tasks by name calls this before it reads them.

    Raises:
        InputError: this process has imported other packages of these names.
        EnginegateError: this installation has none.
    """
    root = _root()
    for name in TAKEN_NAMES:
        place = _place_of(sys.modules.get(name))
        if place is not None and place.parent != root:
            raise InputError(
                f"This process has imported a package {name!r} of its own ({place}), and "
                f"Enginegate's flows are packages named {', '.join(TAKEN_NAMES)}. Run the verb "
                "in a process of its own instead, e.g. `enginegate qualify POLICY --json`."
            )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def enter_project(directory: str) -> dict[str, str]:
    """Prefect's pull step of what `enginegate deploy` deploys: a worker calls it before each run.

    Args:
        directory: the project's folder on the worker; a policy's path starts there.

    Returns:
        ``{"directory": ...}``, which Prefect changes into, too.

    Raises:
        InputError: there is no such folder on this worker.
    """
    if not Path(directory).is_dir():
        raise InputError(
            f"There is no folder {directory} on this worker. Deploy again with `enginegate deploy "
            "--directory PATH`, where PATH is the project's folder on the workers."
        )
    open_pipeline()
    os.chdir(directory)
    return {"directory": directory}


def _root() -> Path:
    """The folder that holds the packages: the wheel's, else the checkout's."""
    here = Path(__file__).resolve()
    for root in (here.parent / "packages", here.parents[3]):
        if (root / "flows" / "qualify.py").is_file():
            return root
    raise EnginegateError(
        f"This installation of Enginegate has no flows: neither {here.parent / 'packages'} nor "
        f"{here.parents[3]} holds flows/qualify.py. Install its wheel, or its checkout with "
        "`pip install -e`."
    )


def _place_of(module: ModuleType | None) -> Path | None:
    """The folder of a package, or the file of a module; None: it has neither."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return Path(places[0]).resolve() if places[0] else None
