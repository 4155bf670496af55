"""A dataset that an MLflow run logged: MLflow says where its data is, and this brings it here.

MLflow keeps a description of a dataset, not its data. Sources on this machine are read in place;
those in a store of artifacts are copied into the workspace once. Nothing is fetched from the web
or from a hub, and no code that a source may hold is run.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from enginegate.content_store import make_once
from enginegate.errors import DataError, InputError, TrackingError
from enginegate.messages import first_line
from enginegate.policy.data import DataSource
from enginegate.records import canonical_json, sha256_bytes
from enginegate.redact import masked, masked_error
from enginegate.sources.mlflow_server import check_answers, set_mlflow_up

if TYPE_CHECKING:
    from mlflow.entities import Dataset

_WAIT_S = 6 * 3600.0
_STORES = frozenset({"mlflow-artifacts", "runs", "models", "s3", "gs", "abfss", "wasbs", "dbfs"})
_LONGEST = 200


def fetched_dataset(source: DataSource, store: Path, *, tracking_uri: str) -> Path:
    """The file or folder of the dataset that ``mlflow:RUN/NAME`` means.

    Args:
        store: where copies are kept.

    Raises:
        DataError: the run has no such dataset, or its source cannot be read here.
        TrackingError: MLflow cannot be reached.
    """
    run, _, name = source.location.partition("/")
    dataset = _logged(run, name, tracking_uri)
    uri = _uri_of(dataset, source)
    parts = urlsplit(uri)
    if parts.scheme in {"", "file"}:
        return _here(uri, source)
    if parts.scheme not in _STORES:
        raise DataError(
            f"{source}: its data is at {masked(uri)[:_LONGEST]}, which is not fetched. Log it as "
            "an artifact of the run, or name a copy of it on this machine in the policy."
        )
    key = {"tracking": tracking_uri, "run": run, "name": name, "digest": dataset.digest, "uri": uri}
    folder = make_once(
        store / sha256_bytes(canonical_json(key)),
        read=_complete,
        make=lambda staging: _download(uri, staging, source, tracking_uri),
        wait_s=_WAIT_S,
    ).folder
    return next(path for path in folder.iterdir())


def _logged(run: str, name: str, tracking_uri: str) -> "Dataset":
    set_mlflow_up()
    check_answers(tracking_uri)
    from mlflow import MlflowClient  # noqa: PLC0415
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    try:
        inputs = MlflowClient(tracking_uri=tracking_uri).get_run(run).inputs
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            raise DataError(
                f"MLflow at {masked(tracking_uri)} has no run {run}. Check the address in [data], "
                "and that MLFLOW_TRACKING_URI is the server meant."
            ) from masked_error(error)
        raise TrackingError(
            f"MLflow at {masked(tracking_uri)} did not answer about run {run}: "
            f"{masked(first_line(error))}"
        ) from masked_error(error)
    found = [each.dataset for each in (inputs.dataset_inputs if inputs else [])]
    matching = {each.digest: each for each in found if each.name == name}
    if not matching:
        listed = ", ".join(sorted({each.name for each in found})) or "none"
        raise DataError(
            f"Run {run} logged no dataset {name!r}; it logged: {listed}. Log one with "
            "mlflow.log_input."
        )
    if len(matching) > 1:
        raise DataError(
            f"Run {run} logged {len(matching)} datasets of the name {name!r}. Give each its own "
            "name where it is made, e.g. mlflow.data.from_pandas(..., name=...)."
        )
    return next(iter(matching.values()))


def _uri_of(dataset: "Dataset", source: DataSource) -> str:
    """Where the data is, by the description of its source."""
    try:
        described: Any = json.loads(dataset.source)
    except (ValueError, RecursionError):
        described = None
    uri = described.get("uri") if isinstance(described, dict) else None
    if not isinstance(uri, str) or not uri:
        raise DataError(
            f"{source}: MLflow does not say where its data is (the source's type is "
            f"{str(dataset.source_type)[:_LONGEST]!r}). Name a file when it is logged: "
            'mlflow.data.from_pandas(frame, source="data/evaluation.parquet").'
        )
    return uri


def _here(uri: str, source: DataSource) -> Path:
    """A source on this machine; a relative one belongs to the policy's project."""
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc not in {"", "localhost"}:
        raise DataError(f"{source}: its data is on another machine, {masked(uri)[:_LONGEST]}.")
    path = Path(unquote(parts.path) if parts.scheme == "file" else uri)
    if ".." in path.parts or "\0" in uri:
        raise DataError(
            f"{source}: its data is at {uri!r:.200}, and a path of data may not contain '..'. Log "
            "it by an absolute path."
        )
    placed = (source.root or Path.cwd()) / path
    if not placed.exists():
        raise DataError(
            f"{source}: its data was at {placed}, and is not there on this machine. Copy it there, "
            "or log it as an artifact."
        )
    return placed


def _download(uri: str, staging: Path, source: DataSource, tracking_uri: str) -> Path:
    import mlflow.artifacts  # noqa: PLC0415
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    try:
        found = mlflow.artifacts.download_artifacts(
            artifact_uri=uri, dst_path=str(staging), tracking_uri=tracking_uri
        )
    except (MlflowException, OSError, ValueError) as error:
        raise DataError(
            f"{source}: its data at {masked(uri)[:_LONGEST]} could not be copied: "
            f"{masked(first_line(error))[:_LONGEST]}."
        ) from masked_error(error)
    copied = Path(found).resolve()
    root = staging.resolve()
    if root not in {copied, copied.parent}:
        copied = Path(shutil.move(copied, root / copied.name))
        for other in root.iterdir():
            if other != copied:
                shutil.rmtree(other)
    return staging


def _complete(folder: Path) -> Path:
    if len(list(folder.iterdir())) != 1:
        raise InputError(f"{folder} does not hold one copy.")
    return folder
