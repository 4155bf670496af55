"""A source of any form -> an `OnnxModel` in the store, or the one that is there already.

`open_source` is the dispatch: one line for each scheme of a URI.
"""

import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from enginegate.atomic_io import write_file
from enginegate.candidate import ONNX_FILE, FileDigest, OnnxModel
from enginegate.content_store import ContentFolder, make_once
from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.records import canonical_json, sha256_bytes, sha256_file
from enginegate.sources import onnx_form, pytorch, scikit
from enginegate.sources.callables import open_callable
from enginegate.sources.external_data import ONE_FILE_BYTES, files_of, write_model
from enginegate.sources.huggingface import open_folder
from enginegate.sources.mlflow_flavors import (
    Flavour,
    LoggedModel,
    read_logged,
    sklearn_estimator,
    torch_module,
)
from enginegate.sources.parity import PARITY_SAMPLES, BatchTrial, Evidence, OpenOnnx, examine
from enginegate.sources.pytorch import Program, traced_axes
from enginegate.sources.registry import fetch_logged_model
from enginegate.sources.types import AS_IT_IS, ExportedModel, OpenedSource, digest_of

MANIFEST = "manifest.json"
_FORM = 2  # raise when the canonical form of the same export changes
_SCRATCH = "exporting"
_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class _Job:
    """One export: what is read, and what it is checked with."""

    source: ModelSource
    opened: OpenedSource
    data: DataSet
    open_onnx: OpenOnnx
    one_file_bytes: int

    @property
    def key(self) -> str:
        """Digest of everything that decides the bytes and the evidence beside them."""
        deciding = {
            "source": self.opened.sha256,
            "exporter": self.opened.exporter,
            "options": self.opened.options,
            "form": _FORM,
            "one_file_bytes": self.one_file_bytes,
            "samples": self.data.head(PARITY_SAMPLES).sha256,
            "parity_max_abs_error": self.source.parity_max_abs_error,
        }
        return sha256_bytes(canonical_json(deciding))


def onnx_from_source(
    source: ModelSource,
    data: DataSet,
    *,
    onnx_root: Path,
    tracking_uri: str,
    open_onnx: OpenOnnx,
    one_file_bytes: int = ONE_FILE_BYTES,
) -> ContentFolder[OnnxModel]:
    """Fetch, export, check and keep a model; an earlier export is reused.

    Args:
        source: which model, what of it may run code, and the parity limit.
        data: real samples, for parity, batch sizes and lengths.
        onnx_root: the store's folder for ONNX models.
        tracking_uri: MLflow's address.
        open_onnx: opens an FP32 ONNX file to run it, as ``enginegate.engines.open_onnx`` does.
        one_file_bytes: weights beyond this go into a file of their own.

    Raises:
        ModelError: the model is missing, refused, corrupt, or does not answer like its framework.
        DataError: the samples do not fit the model.
        TrackingError: MLflow cannot be reached.
    """
    with open_source(source, data, tracking_uri=tracking_uri) as found:
        job = _Job(source, found, data, open_onnx, one_file_bytes)
        return make_once(
            onnx_root / job.key,
            read=read_onnx_model,
            make=lambda folder: _export(job, folder),
            wait_s=_WAIT_S,
        )


def read_onnx_model(folder: Path) -> OnnxModel:
    """The record of an ONNX model in the store; its files' digests are checked.

    Raises:
        InputError: the manifest is missing or damaged.
        TamperedError: a file is not the one that was recorded.
    """
    onnx = OnnxModel.read(folder / MANIFEST)
    onnx.check(folder)
    return onnx


def _export(job: _Job, folder: Path) -> OnnxModel:
    scratch, origin, path = folder / _SCRATCH, job.opened.uri, folder / ONNX_FILE
    scratch.mkdir()
    converted = job.opened.convert(job.data, scratch)
    model = onnx_form.canonical(
        onnx_form.read_onnx(converted.path, origin=origin, limit=job.one_file_bytes)
    )
    external = write_model(
        model, folder, weights=converted.path.parent, origin=origin, limit=job.one_file_bytes
    )
    shutil.rmtree(scratch)
    onnx_form.check_sound(model, origin=origin, path=path)
    job.data.check_fits(onnx_form.input_specs(model))
    with job.open_onnx(path) as running:
        limit = job.source.parity_max_abs_error
        trial = BatchTrial(
            running, job.data, converted.framework, limit, origin, converted.logarithms
        )
        evidence = examine(trial, onnx_form.dynamic_axes(model))
    onnx = _described(job, model, FileDigest.of(path), external, evidence)
    write_file(folder / MANIFEST, onnx.pretty_json())
    return onnx


def _described(
    job: _Job,
    model: ModelProto,
    file: FileDigest,
    external: Mapping[str, FileDigest],
    evidence: Evidence,
) -> OnnxModel:
    parity = evidence.parity
    return OnnxModel(
        source=job.opened.uri,
        source_sha256=job.opened.sha256,
        file=file,
        external=dict(external),
        inputs=onnx_form.input_specs(model),
        outputs=onnx_form.output_specs(model),
        opset=onnx_form.opset(model),
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip() or "unknown",
        exporter=job.opened.exporter,
        parity_max_abs_error=parity.max_abs_error if parity else None,
        parity_tolerance=job.source.parity_max_abs_error if parity else None,
        parity_samples=parity.samples if parity else 0,
        proven_batch_sizes=evidence.batch_sizes,
        proven_lengths=evidence.lengths,
    )


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
        with fetch_logged_model(source.uri, tracking_uri=tracking_uri) as (uri, folder):
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
