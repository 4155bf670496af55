"""A source -> an `OnnxModel` in the store, or the one that is there already."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import ModelProto

from enginegate.atomic_io import write_file
from enginegate.candidate import (
    ONNX_FILE,
    PROGRAM_FILE,
    FileDigest,
    OnnxModel,
    TorchProgram,
)
from enginegate.content_store import ContentFolder, make_once
from enginegate.data import DataSet, Tensors
from enginegate.errors import InputError
from enginegate.messages import first_line
from enginegate.object_storage import fetch_or_make
from enginegate.policy.model_source import ModelSource
from enginegate.records import canonical_json, sha256_bytes
from enginegate.sources import onnx_form, parity
from enginegate.sources.dispatch import open_source
from enginegate.sources.parity import ModelUnderTest, OpenOnnx
from enginegate.sources.types import ExportedModel, Framework, OpenedSource

MANIFEST = "manifest.json"
_FORM = 3  # raise when the canonical form of the same export changes
_SCRATCH = "exporting"
_PROGRAM_SAMPLES = 64  # the framework has answered them once already; each costs two runs more
_WAIT_S = 1800.0  # for another process that exports this model; large encoders take minutes


def onnx_from_source(
    source: ModelSource,
    data: DataSet,
    *,
    onnx_root: Path,
    tracking_uri: str,
    open_onnx: OpenOnnx,
    one_file_bytes: int = onnx_form.ONE_FILE_BYTES,
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
    with open_source(source, data, tracking_uri=tracking_uri) as opened:
        # Everything that decides the bytes and the evidence beside them.
        deciding = {
            "source": opened.sha256,
            "exporter": opened.exporter,
            "options": opened.options,
            "form": _FORM,
            "one_file_bytes": one_file_bytes,
            "samples": data.head(parity.PARITY_SAMPLES).sha256,
            "parity_max_abs_error": source.parity_max_abs_error,
        }

        def make(folder: Path) -> OnnxModel:
            model, external, exported = _write_onnx(opened, data, folder, limit=one_file_bytes)
            path, limit = folder / ONNX_FILE, source.parity_max_abs_error
            with open_onnx(path) as running, _framework(exported, open_onnx) as framework:
                tested = ModelUnderTest(
                    running, data, framework, limit, opened.uri, exported.logarithms
                )
                batch_sizes = parity.prove_batch_sizes(tested)
                proven = parity.measure_parity(tested)
                axes = onnx_form.dynamic_axes(model).items()
                lengths = {name: parity.prove_lengths(tested, name, at) for name, at in axes}
            program, no_program = _proven_program(exported, tested, folder)
            onnx = OnnxModel(
                source=opened.uri,
                source_sha256=opened.sha256,
                file=FileDigest.of(path),
                external=external,
                inputs=onnx_form.input_specs(model),
                outputs=onnx_form.output_specs(model),
                opset=onnx_form.opset(model),
                ir_version=model.ir_version,
                producer=f"{model.producer_name} {model.producer_version}".strip() or "unknown",
                exporter=opened.exporter,
                parity_max_abs_error=proven.max_abs_error if proven else None,
                parity_tolerance=limit if proven else None,
                parity_samples=proven.samples if proven else 0,
                proven_batch_sizes=batch_sizes,
                proven_lengths=lengths,
                program=program,
                no_program=no_program,
            )
            write_file(folder / MANIFEST, onnx.pretty_json())
            return onnx

        key = sha256_bytes(canonical_json(deciding))
        shared = fetch_or_make(key, "onnx", read=read_onnx_model, make=make)
        return make_once(onnx_root / key, read=read_onnx_model, make=shared, wait_s=_WAIT_S)


@contextmanager
def _framework(exported: ExportedModel, open_onnx: OpenOnnx) -> Iterator[Framework | None]:
    """What the model is compared with; for one that takes a single sample, itself in turn."""
    if exported.one_sample is None:
        yield exported.framework
        return
    with open_onnx(exported.one_sample) as original:

        def one_after_the_other(inputs: Tensors) -> Tensors:
            rows = range(len(next(iter(inputs.values()))))
            answers = [
                original.run({name: array[row : row + 1] for name, array in inputs.items()})
                for row in rows
            ]
            return {name: np.concatenate([each[name] for each in answers]) for name in answers[0]}

        yield one_after_the_other


def read_onnx_model(folder: Path) -> OnnxModel:
    """The record of an ONNX model in the store; its files' digests are checked.

    Raises:
        InputError: the manifest is missing or damaged.
        TamperedError: a file is not the one that was recorded.
    """
    onnx = OnnxModel.read(folder / MANIFEST)
    onnx.check(folder)
    return onnx


def _write_onnx(
    opened: OpenedSource, data: DataSet, folder: Path, *, limit: int
) -> tuple[ModelProto, dict[str, FileDigest], ExportedModel]:
    """Convert, clean, write and check; the model, its weight files, and as it was converted."""
    scratch, origin = folder / _SCRATCH, opened.uri
    scratch.mkdir()
    exported = opened.convert(data, scratch)
    raw = onnx_form.read_onnx(exported.path, origin=origin, limit=limit)
    model = onnx_form.canonical(raw)
    weights = exported.path.parent
    external = onnx_form.write_model(model, folder, weights=weights, origin=origin, limit=limit)
    if exported.program is not None:
        exported.program.path.rename(folder / PROGRAM_FILE)
    shutil.rmtree(scratch)
    onnx_form.check_sound(model, origin=origin, path=folder / ONNX_FILE)
    data.check_fits(onnx_form.input_specs(model))
    return model, external, exported


def _proven_program(
    exported: ExportedModel, tested: ModelUnderTest, folder: Path
) -> tuple[TorchProgram | None, str]:
    """The model's torch program, if it answers as the framework does; else why there is none.

    That another form of the model is missing is no reason to refuse this one.
    """
    saved, path = exported.program, folder / PROGRAM_FILE
    if saved is None:
        return None, exported.no_program
    try:
        proven = parity.measure_parity(
            replace(tested, model=saved, data=tested.data.head(_PROGRAM_SAMPLES))
        )
    except InputError as error:
        path.unlink()
        return None, f"the program does not answer as the framework does: {first_line(error)}"
    program = TorchProgram(
        file=FileDigest.of(path),
        inputs=saved.inputs,
        outputs=saved.outputs,
        parity_max_abs_error=proven.max_abs_error if proven else 0.0,
    )
    return program, ""
