"""FP32 ONNX -> INT8 or FP8 ONNX with explicit Quantize/Dequantize pairs, by ONNX Runtime's tools.

TensorRT takes symmetric scales, float biases and pairs around weighted layers only; with ONNX
Runtime's defaults it refuses the graph. ONNX Runtime on a CPU is fastest with unsigned activations,
integer biases and every operator between the layers quantised too (measured: batch 32, one thread,
a CNN of 64 channels: 2.2 times FP32, against 1.8 with TensorRT's form). Signed activations it turns
into unsigned ones when it loads, and fails at that for some graphs of opset 21 and later.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import onnx
from onnx import ModelProto

from enginegate.candidate import EngineKind, Precision
from enginegate.data import DataSet, Tensors
from enginegate.errors import BuildError
from enginegate.policy import Calibration
from enginegate.precision.well_formed import well_formed, with_opset

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import (  # type: ignore[import-untyped]
        CalibraterBase,
        TensorsData,
    )

_FP8 = "QFLOAT8E4M3FN"
_QDQ_OPSET = 19  # the first whose Quantize and Dequantize take FP8
_LAYERS = ("Conv", "Gemm", "MatMul")
_BETWEEN = (
    *("Add", "AveragePool", "Clip", "Concat", "Flatten", "GlobalAveragePool", "MaxPool"),
    *("Relu", "Reshape", "Squeeze", "Transpose", "Unsqueeze"),
)
_FOR_TENSORRT = {"QuantizeBias": False, "AddQDQPairToWeight": True}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one runtime wants a quantised graph.

    Attributes:
        weights: ONNX Runtime's QuantType of weights.
        activations: likewise, of everything else.
        between: operator types that get pairs besides Conv, Gemm and MatMul. Not with attention:
            its masks hold infinities, which have no scale.
        symmetric: whether activations have a zero point of 0.
        options: ONNX Runtime's further options.
    """

    weights: str
    activations: str
    between: tuple[str, ...]
    symmetric: bool
    options: Mapping[str, bool | str]


SCHEMES = {
    (EngineKind.ONNXRUNTIME, Precision.INT8): Scheme(
        "QInt8", "QUInt8", _BETWEEN, symmetric=False, options={}
    ),
    (EngineKind.TENSORRT, Precision.INT8): Scheme(
        "QInt8", "QInt8", (), symmetric=True, options=_FOR_TENSORRT
    ),
    (EngineKind.TENSORRT, Precision.FP8): Scheme(
        _FP8, _FP8, (), symmetric=True, options={"scenario": "same", **_FOR_TENSORRT}
    ),
}


def quantise(
    source: Path, scratch: Path, *, scheme: Scheme, data: DataSet, rules: Calibration
) -> ModelProto:
    """The model with scales measured on the data, read in batches.

    Args:
        source: FP32 ONNX file.
        scratch: an empty folder for intermediate files.
        data: representative samples that fit the model.

    Raises:
        BuildError: ONNX Runtime cannot prepare, calibrate or quantise this model.
    """
    prepared = scratch / "prepared.onnx"
    try:
        _prepare(source, prepared)
        model = onnx.load(prepared)
        operators = list(_LAYERS if _has_attention(model) else _LAYERS + scheme.between)
        calibrator = _calibrator(prepared, scratch, scheme=scheme, operators=operators, rules=rules)
        for batch in data.head(rules.max_samples).batches(rules.batch_size):
            calibrator.collect_data(_OneBatch(batch))
        quantised = _with_pairs(model, scheme, operators, calibrator.compute_data())
    except (RuntimeError, ValueError, TypeError, KeyError, AssertionError) as error:
        raise BuildError(
            f"ONNX Runtime cannot quantise {source} to {scheme.weights}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return well_formed(quantised, what=f"The {scheme.weights} form of {source}")


def _has_attention(model: ModelProto) -> bool:
    """Whether some MatMul multiplies two activations."""
    constants = {tensor.name for tensor in model.graph.initializer}
    products = (node for node in model.graph.node if node.op_type == "MatMul")
    return any(constants.isdisjoint(node.input) for node in products)


def _prepare(source: Path, prepared: Path) -> None:
    """Raise the opset, infer shapes and fold constants, as ONNX Runtime's quantiser expects."""
    from onnxruntime.quantization.shape_inference import (  # type: ignore[import-untyped]  # noqa: PLC0415
        quant_pre_process,
    )

    try:
        raised = with_opset(onnx.load(source), _QDQ_OPSET, what=f"Quantising {source}")
        quant_pre_process(raised, prepared, skip_symbolic_shape=False)
    except ImportError as error:
        raise BuildError(
            "Quantising needs sympy, which is not installed here. Run: pip install sympy"
        ) from error


def _calibrator(
    prepared: Path, scratch: Path, *, scheme: Scheme, operators: list[str], rules: Calibration
) -> "CalibraterBase":
    """What collects activation ranges batch by batch, so that memory does not grow with data."""
    from onnxruntime.quantization import (  # type: ignore[import-untyped]  # noqa: PLC0415
        CalibrationMethod,
        calibrate,
    )

    _silence(calibrate)
    method, options = _method(scheme, rules)
    return calibrate.create_calibrator(
        prepared,
        operators,
        augmented_model_path=str(scratch / "augmented.onnx"),
        calibrate_method=CalibrationMethod[method],
        extra_options=options,
    )


def _with_pairs(
    model: ModelProto, scheme: Scheme, operators: list[str], ranges: "TensorsData"
) -> ModelProto:
    from onnxruntime.quantization import (  # noqa: PLC0415
        QDQQuantizer,
        QuantType,
    )

    quantizer = QDQQuantizer(
        model,
        per_channel=True,
        reduce_range=False,
        weight_qType=QuantType[scheme.weights],
        activation_qType=QuantType[scheme.activations],
        tensors_range=ranges,
        nodes_to_quantize=[],
        nodes_to_exclude=[],
        op_types_to_quantize=operators,
        extra_options={
            "ActivationSymmetric": scheme.symmetric,
            "WeightSymmetric": True,
            **scheme.options,
        },
    )
    quantizer.quantize_model()
    quantised: ModelProto = quantizer.model.model
    return quantised


def _method(scheme: Scheme, rules: Calibration) -> tuple[str, dict[str, Any]]:
    """ONNX Runtime's name for the method, and its settings.

    FP8 has one method there. Entropy compares thresholds over 512 bins for 128 levels: with its
    default of 128 bins there is one threshold to choose from, the maximum.
    """
    if scheme.weights == _FP8:
        return "Distribution", {"scenario": "same"}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "max": ("MinMax", {"symmetric": scheme.symmetric}),
        "entropy": ("Entropy", {"num_bins": 512, "num_quantized_bins": 128}),
        "percentile": ("Percentile", {"percentile": 99.999}),
    }
    return methods[rules.method]


class _OneBatch:
    """What a calibrator reads: one batch, then None."""

    def __init__(self, batch: Tensors) -> None:
        self._batches: Iterator[Tensors] = iter([batch])

    def get_next(self) -> Tensors | None:
        return next(self._batches, None)


def _silence(calibrate: ModuleType) -> None:
    """The calibrators print; redirecting stdout instead would swallow other threads' output."""
    vars(calibrate)["print"] = logging.getLogger(__name__).debug
