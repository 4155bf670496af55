"""Which form a source has, and how a source of each form is opened."""

import functools
import importlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from enginegate.candidate import ONNX_FILE
from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.records import sha256_file
from enginegate.sources import pytorch, scikit
from enginegate.sources.fixed_batch import for_any_batch, takes_one_sample
from enginegate.sources.huggingface import open_folder
from enginegate.sources.mlflow_flavors import (
    Flavour,
    LoggedModel,
    read_logged,
    sklearn_estimator,
    torch_module,
)
from enginegate.sources.mlflow_server import download
from enginegate.sources.onnx_form import files_of
from enginegate.sources.pytorch import Axis, Program, traced_axes
from enginegate.sources.types import ExportedModel, OpenedSource, digest_of

_MOST_PARTS = 3  # of what a function returns: module, examples, axes


@contextmanager
def open_source(source: ModelSource, data: DataSet, *, tracking_uri: str) -> Iterator[OpenedSource]:
    """A source, ready to be converted while the block lasts."""
    if source.scheme == "file":
        yield _open_file(source)
    elif source.scheme == "hf":
        yield open_folder(source)
    elif source.scheme == "python":
        yield _open_callable(source, data)
    else:
        with download(source.uri, tracking_uri=tracking_uri) as (uri, folder):
            yield _open_logged(source, read_logged(uri, folder))


def _open_logged(source: ModelSource, model: LoggedModel) -> OpenedSource:
    if model.flavour is Flavour.ONNX:
        return _open_onnx(model.uri, model.data)
    if model.flavour is Flavour.SKLEARN:

        def convert(data: DataSet, scratch: Path) -> ExportedModel:
            estimator = sklearn_estimator(model, allow_pickle=source.allow_pickle)
            return scikit.onnx_from_estimator(estimator, data, scratch, origin=model.uri)

        return OpenedSource(model.uri, model.sha256, scikit.sklearn_exporter(), convert)
    options = {  # what the signature adds to the files
        "outputs": list(model.outputs),
        "axes": {name: sorted(axes) for name, axes in model.axes.items() if axes},
    }
    export = functools.partial(_onnx_from_logged, model, allow_pickle=source.allow_pickle)
    return OpenedSource(model.uri, model.sha256, pytorch.torch_exporter(), export, options)


def _onnx_from_logged(
    model: LoggedModel, data: DataSet, scratch: Path, *, allow_pickle: bool
) -> ExportedModel:
    module = torch_module(model, allow_pickle=allow_pickle)
    program = Program(module, model.uri, model.outputs, traced_axes(module) or model.axes)
    return pytorch.onnx_from_program(program, data, scratch)


def _open_onnx(uri: str, path: Path) -> OpenedSource:
    files = files_of(path, origin=uri)
    model = onnx.load_model(files[0], load_external_data=False)
    digest, exporter = digest_of(files, files[0].parent), "none: the source is ONNX"
    if not takes_one_sample(model):
        return OpenedSource(uri, digest, exporter, lambda _data, _scratch: ExportedModel(files[0]))
    for_any, exporter = for_any_batch(model)

    def convert(_data: DataSet, scratch: Path) -> ExportedModel:
        for weights in files[1:]:
            beside = scratch / weights.relative_to(files[0].parent)
            beside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(weights, beside)
        onnx.save_model(for_any, scratch / ONNX_FILE)
        return ExportedModel(scratch / ONNX_FILE, one_sample=files[0])

    return OpenedSource(uri, digest, exporter, convert)


def _open_file(source: ModelSource) -> OpenedSource:
    """``file:PATH``: an ONNX file with its weights, or a torch.export program."""
    path = source.path
    if not path.is_file():
        raise ModelError(f"{source.uri}: there is no file {path.absolute()}. Check [model] uri.")
    if path.suffix != ".pt2":
        return _open_onnx(source.uri, path)
    convert = functools.partial(_onnx_from_file, source)
    return OpenedSource(source.uri, sha256_file(path), pytorch.torch_exporter(), convert)


def _onnx_from_file(source: ModelSource, data: DataSet, scratch: Path) -> ExportedModel:
    """Open a program through the folder that MLflow would have logged it into.

    ``torch.export.load`` unpickles what an archive holds; MLflow looks for that first.
    """
    import mlflow  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from mlflow.models import Model  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="enginegate-program-") as logged:
        folder = Path(logged)
        (folder / "data").mkdir()
        (folder / "data" / "model.pt2").symlink_to(source.path.absolute())
        described = Model(mlflow_version=mlflow.__version__)
        described.add_flavor("pytorch", model_data="data", pytorch_version=str(torch.__version__))
        described.save(str(folder / "MLmodel"))
        model = LoggedModel(source.uri, Flavour.PYTORCH, folder, folder / "data")
        return _onnx_from_logged(model, data, scratch, allow_pickle=source.allow_pickle)


def _open_callable(source: ModelSource, data: DataSet) -> OpenedSource:
    """``python:MODULE:CALLABLE``: a module made by a function of yours.

    The function takes nothing and returns an ``nn.Module``, or ``(module, examples)``, or
    ``(module, examples, axes)``. Examples are tensors by argument name, with two or more rows.
    Axes name the dynamic ones besides the batch, such as ``{"input_ids": {1: "sequence"}}``; a
    ``torch.export.Dim`` instead of a name has bounds. What it returns is traced to know it again.
    """
    if not source.allow_code:
        raise ModelError(
            f"{source.uri} was not opened: it imports and runs Python code of yours, with all "
            "that this program may do.\n"
            "If you trust that code, set allow_code = true under [model] in the policy."
        )
    exporter = pytorch.torch_exporter()
    module_name, _, name = source.location.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(
            f"{source.uri} cannot be imported: {error}. Run from the folder that the module "
            f"{module_name!r} is in, or install it."
        ) from error
    try:
        returned = function()
    except Exception as error:
        raise ModelError(
            f"{source.uri} failed: {type(error).__name__}: {error}\n"
            "It is called without arguments and must return a module."
        ) from error
    program = _returned_program(source.uri, returned)
    convert = functools.partial(pytorch.onnx_from_program, program)
    return OpenedSource(source.uri, pytorch.traced_digest(program, data), exporter, convert)


def _returned_program(uri: str, returned: Any) -> Program:
    import torch  # noqa: PLC0415

    def is_table(value: Any, kind: type) -> bool:
        return isinstance(value, Mapping) and all(isinstance(v, kind) for v in value.values())

    def axis(given: Any) -> Axis:
        if isinstance(given, str):
            return Axis(given)
        return Axis(given.__name__, *pytorch.bounds(given.min, given.max))

    parts = returned if isinstance(returned, tuple) else (returned,)
    module, examples, axes = (*parts, {}, {})[:_MOST_PARTS]
    if not (
        len(parts) <= _MOST_PARTS
        and isinstance(module, torch.nn.Module)
        and is_table(examples, torch.Tensor)
        and is_table(axes, Mapping)
    ):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ModelError(
            f"{uri} returned ({kinds}); return an nn.Module, or (module, examples), or (module, "
            "examples, axes) with examples = {ARGUMENT: tensor} and axes = "
            '{ARGUMENT: {1: "sequence"}}.'
        )
    named = {name: {at: axis(given) for at, given in of.items()} for name, of in axes.items()}
    detached = {name: tensor.detach() for name, tensor in examples.items()}
    return Program(module.eval(), uri, axes=named, examples=detached)
