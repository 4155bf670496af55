"""MLflow's model registry as a source; the only door to MLflow in this room.

Knows which version a URI means, how to fetch its files, and how to open them without running code
that came with them. Does not know what happens to them afterwards.
"""

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from enginegate.candidate import Sha256
from enginegate.canonical import canonical_json, sha256_bytes, sha256_file
from enginegate.errors import LedgerError, ModelError

if TYPE_CHECKING:
    import torch
    from mlflow.exceptions import MlflowException

_ABSENT = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "NOT_FOUND"}
_PICKLE_SWITCH = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"
_PROGRESS_BAR = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
_SWITCH_LOCK = threading.Lock()


class Flavour(StrEnum):
    """The forms of a registered model that can become ONNX."""

    ONNX = "onnx"
    PYTORCH = "pytorch"


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A registry version's files on this machine, while `fetched` keeps them.

    Attributes:
        uri: the concrete version, ``models:/NAME/VERSION``.
        flavour: the form that will be read.
        folder: everything that was logged.
        data: the file or folder inside ``folder`` that holds the model itself.
        code: relative paths of Python code that was logged with it; empty for most.
    """

    uri: str
    flavour: Flavour
    folder: Path
    data: Path
    code: tuple[str, ...]

    @property
    def sha256(self) -> Sha256:
        """Digest of names and content of the model's own files; MLflow's notes do not count."""
        files = sorted(self.data.rglob("*")) if self.data.is_dir() else self._onnx_files()
        named = {
            file.relative_to(self.folder).as_posix(): sha256_file(file)
            for file in files
            if file.is_file()
        }
        return sha256_bytes(canonical_json(named))

    def _onnx_files(self) -> list[Path]:
        """The ONNX file, and the weights that MLflow may have put into files beside it."""
        notes = {"MLmodel", "registered_model_meta"}
        suffixes = {".yaml", ".txt", ".json"}
        beside = self.data.parent.iterdir()
        return sorted(
            file for file in beside if file.name not in notes and file.suffix not in suffixes
        )

    @property
    def pickled(self) -> Path | None:
        """The pickle file that opening this model would run, if there is one."""
        file = self.data / "model.pth"
        return file if self.flavour is Flavour.PYTORCH and file.is_file() else None


def resolve(uri: str, *, tracking_uri: str) -> str:
    """The concrete version that ``models:/NAME/VERSION`` or ``models:/NAME@ALIAS`` means now.

    Raises:
        ModelError: the registry has no such model, version or alias.
        LedgerError: MLflow cannot be reached.
    """
    from mlflow import MlflowClient  # noqa: PLC0415
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    match = re.fullmatch(r"models:/([^/@]+)(?:/([0-9]+)|@([A-Za-z0-9_-]+))", uri)
    if match is None:
        raise ModelError(
            f"{uri!r} is not a registry version. Write models:/NAME/VERSION or models:/NAME@ALIAS."
        )
    name, number, alias = match.groups()
    client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    try:
        if alias:
            found = client.get_model_version_by_alias(name, alias)
        else:
            found = client.get_model_version(name, number)
    except MlflowException as error:
        raise _refused(error, uri, tracking_uri) from error
    return f"models:/{name}/{found.version}"


@contextmanager
def fetched(uri: str, *, tracking_uri: str) -> Iterator[RegisteredModel]:
    """Copies of a version's files, removed again when the block ends.

    Raises:
        ModelError: there is no such version, its files are gone, or it has no flavour that can
            become ONNX.
        LedgerError: MLflow cannot be reached.
    """
    import mlflow.artifacts  # noqa: PLC0415
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    os.environ.setdefault(_PROGRESS_BAR, "false")
    version = resolve(uri, tracking_uri=tracking_uri)
    with tempfile.TemporaryDirectory(prefix="enginegate-model-") as scratch:
        try:
            path = mlflow.artifacts.download_artifacts(
                _location(version, tracking_uri), dst_path=scratch, tracking_uri=tracking_uri
            )
        except MlflowException as error:
            raise _refused(error, version, tracking_uri) from error
        except OSError as error:
            raise ModelError(
                f"{version} is registered, but its files cannot be read: {error}. "
                "They were deleted or moved; log the model again."
            ) from error
        yield _registered(version, Path(path))


def _location(version: str, tracking_uri: str) -> str:
    """Where a version's files are; MLflow resolves ``models:/NAME`` by its global registry only."""
    from mlflow import MlflowClient  # noqa: PLC0415

    client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
    name, number = version.removeprefix("models:/").split("/")
    location = str(client.get_model_version_download_uri(name, number))
    if location.startswith("models:/m-"):
        logged = client.get_logged_model(location.removeprefix("models:/"))
        return str(logged.artifact_location)
    return location


def torch_module(model: RegisteredModel, *, allow_pickle: bool) -> "torch.nn.Module":
    """Open a PyTorch model; without ``allow_pickle`` nothing it carries can run code.

    Raises:
        ModelError: it is pickled or carries code and that is not allowed, or it cannot be opened.
    """
    import mlflow.pytorch  # noqa: PLC0415

    if not allow_pickle:
        _refuse_code(model)
    try:
        with _pickle_switch(allowed=allow_pickle):
            module: torch.nn.Module = mlflow.pytorch.load_model(str(model.folder))
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{model.uri} cannot be opened: {type(error).__name__}: {first_line}\n"
            "Log it again with mlflow.pytorch.log_model(..., serialization_format='pt2', "
            "input_example=BATCH)."
        ) from error
    if model.pickled:
        module.eval()
    return module


def _refuse_code(model: RegisteredModel) -> None:
    found = [f"{model.pickled.name} is a pickle"] if model.pickled else []
    found += [f"{path} is Python code" for path in model.code]
    if found:
        raise ModelError(
            f"{model.uri} was not opened: {'; '.join(found)}, which runs whatever it holds.\n"
            "Log it without: mlflow.pytorch.log_model(..., serialization_format='pt2', "
            "input_example=BATCH) with two or more samples in BATCH.\n"
            "Or, if you trust whoever logged it, set allow_pickle = true under [model] in the "
            "policy."
        )


@contextmanager
def _pickle_switch(*, allowed: bool) -> Iterator[None]:
    """MLflow checks a .pt2 program for hidden pickles only while this variable is false."""
    with _SWITCH_LOCK:
        before = os.environ.get(_PICKLE_SWITCH)
        os.environ[_PICKLE_SWITCH] = "true" if allowed else "false"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_PICKLE_SWITCH]
            else:
                os.environ[_PICKLE_SWITCH] = before


def _registered(uri: str, folder: Path) -> RegisteredModel:
    from mlflow.models import Model  # noqa: PLC0415

    if not (folder / "MLmodel").is_file():
        raise ModelError(f"{uri} is registered, but its files are gone. Log the model again.")
    flavours = Model.load(str(folder)).flavors
    for flavour, entry in ((Flavour.ONNX, "data"), (Flavour.PYTORCH, "model_data")):
        if flavour not in flavours:
            continue
        settings = flavours[flavour]
        data = folder / settings[entry]
        if not data.exists():
            raise ModelError(f"{uri} lacks {settings[entry]}, which its MLmodel file names.")
        code = settings.get("code")
        return RegisteredModel(uri, flavour, folder, data, (code,) if code else ())
    named = sorted(set(flavours) - {"python_function"})
    raise ModelError(
        f"{uri} has the flavour {', '.join(named) or 'python_function'}; this program reads "
        f"{' and '.join(Flavour)}. Log the model with mlflow.onnx or mlflow.pytorch."
    )


def _refused(error: "MlflowException", uri: str, tracking_uri: str) -> ModelError | LedgerError:
    if error.error_code in _ABSENT:
        return ModelError(
            f"{tracking_uri} has no {uri}: {error.message}\n"
            "Check [model] uri in the policy, and that MLFLOW_TRACKING_URI is the registry meant."
        )
    return LedgerError(f"MLflow at {tracking_uri} did not answer about {uri}: {error.message}")
