"""Running flows: they belong to a checkout, not to the installed library."""

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

from enginegate.errors import InputError

_log = logging.getLogger("enginegate.checkout")
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
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "enginegate",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GX_ANALYTICS_ENABLED": "false",
}


# It tells of a decision that is made already: a server that does not answer is no reason to fail.
_ANSWERING = "flows.answer"


def of_checkout(name: str) -> ModuleType:
    """A module of the checkout that the command runs in, such as ``flows.qualify``.

    Raises:
        InputError: the current folder is not a checkout.
        EnginegateError: the Prefect server that is named does not answer.
    """
    root = Path.cwd()
    if not (root / "flows" / "qualify.py").is_file():
        raise InputError(
            f"{root} is not an Enginegate checkout (it has no flows/qualify.py), and this command "
            "runs a flow. Change into your checkout and run it there."
        )
    for variable, value in _PREFECT.items():
        os.environ.setdefault(variable, value)
    for name_of_logger in _COUNTING:
        logging.getLogger(name_of_logger).setLevel(logging.ERROR)
    if "PREFECT_API_URL" not in os.environ and "prefect" not in sys.modules:
        _log.info("starting Prefect inside this process; this takes a few seconds")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if name != _ANSWERING:
        # Not loaded before this: Prefect reads its settings when it is imported.
        importlib.import_module("tasks.prefect_server").check_prefect_answers()
    return importlib.import_module(name)
