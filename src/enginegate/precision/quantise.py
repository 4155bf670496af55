"""FP32 ONNX -> INT8 or FP8 ONNX with explicit Quantize/Dequantize pairs, by ONNX Runtime's tools.

The engine kind says in which form it takes a quantised graph (`engine_kinds.QuantisedForm`).

Ranges are this package's own (`calibration`): ONNX Runtime's entropy has one threshold to choose
from by default, the maximum, and its FP8 scales clip beyond 4.5 standard deviations of the
activation.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from enginegate.engine_kinds import QuantisedForm
from enginegate.errors import BuildError, told_by, tool_errors
from enginegate.precision.calibration import ActivationRange, Prepared
from enginegate.precision.onnx_checks import (
    LAYERS,
    behind_no_layer,
    clean_converted,
    name_nodes,
    with_opset,
)
from enginegate.precision.session import ON_CPU, CalibrationProvider, open_cpu_session
from enginegate.sources.onnx_form import graphs

if TYPE_CHECKING:
    from onnxruntime.quantization.calibrate import (  # type: ignore[import-untyped]
        TensorsData,
    )

_FP8_MAX = 448.0
_QDQ_OPSET = 19  # the first whose Quantize and Dequantize take FP8
_PRODUCTS = frozenset({"Gemm", "MatMul"})
_log = logging.getLogger(__name__)
_BOUNDLESS = 2**31 - 1  # what a Slice to the end means to ONNX Runtime's tool
WITHOUT = "without symbolic shapes"
_TYPES = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(double)": TensorProto.DOUBLE,
    "tensor(int64)": TensorProto.INT64,
    "tensor(int32)": TensorProto.INT32,
    "tensor(bool)": TensorProto.BOOL,
}


def prepare(
    source: Path,
    scratch: Path,
    form: QuantisedForm,
    provider: CalibrationProvider = ON_CPU,
) -> Prepared:
    """Raise the opset, infer shapes and fold constants, as ONNX Runtime's quantiser expects.

    Raises:
        BuildError: sympy is missing.
        ToolError: ONNX Runtime cannot.
    """
    from onnxruntime.quantization.shape_inference import (  # type: ignore[import-untyped]  # noqa: PLC0415
        quant_pre_process,
    )

    raised = with_opset(onnx.load(source), _QDQ_OPSET, what=f"Quantising {source}")
    shaped, note = with_symbolic_shapes(raised)
    inferred, path = scratch / "inferred.onnx", scratch / "prepared.onnx"
    with _refusals(str(source), form):
        onnx.save(shaped, inferred)
        quant_pre_process(inferred, path, skip_symbolic_shape=True)
        model = name_nodes(with_types(onnx.load(path), what=str(source)))
    operators = LAYERS if _has_attention(model) else (*LAYERS, *form.between)
    return Prepared(model, form, operators, str(source), note, provider)


def with_pairs(
    prepared: Prepared,
    ranges: Mapping[str, ActivationRange],
    *,
    only: frozenset[str] | None = None,
    keep: frozenset[str] = frozenset(),
) -> ModelProto:
    """The model with Quantize/Dequantize pairs.

    Args:
        ranges: of every activation of the nodes that are quantised.
        only: nodes to quantise; None is all of `operators` but those that follow no layer.
        keep: nodes that stay FP32.

    Raises:
        BuildError: ONNX Runtime made something invalid.
        ToolError: ONNX Runtime cannot quantise this model.
    """
    from onnxruntime.quantization import (  # type: ignore[import-untyped]  # noqa: PLC0415
        QDQQuantizer,
        QuantType,
        calibrate,
    )

    # It prints; redirecting stdout would swallow other threads' lines.
    vars(calibrate)["print"] = _log.debug
    form, model = prepared.form, ModelProto()
    model.CopyFrom(prepared.model)
    idle = behind_no_layer(model, form.between, keep)
    with _refusals(prepared.origin, form):
        quantizer = QDQQuantizer(
            model,
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType[form.weights],
            activation_qType=QuantType[form.activations],
            tensors_range=_tensors_data(form, ranges),
            nodes_to_quantize=sorted(only or ()),
            nodes_to_exclude=sorted(keep | idle),
            op_types_to_quantize=list(prepared.operators),
            extra_options={
                "ActivationSymmetric": form.symmetric,
                "WeightSymmetric": True,
                **form.options,
            },
        )
        quantizer.quantize_model()
    return clean_converted(
        _with_plain_outputs(quantizer.model.model),
        what=f"The {form.weights} form of {prepared.origin}",
    )


def _with_plain_outputs(model: ModelProto) -> ModelProto:
    """Without pairs on what a matrix product gives to the caller.

    They would clip logits that are larger than any of the calibration samples', and save nothing.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    uses = Counter(name for node in model.graph.node for name in node.input)
    for value in model.graph.output:
        pair = _pair_before(value.name, makers)
        if pair is not None and all(uses[node.input[0]] == 1 for node in pair):
            product = makers[pair[0].input[0]]
            product.output[0] = value.name
            for node in pair:
                model.graph.node.remove(node)
    _drop_unused(model)
    return model


def _drop_unused(model: ModelProto) -> None:
    inner = graphs(model.graph)
    used = {name for graph in inner for node in graph.node for name in node.input}
    used |= {value.name for value in model.graph.output}
    for tensor in [t for t in model.graph.initializer if t.name not in used]:
        model.graph.initializer.remove(tensor)


def _pair_before(
    output: str, makers: Mapping[str, NodeProto]
) -> tuple[NodeProto, NodeProto] | None:
    """Quantize and Dequantize between an output and the matrix product that alone feeds it."""
    last = makers.get(output)
    if last is None or last.op_type != "DequantizeLinear":
        return None
    first = makers.get(last.input[0])
    source = None if first is None else makers.get(first.input[0])
    if first is None or source is None or source.op_type not in _PRODUCTS:
        return None
    return first, last


def _has_attention(model: ModelProto) -> bool:
    """Whether some MatMul multiplies two activations."""
    constants = {tensor.name for tensor in model.graph.initializer}
    products = (node for node in model.graph.node if node.op_type == "MatMul")
    return any(constants.isdisjoint(node.input) for node in products)


def _tensors_data(form: QuantisedForm, ranges: Mapping[str, ActivationRange]) -> "TensorsData":
    """In ONNX Runtime's types; it derives FP8 scales from a standard deviation."""
    from onnxruntime.quantization import CalibrationMethod  # noqa: PLC0415
    from onnxruntime.quantization.calibrate import TensorData, TensorsData  # noqa: PLC0415
    from onnxruntime.quantization.quant_utils import (  # type: ignore[import-untyped]  # noqa: PLC0415
        compute_scale_zp_float8,
    )

    ends = {name: (np.float32(r.low), np.float32(r.high)) for name, r in ranges.items()}
    found = {name: {"lowest": np.array(a), "highest": np.array(b)} for name, (a, b) in ends.items()}
    method = CalibrationMethod.MinMax
    if form.is_fp8:
        method = CalibrationMethod.Distribution
        _, unit = compute_scale_zp_float8(TensorProto.FLOAT8E4M3FN, np.float32(1.0))
        for name, range_ in ranges.items():
            deviation = np.float32((range_.magnitude or 1.0) / _FP8_MAX / float(unit))
            found[name] |= {"avg": np.array(np.float32(0)), "std": np.array(deviation)}
    return TensorsData(method, {name: TensorData(**fields) for name, fields in found.items()})


def _refusals(origin: str, form: QuantisedForm) -> AbstractContextManager[None]:
    return tool_errors(
        f"ONNX Runtime cannot quantise {origin} to {form.weights}",
        remedy="Drop that precision from [candidates], or export the model in another way.",
    )


def with_symbolic_shapes(model: ModelProto) -> tuple[ModelProto, str]:
    """The model with what symbolic inference found, and why it found nothing (empty if it did).

    It cannot follow some models that are perfectly valid: masks of encoders as transformers exports
    them, operators of ``ai.onnx.ml``. ONNX's own inference, which runs after it in any case, is
    enough to quantise those; where that knows no operator, `with_types` asks ONNX Runtime.

    ``SymbolicShapeInference.infer_shapes`` would write the whole model into the current folder when
    it cannot finish, so its steps are taken here one by one.

    Raises:
        BuildError: sympy is missing.
    """
    try:
        from onnxruntime.tools.symbolic_shape_infer import (  # type: ignore[import-untyped]  # noqa: PLC0415
            SymbolicShapeInference,
        )
    except ImportError as error:
        raise BuildError(
            "Quantising needs sympy, which is not installed here. Run: pip install sympy"
        ) from error
    complete, copy = False, ModelProto()
    copy.CopyFrom(model)
    try:
        inference = SymbolicShapeInference(
            int_max=_BOUNDLESS, auto_merge=False, guess_output_rank=False, verbose=0
        )
        inference._preprocess(copy)  # noqa: SLF001 - see above
        while inference.run_:
            complete = inference._infer_impl()  # noqa: SLF001
        inference._update_output_from_vi()  # noqa: SLF001
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of any kind, sympy's among them
        _log.debug("symbolic shape inference broke", exc_info=error)
        return model, f"{WITHOUT} ({told_by(error)})"
    if not complete:
        return model, f"{WITHOUT} (ONNX Runtime's inference does not follow this model)"
    return inference.out_mp_, ""


def with_types(model: ModelProto, *, what: str) -> ModelProto:
    """The model with a type for every tensor that ONNX's inference left without one.

    An output that states no type is one that ONNX Runtime works out when it opens the model.

    Args:
        model: as ONNX's inference left it; it is changed.
        what: the model, for messages.

    Raises:
        BuildError: ONNX Runtime cannot load it.
    """
    graph = model.graph
    typed = {value.name for value in (*graph.input, *graph.value_info, *graph.output)}
    untyped = [name for node in graph.node for name in node.output if name and name not in typed]
    if not untyped:
        return model
    asked = ModelProto()
    asked.CopyFrom(model)
    asked.graph.output.extend(onnx.ValueInfoProto(name=name) for name in untyped)
    session = open_cpu_session(asked.SerializeToString(), what=what, optimised=False)
    found = {output.name: _TYPES.get(output.type) for output in session.get_outputs()}
    for name in untyped:
        kind = found[name]
        if kind is not None:
            graph.value_info.append(helper.make_tensor_value_info(name, kind, None))
    return model
