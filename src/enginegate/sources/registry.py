"""MLflow's registry and runs: which logged model a URI means, and its files.

Does not know what is in them, or what happens to them afterwards.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from enginegate.errors import ModelError, TrackingError
from enginegate.redact import masked, masked_error
from enginegate.sources.mlflow_server import check_answers, set_mlflow_up

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

_ABSENT = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND"}


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
    match = re.fullmatch(r"models:/([^/@]+)(?:/([0-9]+)|@([A-Za-z0-9_-]+))", uri)
    if match is None:
        raise ModelError(
            f"{uri!r} is not a registry version. Write models:/NAME/VERSION or models:/NAME@ALIAS."
        )
    name, number, alias = match.groups()
    client = _client(tracking_uri)
    try:
        if alias:
            found = client.get_model_version_by_alias(name, alias)
        else:
            found = client.get_model_version(name, number)
    except MlflowException as error:
        raise _refused(error, uri, tracking_uri) from masked_error(error)
    return f"models:/{name}/{found.version}"


@contextmanager
def fetch_logged_model(uri: str, *, tracking_uri: str) -> Iterator[tuple[str, Path]]:
    """The concrete URI and a copy of its files, removed again when the block ends.

    Raises:
        ModelError: there is no such version or run, or its files are gone.
        TrackingError: MLflow cannot be reached.
    """
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
            raise _refused(error, concrete, tracking_uri) from masked_error(error)
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
    """Where the files are; MLflow itself looks only in the process's own tracking URI."""
    kind, _, rest = uri.partition(":/")
    name, _, path = rest.partition("/")
    if kind == "runs":
        return _location_in_run(name, path, client)
    location = str(client.get_model_version_download_uri(name, path))
    if location.startswith("models:/m-"):
        logged = client.get_logged_model(location.removeprefix("models:/"))
        return str(logged.artifact_location)
    return location


def _location_in_run(run_id: str, path: str, client: "MlflowClient") -> str:
    """A model that the run logged under that name, else a folder of the run's artifacts."""
    run = client.get_run(run_id)
    outputs = run.outputs.model_outputs if run.outputs else []
    for output in outputs:
        logged = client.get_logged_model(output.model_id)
        if logged.name == path:
            return str(logged.artifact_location)
    return f"{run.info.artifact_uri}/{path}"


def _refused(error: "MlflowException", uri: str, tracking_uri: str) -> ModelError | TrackingError:
    server, said = masked(tracking_uri), masked(str(error.message))
    if error.error_code in _ABSENT:
        return ModelError(
            f"{server} has no {uri}: {said}\n"
            "Check [model] uri in the policy, and that MLFLOW_TRACKING_URI is the registry meant."
        )
    return TrackingError(f"MLflow at {server} did not answer about {uri}: {said}")
