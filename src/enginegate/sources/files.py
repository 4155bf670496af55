"""``file:PATH``: an ONNX file with its weights, or a torch.export program."""

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.records import sha256_file
from enginegate.sources import pytorch
from enginegate.sources.external_data import files_of
from enginegate.sources.mlflow_flavors import Flavour, LoggedModel, torch_module
from enginegate.sources.pytorch import Program, traced_axes
from enginegate.sources.types import AS_IT_IS, ExportedModel, OpenedSource, digest_of


def open_file(source: ModelSource) -> OpenedSource:
    """A file by its ending.

    Raises:
        ModelError: it is missing, damaged, or keeps weights outside its folder.
    """
    path = source.path
    if not path.is_file():
        raise ModelError(f"{source.uri}: there is no file {path.absolute()}. Check [model] uri.")
    if path.suffix == ".pt2":
        convert = functools.partial(_onnx_from_program, source, path)
        return OpenedSource(source.uri, sha256_file(path), pytorch.exporter(), convert)
    files = files_of(path, origin=source.uri)
    return OpenedSource(
        source.uri,
        digest_of(files, files[0].parent),
        AS_IT_IS,
        lambda _data, _scratch: ExportedModel(files[0]),
    )


def _onnx_from_program(
    source: ModelSource, path: Path, data: DataSet, scratch: Path
) -> ExportedModel:
    with _as_logged(source, path) as model:
        module = torch_module(model, allow_pickle=source.allow_pickle)
    program = Program(module, source.uri, axes=traced_axes(module))
    return pytorch.onnx_from_program(program, data, scratch)


@contextmanager
def _as_logged(source: ModelSource, path: Path) -> Iterator[LoggedModel]:
    """The folder that MLflow would have logged the program into.

    ``torch.export.load`` unpickles what an archive holds; MLflow looks for that first.
    """
    import mlflow  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from mlflow.models import Model  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="enginegate-program-") as scratch:
        folder = Path(scratch)
        (folder / "data").mkdir()
        (folder / "data" / "model.pt2").symlink_to(path.absolute())
        described = Model(mlflow_version=mlflow.__version__)
        described.add_flavor("pytorch", model_data="data", pytorch_version=str(torch.__version__))
        described.save(str(folder / "MLmodel"))
        yield LoggedModel(source.uri, Flavour.PYTORCH, folder, folder / "data")
