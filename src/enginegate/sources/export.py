"""A registered model -> an `OnnxModel` in the store, or the one that is there already."""

from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from enginegate.candidate import FileDigest, OnnxModel
from enginegate.canonical import canonical_json, sha256_bytes
from enginegate.data import DataSet
from enginegate.durable import write_file
from enginegate.policy import ModelSource
from enginegate.sources import onnx_form, pytorch
from enginegate.sources.acceptance import (
    PARITY_SAMPLES,
    OpenOnnx,
    Parity,
    measure_parity,
    prove_batch_sizes,
)
from enginegate.sources.once import Kept, kept
from enginegate.sources.registry import Flavour, RegisteredModel, fetched, torch_module

ONNX_FILE = "model.onnx"
MANIFEST = "manifest.json"
_FORM = 1  # raise when the canonical form of the same export changes
_WAIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class _Job:
    """One export: what is read, and what it is checked with."""

    source: ModelSource
    model: RegisteredModel
    data: DataSet
    open_onnx: OpenOnnx

    @property
    def exporter(self) -> str:
        """What makes the ONNX; for a PyTorch model its versions decide the bytes."""
        if self.model.flavour is Flavour.PYTORCH:
            return pytorch.exporter()
        return "registered as ONNX"

    @property
    def key(self) -> str:
        """Digest of everything that decides the bytes and the evidence beside them."""
        deciding = {
            "source": self.model.sha256,
            "exporter": self.exporter,
            "form": _FORM,
            "samples": self.data.head(PARITY_SAMPLES).sha256,
            "parity_max_abs_error": self.source.parity_max_abs_error,
        }
        return sha256_bytes(canonical_json(deciding))


def onnx_from_registry(
    source: ModelSource,
    data: DataSet,
    *,
    onnx_root: Path,
    tracking_uri: str,
    open_onnx: OpenOnnx,
) -> Kept[OnnxModel]:
    """Fetch, export, check and keep a registered model; an earlier export is reused.

    Args:
        source: which version, whether pickles may be opened, and the parity limit.
        data: real samples, for parity and batch sizes.
        onnx_root: the store's folder for ONNX models.
        tracking_uri: MLflow's address.
        open_onnx: opens an FP32 ONNX file to run it, as ``enginegate.engines.open_onnx`` does.

    Raises:
        ModelError: the version is missing, refused, corrupt, or does not answer like its framework.
        DataError: the samples do not fit the model.
        LedgerError: MLflow cannot be reached.
    """
    with fetched(source.uri, tracking_uri=tracking_uri) as model:
        job = _Job(source, model, data, open_onnx)
        return kept(
            onnx_root / job.key,
            read=read_onnx_model,
            make=lambda folder: _export(job, folder),
            wait_s=_WAIT_S,
        )


def read_onnx_model(folder: Path) -> OnnxModel:
    """The record of an ONNX model in the store; its file's digest is checked.

    Raises:
        InputError: the manifest is missing or damaged.
        TamperedError: the file is not the one that was recorded.
    """
    onnx = OnnxModel.read(folder / MANIFEST)
    onnx.file.check(folder / ONNX_FILE)
    return onnx


def _export(job: _Job, folder: Path) -> OnnxModel:
    exported, framework = _converted(job)
    onnx_form.check_sound(exported, origin=job.model.uri)
    model = onnx_form.canonical(exported)
    job.data.check_fits(onnx_form.input_specs(model))
    path = folder / ONNX_FILE
    write_file(path, onnx_form.onnx_bytes(model, origin=job.model.uri))
    sizes, parity = _accepted(job, path, framework)
    onnx = OnnxModel(
        source=job.model.uri,
        source_sha256=job.model.sha256,
        file=FileDigest.of(path),
        inputs=onnx_form.input_specs(model),
        outputs=onnx_form.output_specs(model),
        opset=onnx_form.opset(model),
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}".strip() or "unknown",
        exporter=job.exporter,
        parity_max_abs_error=parity.max_abs_error if parity else None,
        parity_tolerance=job.source.parity_max_abs_error if parity else None,
        parity_samples=parity.samples if parity else 0,
        proven_batch_sizes=sizes,
    )
    write_file(folder / MANIFEST, onnx.pretty_json())
    return onnx


def _converted(job: _Job) -> tuple[ModelProto, pytorch.Framework | None]:
    """The ONNX as it comes, and the framework to compare it with, if there is one."""
    origin = job.model.uri
    if job.model.flavour is Flavour.ONNX:
        return onnx_form.read_onnx(job.model.data, origin=origin), None
    module = torch_module(job.model, allow_pickle=job.source.allow_pickle)
    export = pytorch.onnx_from_module(module, job.data, origin=origin)
    return export.model, export.framework


def _accepted(
    job: _Job, path: Path, framework: pytorch.Framework | None
) -> tuple[tuple[int, ...], Parity | None]:
    """The batch sizes that were proven, and the parity that was measured."""
    limit, origin = job.source.parity_max_abs_error, job.model.uri
    with job.open_onnx(path) as opened:
        sizes = prove_batch_sizes(opened, job.data, limit=limit, origin=origin)
        if framework is None:
            return sizes, None
        return sizes, measure_parity(framework, opened, job.data, limit=limit, origin=origin)
