"""A source -> an `OnnxModel` in the store, or the one that is there already."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from enginegate.atomic_io import write_file
from enginegate.candidate import ONNX_FILE, FileDigest, OnnxModel
from enginegate.content_store import ContentFolder, make_once
from enginegate.data import DataSet
from enginegate.policy.model_source import ModelSource
from enginegate.records import canonical_json, sha256_bytes
from enginegate.sources import onnx_form
from enginegate.sources.dispatch import open_source
from enginegate.sources.external_data import ONE_FILE_BYTES, write_model
from enginegate.sources.parity import PARITY_SAMPLES, BatchTrial, Evidence, OpenOnnx, examine
from enginegate.sources.types import OpenedSource

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
