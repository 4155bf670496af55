"""Which door a source goes through."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginegate.data import DataSet
from enginegate.policy.model_source import ModelSource
from enginegate.sources import pytorch, scikit
from enginegate.sources.callables import open_callable
from enginegate.sources.files import open_file
from enginegate.sources.huggingface import open_folder
from enginegate.sources.mlflow_flavors import (
    Flavour,
    LoggedModel,
    read_logged,
    sklearn_estimator,
    torch_module,
)
from enginegate.sources.pytorch import Program, traced_axes
from enginegate.sources.registry import fetched
from enginegate.sources.types import AS_IT_IS, ExportedModel, OpenedSource


@contextmanager
def open_source(source: ModelSource, data: DataSet, *, tracking_uri: str) -> Iterator[OpenedSource]:
    """A source, ready to be converted while the block lasts.

    Raises:
        ModelError: it is missing, corrupt, refused, or of a form that cannot become ONNX.
        TrackingError: MLflow cannot be reached.
    """
    if source.scheme == "file":
        yield open_file(source)
    elif source.scheme == "hf":
        yield open_folder(source)
    elif source.scheme == "python":
        yield open_callable(source, data)
    else:
        with fetched(source.uri, tracking_uri=tracking_uri) as (uri, folder):
            yield _open_logged(source, read_logged(uri, folder))


def _open_logged(source: ModelSource, model: LoggedModel) -> OpenedSource:
    def convert(data: DataSet, scratch: Path) -> ExportedModel:
        if model.flavour is Flavour.ONNX:
            return ExportedModel(model.data)
        if model.flavour is Flavour.SKLEARN:
            estimator = sklearn_estimator(model, allow_pickle=source.allow_pickle)
            return scikit.onnx_from_estimator(estimator, data, scratch, origin=model.uri)
        module = torch_module(model, allow_pickle=source.allow_pickle)
        axes = traced_axes(module) or model.axes or {}
        return pytorch.onnx_from_program(
            Program(module, model.uri, model.outputs, axes), data, scratch
        )

    return OpenedSource(model.uri, model.sha256, _exporter(model), convert, _options(model))


def _exporter(model: LoggedModel) -> str:
    if model.flavour is Flavour.PYTORCH:
        return pytorch.exporter()
    return scikit.exporter() if model.flavour is Flavour.SKLEARN else AS_IT_IS


def _options(model: LoggedModel) -> dict[str, object]:
    """What the signature adds to the files."""
    if model.flavour is not Flavour.PYTORCH:
        return {}
    axes = {name: sorted(found) for name, found in (model.axes or {}).items() if found}
    return {"outputs": list(model.outputs), "axes": axes}
