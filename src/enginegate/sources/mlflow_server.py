"""How long MLflow's server is waited for, by everything here that asks it.

By itself MLflow waits two minutes for each answer and asks eight times, without a word. Here a
server that accepts connections and answers nothing is given up after ``ANSWER_S``, and one that
stops answering in the middle of something after twice ``MLFLOW_HTTP_REQUEST_TIMEOUT``.
"""

import os
import re
import time
from urllib.parse import urlsplit

from enginegate.errors import TrackingError
from enginegate.redact import link_base, log_if_slow, masked, masked_error

ANSWER_S = 15.0
"""Seconds in which a server must give its first answer."""
_CONNECT_S = 3.0
_SAID_AFTER_S = 3.0
# What follows an answer within this time goes by MLflow's own limits.
_FRESH_S = 5.0
# MLflow reads the limits at each request, the rest when it is imported. What a user has set stays.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
_SYSTEM = re.compile(r"\[Errno -?\d+\] [\w ]+")
_answered: dict[str, float] = {}


def set_mlflow_up() -> None:
    """Limits and quiet for MLflow's client, where the environment does not say otherwise."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def check_answers(tracking_uri: str) -> None:
    """Return if a tracking server answers, whatever it says; a database is not asked.

    Raises:
        TrackingError: nothing accepts a connection there, or nothing answers in ``ANSWER_S``.
    """
    address = urlsplit(tracking_uri)
    if address.scheme not in {"http", "https"} or _is_fresh(tracking_uri):
        return
    shown = masked(tracking_uri)
    waiting = f"waiting for MLflow at {shown}; given up after {ANSWER_S:g} s"
    with log_if_slow(waiting, after_s=_SAID_AFTER_S):
        _ask(tracking_uri, shown)
    _answered[tracking_uri] = time.monotonic()


def _ask(tracking_uri: str, shown: str) -> None:
    set_mlflow_up()
    from mlflow.exceptions import MlflowException  # noqa: PLC0415
    from mlflow.utils.credentials import get_default_host_creds  # noqa: PLC0415
    from mlflow.utils.rest_utils import http_request  # noqa: PLC0415

    try:
        http_request(  # type: ignore[no-untyped-call]
            get_default_host_creds(tracking_uri),  # type: ignore[no-untyped-call]
            "/health",
            "GET",
            max_retries=0,
            raise_on_status=False,
            timeout=(_CONNECT_S, ANSWER_S),
        )
    except (MlflowException, OSError) as error:
        raise TrackingError(_refusal(error, tracking_uri, shown)) from masked_error(error)


def _refusal(error: Exception, tracking_uri: str, shown: str) -> str:
    silent = "Read timed out" in str(error)
    # Of a chain of libraries' sentences the innermost says it.
    system = _SYSTEM.search(str(error))
    why = system[0] if system else str(error)
    what = (
        f"accepts connections and gave no answer in {ANSWER_S:g} s"
        if silent
        else f"could not be reached: {masked(why)}"
    )
    return (
        f"MLflow at {shown} {what}. See whether its server runs "
        f"(curl {link_base(tracking_uri)}/health), or name another with MLFLOW_TRACKING_URI."
    )


def _is_fresh(tracking_uri: str) -> bool:
    return time.monotonic() - _answered.get(tracking_uri, float("-inf")) < _FRESH_S
