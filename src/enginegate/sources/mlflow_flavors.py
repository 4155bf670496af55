"""A model in the folder that MLflow logged it into: which flavour it is, and how it is opened.

Nothing is opened here that could run code, unless the caller allows it.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginegate.candidate import Sha256
from enginegate.errors import ModelError
from enginegate.messages import first_line
from enginegate.sources.pytorch import Axes, Axis
from enginegate.sources.types import digest_of
from enginegate.sources.untrusted import check_archives, check_inside, check_size

if TYPE_CHECKING:
    import torch
    from mlflow.models import Model

_PICKLE_SWITCH = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"
_SWITCH_LOCK = threading.Lock()


class Flavour(StrEnum):
    """The forms of a logged model that can become ONNX."""

    ONNX = "onnx"
    PYTORCH = "pytorch"
    SKLEARN = "sklearn"


_ENTRIES = {Flavour.ONNX: "data", Flavour.PYTORCH: "model_data", Flavour.SKLEARN: "pickled_model"}


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """A logged model's files on this machine.

    Attributes:
        uri: what it is called, e.g. ``models:/NAME/VERSION``.
        flavour: the form that will be read.
        folder: everything that was logged.
        data: the file or folder inside ``folder`` that holds the model itself.
        code: relative paths of Python code that was logged with it; empty for most.
        outputs: names that its signature gives the outputs; empty if it names none.
        axes: axes besides the batch that its signature leaves open, by input.
    """

    uri: str
    flavour: Flavour
    folder: Path
    data: Path
    code: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    axes: Axes = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The model's own files; what MLflow notes beside them is not among them."""
        files = sorted(self.data.rglob("*")) if self.data.is_dir() else [self.data]
        return [file for file in files if file.is_file()]

    @property
    def sha256(self) -> Sha256:
        """Digest of names and content of the model's own files."""
        return digest_of(self.files, self.folder)


def read_logged(uri: str, folder: Path) -> LoggedModel:
    """Find out what was logged."""
    described = _read_mlmodel(uri, folder)
    for flavour, entry in _ENTRIES.items():
        if flavour not in described.flavors:
            continue
        check_inside(described.flavors, folder, uri=uri, file="MLmodel")
        settings = described.flavors[flavour]
        path = settings.get(entry) if isinstance(settings, dict) else None
        if not isinstance(path, str):
            raise ModelError(
                f"{uri}: its MLmodel file does not say where its {flavour} files are (flavors."
                f"{flavour}.{entry}: {path!r:.80}). Log the model again."
            )
        data = folder / path
        if not data.exists():
            raise ModelError(f"{uri} lacks {path}, which its MLmodel file names.")
        code = (str(settings["code"]),) if settings.get("code") else ()
        outputs, axes = _signature(described)
        return LoggedModel(uri, flavour, folder, data, code, outputs, axes)
    flavours = sorted(set(described.flavors) - {"python_function"})
    raise ModelError(
        f"{uri} has the flavour {', '.join(flavours) or 'python_function'}; this program reads "
        f"{', '.join(Flavour)}. Log the model with mlflow.onnx, mlflow.pytorch or mlflow.sklearn."
    )


def _read_mlmodel(uri: str, folder: Path) -> "Model":
    """The MLmodel file, or the message about its fault."""
    from mlflow.models import Model  # noqa: PLC0415

    file = folder / "MLmodel"
    if not file.is_file():
        raise ModelError(f"MLflow knows {uri}, but its files are gone. Log the model again.")
    check_size(file, uri=uri, file="its MLmodel file", advice="Log the model again.")
    try:
        described = Model.load(str(folder))
        flavors_are_a_table = isinstance(described.flavors, dict)
    except Exception as error:  # MLflow lets through what YAML and its own parts raise
        raise ModelError(
            f"{uri}: its MLmodel file is damaged: {type(error).__name__}: "
            f"{first_line(error):.200}\nLog the model again."
        ) from error
    if not flavors_are_a_table:
        raise ModelError(
            f"{uri}: its MLmodel file is damaged: flavors is {described.flavors!r:.80}, which is "
            "no table. Log the model again."
        )
    return described


def torch_module(model: LoggedModel, *, allow_pickle: bool) -> "torch.nn.Module":
    """Open a PyTorch model; without ``allow_pickle`` nothing it carries can run code."""
    import mlflow.pytorch  # noqa: PLC0415

    check_archives(model.files, uri=model.uri)
    if not allow_pickle:
        _refuse_code(
            model,
            "mlflow.pytorch.log_model(..., serialization_format='pt2', "
            "input_example=BATCH) with two or more samples in BATCH",
        )
    try:
        with _pickle_switch(allowed=allow_pickle):
            module: torch.nn.Module = mlflow.pytorch.load_model(str(model.folder))
    except Exception as error:
        raise _opening_error(
            error,
            model,
            "mlflow.pytorch.log_model(..., serialization_format='pt2', input_example=BATCH)",
        ) from error
    if (model.data / "model.pth").is_file():
        module.eval()
    return module


def sklearn_estimator(model: LoggedModel, *, allow_pickle: bool) -> Any:
    """Open a scikit-learn model; without ``allow_pickle`` only types that skops itself trusts.

    MLflow would trust the types that the model's own files ask to be trusted.
    """
    check_archives(model.files, uri=model.uri)
    if not allow_pickle:
        _refuse_code(model, "mlflow.sklearn.log_model(..., serialization_format='skops')")
    try:
        if allow_pickle:
            import mlflow.sklearn  # noqa: PLC0415

            with _pickle_switch(allowed=True):
                return mlflow.sklearn.load_model(str(model.folder))
        import skops.io  # type: ignore[import-untyped]  # noqa: PLC0415

        return skops.io.load(model.data, trusted=[])
    except Exception as error:
        raise _opening_error(
            error,
            model,
            "mlflow.sklearn.log_model(..., serialization_format='skops') with types "
            "of scikit-learn and NumPy only, or set allow_pickle = true under [model] if you "
            "trust whoever logged it",
        ) from error


def _signature(described: "Model") -> tuple[tuple[str, ...], Axes]:
    """Names of the outputs if all have one, and the axes of the inputs besides the batch."""
    signature = described.signature
    if signature is None:
        return (), {}
    names = [spec.name for spec in signature.outputs.inputs] if signature.outputs else []
    axes = {
        str(spec.name): {
            at: Axis(f"dim{at}")
            for at, size in enumerate(getattr(spec, "shape", ()))
            if at and size == -1
        }
        for spec in (signature.inputs.inputs if signature.inputs else [])
    }
    return (tuple(names) if all(names) else ()), axes


def _refuse_code(model: LoggedModel, instead: str) -> None:
    """Refuse a model that runs code when it is opened: a pickle, or Python logged with it."""
    pickles = [model.data / "model.pth"] if model.flavour is Flavour.PYTORCH else []
    if model.flavour is Flavour.SKLEARN and model.data.suffix != ".skops":
        pickles = [model.data]
    running = [f"{path.name} is a pickle" for path in pickles if path.is_file()]
    running += [f"{path} is Python code" for path in model.code]
    if running:
        raise ModelError(
            f"{model.uri} was not opened: {'; '.join(running)}, which runs whatever it holds.\n"
            f"Log it without: {instead}.\n"
            "Or, if you trust whoever logged it, set allow_pickle = true under [model] in the "
            "policy."
        )


def _opening_error(error: Exception, model: LoggedModel, instead: str) -> ModelError:
    return ModelError(
        f"{model.uri} cannot be opened: {type(error).__name__}: {first_line(error)}\n"
        f"Log it again with {instead}."
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
