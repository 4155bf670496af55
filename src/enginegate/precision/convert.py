"""FP32 ONNX -> the same model at a candidate's precision, as the runtime that takes it wants it."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import ModelProto

from enginegate.candidate import Candidate, Precision
from enginegate.data import DataSet
from enginegate.errors import BuildError, DataError
from enginegate.policy import Calibration
from enginegate.precision.census import Census, census
from enginegate.precision.halves import to_half
from enginegate.precision.quantise import SCHEMES, quantise
from enginegate.sources.onnx_form import input_specs, onnx_bytes

_AS_IT_IS = frozenset({Precision.FP32, Precision.TF32})
_HALVES = frozenset({Precision.FP16, Precision.BF16})


@dataclass(frozen=True, slots=True)
class Conversion:
    """A converted model.

    Attributes:
        onnx: serialised; the very bytes that are compiled or loaded.
        converter: tool and version that changed the precision, or ``none``.
        census: what the graph computes in now.
    """

    onnx: bytes
    converter: str
    census: Census


def convert(
    source: Path, candidate: Candidate, *, data: DataSet | None, rules: Calibration
) -> Conversion:
    """The model at the candidate's precision; inputs and outputs keep their types.

    Args:
        source: an FP32 ONNX file of the store.
        data: representative samples; int8 and fp8 need them.
        rules: how they are read.

    Raises:
        DataError: int8 or fp8 was asked for without calibration data, or the data does not fit.
        BuildError: the model cannot be had at this precision.
    """
    precision = candidate.precision
    converter = converter_of(candidate, data=data, rules=rules)
    if precision in _AS_IT_IS:
        return Conversion(source.read_bytes(), converter, census(onnx.load(source)))
    if converter == "absent":
        raise BuildError(
            f"{candidate} needs ONNX Runtime to convert the model, and it is not installed here. "
            "Run: pip install 'enginegate[cpu]'"
        )
    model = onnx.load(source)
    if precision in _HALVES:
        converted = to_half(model, precision, origin=str(source))
    else:
        converted = _quantised(source, model, candidate, data=data, rules=rules)
    return Conversion(onnx_bytes(converted, origin=str(source)), converter, census(converted))


def converter_of(candidate: Candidate, *, data: DataSet | None, rules: Calibration) -> str:
    """Tool, version and settings that decide the converted bytes.

    ``none`` if nothing changes, ``absent`` if the tool is not installed.
    """
    precision = candidate.precision
    if precision in _AS_IT_IS:
        return "none"
    try:
        import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        return "absent"
    tool = f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"
    if precision in _HALVES:
        return f"{tool}, float16 converter"
    method = "distribution" if precision is Precision.FP8 else rules.method
    samples = min(rules.max_samples, len(data)) if data else 0
    return f"{tool}, QDQ, {method} over {samples} samples in batches of {rules.batch_size}"


def _quantised(
    source: Path,
    model: ModelProto,
    candidate: Candidate,
    *,
    data: DataSet | None,
    rules: Calibration,
) -> ModelProto:
    if data is None:
        raise DataError(
            f"{candidate} needs calibration data, and the policy gives none: scales are never made "
            f"from random data. Set calibration under [data], or drop {candidate.precision} from "
            "[candidates]."
        )
    scheme = SCHEMES.get((candidate.kind, candidate.precision))
    if scheme is None:
        raise BuildError(f"{candidate.kind} has no {candidate.precision} form of a model here.")
    data.head(rules.max_samples).check_fits(input_specs(model))
    with tempfile.TemporaryDirectory(prefix="enginegate-quantise-") as scratch:
        return quantise(source, Path(scratch), scheme=scheme, data=data, rules=rules)
