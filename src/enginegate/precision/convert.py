"""FP32 ONNX -> the same model at a candidate's precision, as the runtime that takes it wants it."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
from onnx import ModelProto

from enginegate.candidate import Candidate
from enginegate.data import DataSet
from enginegate.engine_kinds import QuantisedForm, kind_named
from enginegate.errors import BuildError, DataError
from enginegate.policy import CalibrationTable
from enginegate.precision.calibration import CalibrationSample, Prepared, ranges_for
from enginegate.precision.fp16_bf16 import to_half
from enginegate.precision.graph_stats import GraphStats, count_convolutions, graph_stats
from enginegate.precision.modelopt import ModelOpt, ModelOptJob, by_modelopt, modelopt_for
from enginegate.precision.onnx_checks import check_source, name_nodes, regions
from enginegate.precision.quantise import prepare, with_pairs
from enginegate.precision.session import calibration_provider
from enginegate.sources.onnx_form import input_specs, onnx_bytes

_FP16 = "float16 converter"


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted model.

    Attributes:
        onnx: serialised; the very bytes that are compiled or loaded.
        converter: tool and version that changed the precision, or ``none``; says which calibration
            method was chosen, and how many nodes were kept.
    """

    onnx: bytes
    converter: str

    def stats(
        self,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        types: Mapping[str, str] | None = None,
    ) -> GraphStats:
        """What the graph computes in now, for one sample of these shapes.

        Args:
            types: node -> the type that the runtime computes it in, where that is known.
        """
        return graph_stats(onnx.load_from_string(self.onnx), shapes=shapes, types=types)

    @property
    def convolutions(self) -> int:
        """Convolution nodes of the converted graph."""
        return count_convolutions(onnx.load_from_string(self.onnx))


def convert(
    source: Path,
    candidate: Candidate,
    *,
    data: DataSet | None,
    rules: CalibrationTable,
    keep: tuple[str, ...] = (),
) -> Conversion:
    """The model at the candidate's precision; inputs and outputs keep their types.

    Args:
        source: an FP32 ONNX file of the store.
        data: representative samples; int8 and fp8 need them.
        rules: how they are read.
        keep: names of nodes that stay FP32, as `sensitivity` names them.

    Raises:
        DataError: int8 or fp8 was asked for without calibration data, or the data does not fit.
        BuildError: the model cannot be had at this precision, or has no node of a name to keep.
    """
    precision = candidate.precision
    if precision.is_as_exported:
        return Conversion(source.read_bytes(), "none")
    tool = _modelopt(candidate, data, rules)
    converter = converter_of(candidate, data=data, rules=rules)
    if converter == "absent":
        raise BuildError(
            f"{candidate} needs ONNX Runtime to convert the model, and it is not installed here. "
            "Run: pip install 'enginegate[cpu]'"
        )
    model = onnx.load(source)
    check_source(model, origin=str(source))
    if tool is None and precision.is_16_bit:
        _check_names(name_nodes(model), keep, candidate)
        converted, how = to_half(model, precision, origin=str(source), keep=keep), ""
    else:
        sample = calibration_sample(candidate, data, rules)
        sample.check_fits(input_specs(model))
        with tempfile.TemporaryDirectory(prefix="enginegate-convert-") as name:
            by_onnxruntime = partial(_quantised, source, candidate, sample, rules, keep, Path(name))
            if tool is None:
                converted, how = by_onnxruntime()
            else:
                _check_names(name_nodes(model), keep, candidate)
                job = ModelOptJob(tool, source, candidate, rules.batch_size, keep, Path(name))
                converted, how = by_modelopt(job, sample, rules.method)
                if rules.tool == "auto" and _skipped(candidate, converted):
                    converted, how = by_onnxruntime()
                    how = f"it quantised no layer, so by onnxruntime, {how}"
    chosen = f": {how}" if how not in {"", rules.method} else ""
    kept = f", {len(keep)} node{'s' if len(keep) > 1 else ''} kept at fp32" if keep else ""
    content = onnx_bytes(converted, origin=str(source))
    return Conversion(content, f"{converter}{chosen}{kept}")


def converter_of(candidate: Candidate, *, data: DataSet | None, rules: CalibrationTable) -> str:
    """Tool, version and settings that decide the converted bytes.

    ``none`` if nothing changes, ``absent`` if the tool is not installed.
    """
    precision = candidate.precision
    if precision.is_as_exported or kind_named(candidate.kind).takes_program:
        return "none"
    try:
        import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415

        found = _modelopt(candidate, data, rules)
    except (ImportError, BuildError):
        return "absent"
    tool = f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
    samples = min(rules.max_samples, len(data)) if data else 0
    read = f"{samples} samples in batches of {rules.batch_size}"
    if precision.is_16_bit:
        return f"modelopt {found.version}, autocast over {read}" if found else f"{tool}, {_FP16}"
    if found:
        return f"modelopt {found.version}, QDQ, {rules.method} over {read}"
    where = calibration_provider(rules.device).identity if samples else ""
    form = kind_named(candidate.kind).quantised.get(precision)
    where_pairs_are = " behind layers" if form is not None and form.between else ""
    return f"{tool}, QDQ{where_pairs_are}, {rules.method} over {read}{where}"


def reads_data(candidate: Candidate, rules: CalibrationTable) -> bool:
    """Whether calibration samples decide the converted bytes.

    Scales come from them, and ModelOpt's 16-bit conversion looks at their ranges.
    """
    try:
        halves = candidate.precision.is_16_bit
        by_range = halves and modelopt_for(candidate, rules) is not None
    except BuildError:
        by_range = False
    return candidate.precision.needs_calibration or by_range


def _modelopt(
    candidate: Candidate, data: DataSet | None, rules: CalibrationTable
) -> ModelOpt | None:
    """ModelOpt if it converts this candidate; without data it would make some up."""
    found = modelopt_for(candidate, rules)
    optional = rules.tool == "auto" and candidate.precision.is_16_bit
    return None if data is None and optional else found


def _skipped(candidate: Candidate, converted: ModelProto) -> bool:
    """Whether nothing is quantised: ModelOpt leaves out layers of fewer than 16 channels."""
    return candidate.precision.needs_calibration and graph_stats(converted).quantised == 0


def quantised_form(candidate: Candidate) -> QuantisedForm:
    """How the candidate's runtime wants a quantised graph.

    Raises:
        BuildError: there is no such form here.
    """
    form = kind_named(candidate.kind).quantised.get(candidate.precision)
    if form is None:
        raise BuildError(f"{candidate.kind} has no {candidate.precision} form of a model here.")
    return form


def _quantised(
    source: Path,
    candidate: Candidate,
    sample: CalibrationSample,
    rules: CalibrationTable,
    keep: tuple[str, ...],
    scratch: Path,
) -> tuple[ModelProto, str]:
    """The model by ONNX Runtime's tools, and how ranges were found."""
    provider = calibration_provider(rules.device)
    prepared = prepare(source, scratch, quantised_form(candidate), provider)
    _check_names(prepared.model, keep, candidate)
    ranges = ranges_for(prepared, with_pairs, sample, rules, scratch)
    how = f"{ranges.how}, {prepared.note}" if prepared.note else ranges.how
    return with_pairs(prepared, ranges.by_tensor, keep=kept_with(prepared, keep)), how


def kept_with(prepared: Prepared, keep: tuple[str, ...]) -> frozenset[str]:
    """Nodes that must stay FP32 for these layers to be FP32."""
    return regions(prepared.model, keep, prepared.form.between)


def calibration_sample(
    candidate: Candidate, data: DataSet | None, rules: CalibrationTable
) -> CalibrationSample:
    """The samples scales are measured on.

    Raises:
        DataError: there is no data.
    """
    if data is None:
        raise DataError(
            f"{candidate} needs calibration data, and the policy gives none: scales are never made "
            f"from random data. Set calibration under [data], or drop {candidate.precision} from "
            "[candidates]."
        )
    return CalibrationSample.of(data, rules)


def _check_names(model: ModelProto, keep: tuple[str, ...], candidate: Candidate) -> None:
    missing = sorted(set(keep) - {node.name for node in model.graph.node})
    if missing:
        raise BuildError(
            f"{candidate} was to keep {', '.join(map(repr, missing))} at fp32, and the model has "
            "no such node. It was ranked on another model: repair it again."
        )
