"""MLflow's server: how long it is waited for, and the files of the logged model that a URI means.

By itself MLflow waits two minutes for each answer and asks eight times, without a word. Here a
server that accepts connections and answers nothing is given up after ``ANSWER_S``, and one that
stops answering in the middle of something after twice ``MLFLOW_HTTP_REQUEST_TIMEOUT``.
"""

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from enginegate.candidate import RegistryUri
from enginegate.errors import ModelError, TrackingError
from enginegate.redact import link_base, log_if_slow, masked, masked_error

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

ANSWER_S = 15.0
"""Seconds in which a server must give its first answer."""
_CONNECT_S = 3.0  # a machine of the same network answers in milliseconds
_LOGGED_AFTER_S = 3.0  # before that nobody wonders what the program is doing
# Requests that follow an answer within this time go by MLflow's own limits.
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
_ABSENT = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND"}
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
    fresh = time.monotonic() - _answered.get(tracking_uri, float("-inf")) < _FRESH_S
    if urlsplit(tracking_uri).scheme not in {"http", "https"} or fresh:
        return
    set_mlflow_up()
    shown = masked(tracking_uri)
    waiting = f"waiting for MLflow at {shown}; given up after {ANSWER_S:g} s"
    with log_if_slow(waiting, after_s=_LOGGED_AFTER_S):
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
            fault = f"accepts connections and gave no answer in {ANSWER_S:g} s"
            if "Read timed out" not in str(error):
                # Of a chain of libraries' sentences the system's own is the plainest.
                system = _SYSTEM.search(str(error))
                fault = f"could not be reached: {masked(system[0] if system else str(error))}"
            raise TrackingError(
                f"MLflow at {shown} {fault}. See whether its server runs (curl "
                f"{link_base(tracking_uri)}/health), or name another with MLFLOW_TRACKING_URI."
            ) from masked_error(error)
    _answered[tracking_uri] = time.monotonic()


def resolve(uri: str, *, tracking_uri: str) -> str:
    """The concrete version that ``models:/NAME/VERSION`` or ``models:/NAME@ALIAS`` means now.

    ``runs:/RUN/PATH`` is concrete already.

    Raises:
        ModelError: the registry has no such model, version or alias.
        TrackingError: MLflow cannot be reached.
    """
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    if uri.startswith("runs:/"):
        return uri
    named = RegistryUri.parse(uri)
    if named is None:
        raise ModelError(
            f"{uri!r} is not a registry version. Write models:/NAME/VERSION or models:/NAME@ALIAS."
        )
    client = _client(tracking_uri)
    try:
        if named.version is None:
            found = client.get_model_version_by_alias(named.name, named.alias)
        else:
            found = client.get_model_version(named.name, str(named.version))
    except MlflowException as error:
        raise _registry_error(error, uri, tracking_uri) from masked_error(error)
    return str(RegistryUri(named.name, int(found.version)))


@contextmanager
def download(uri: str, *, tracking_uri: str) -> Iterator[tuple[str, Path]]:
    """The concrete URI and a copy of its files, removed again when the block ends."""
    import mlflow.artifacts  # noqa: PLC0415
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    concrete = resolve(uri, tracking_uri=tracking_uri)
    with tempfile.TemporaryDirectory(prefix="enginegate-model-") as scratch:
        try:
            path = mlflow.artifacts.download_artifacts(
                _location(concrete, _client(tracking_uri)),
                dst_path=scratch,
                tracking_uri=tracking_uri,
            )
        except MlflowException as error:
            raise _registry_error(error, concrete, tracking_uri) from masked_error(error)
        except OSError as error:
            raise ModelError(
                f"MLflow knows {concrete}, but its files cannot be read: {masked(str(error))}. "
                "They were deleted or moved; log the model again."
            ) from masked_error(error)
        yield concrete, Path(path)


def _client(tracking_uri: str) -> "MlflowClient":
    set_mlflow_up()
    check_answers(tracking_uri)
    from mlflow import MlflowClient  # noqa: PLC0415

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def _location(uri: str, client: "MlflowClient") -> str:
    """Where the files are; MLflow itself looks only in the process's own tracking URI.

    ``runs:/RUN/PATH`` is a model that the run logged under that name, else a folder of the run's
    artifacts.
    """
    kind, _, rest = uri.partition(":/")
    name, _, path = rest.partition("/")
    if kind == "runs":
        run = client.get_run(name)
        for output in run.outputs.model_outputs if run.outputs else []:
            logged = client.get_logged_model(output.model_id)
            if logged.name == path:
                return str(logged.artifact_location)
        return f"{run.info.artifact_uri}/{path}"
    location = str(client.get_model_version_download_uri(name, path))
    if location.startswith("models:/m-"):
        logged = client.get_logged_model(location.removeprefix("models:/"))
        return str(logged.artifact_location)
    return location


def _registry_error(
    error: "MlflowException", uri: str, tracking_uri: str
) -> ModelError | TrackingError:
    server, answer = masked(tracking_uri), masked(str(error.message))
    if error.error_code in _ABSENT:
        return ModelError(
            f"{server} has no {uri}: {answer}\n"
            "Check [model] uri in the policy, and that MLFLOW_TRACKING_URI is the registry meant."
        )
    return TrackingError(f"MLflow at {server} did not answer about {uri}: {answer}")
