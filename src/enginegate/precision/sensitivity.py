"""Which nodes cost a candidate its accuracy: each is converted alone, on real samples."""

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from pydantic import NonNegativeFloat, NonNegativeInt

from enginegate.candidate import Candidate, Precision
from enginegate.data import DataSet
from enginegate.policy import CalibrationTable
from enginegate.precision.calibration import CalibrationSample, ranges_for
from enginegate.precision.convert import calibration_sample, kept_with, quantised_form
from enginegate.precision.fp16_bf16 import round_to_16_bit
from enginegate.precision.onnx_checks import layers, name_nodes
from enginegate.precision.quantise import prepare, with_pairs
from enginegate.precision.session import open_cpu_session, outputs_of, relative_error
from enginegate.records import Record
from enginegate.sources.onnx_form import input_specs

_TYPES = {Precision.FP16: TensorProto.FLOAT16, Precision.BF16: TensorProto.BFLOAT16}
_COMPUTES_NOTHING = frozenset({"Constant", "Shape", "Cast", "Identity"})


class Sensitivity(Record):
    """What one node alone costs at a candidate's precision.

    Attributes:
        node: its name, as `convert` takes it in ``keep``.
        error: root mean square error of the worst output over that output's spread; None if the
            outputs were not finite.
        samples: how many it was measured on.
    """

    node: str
    error: NonNegativeFloat | None
    samples: NonNegativeInt

    @property
    def cost(self) -> float:
        """The error, to sort by: infinite where outputs were not finite."""
        return float("inf") if self.error is None else self.error


def sensitivities(
    source: Path,
    candidate: Candidate,
    *,
    data: DataSet | None,
    rules: CalibrationTable,
    samples: int,
    budget_s: float = math.inf,
) -> tuple[Sensitivity, ...]:
    """Every node that the candidate's precision changes, the most costly first.

    INT8 and FP8 give one layer its Quantize/Dequantize pairs; FP16 and BF16 emulate one node. A
    layer that ends up without pairs was never quantised, and is not listed.

    Args:
        samples: calibration samples to measure on, the first of those that `convert` reads.
        budget_s: nodes that are not reached in this time are not listed; the first always is.

    Raises:
        DataError: there is no calibration data, or it does not fit.
        BuildError: the model cannot be converted.
    """
    ends = time.monotonic() + budget_s
    sample = calibration_sample(candidate, data, rules)
    sample.check_fits(input_specs(onnx.load(source)))
    few = sample.head(samples)
    exact = outputs_of(open_cpu_session(source, what=str(source)), few)
    with tempfile.TemporaryDirectory(prefix="enginegate-sensitivity-") as scratch:
        if candidate.precision.is_16_bit:
            forms = _rounded_forms(source, candidate.precision)
        else:
            forms = _quantised_forms(source, candidate, sample, rules, Path(scratch))
        found = []
        for node, model in forms:
            session = open_cpu_session(
                model.SerializeToString(), what=f"{source} with {node} alone"
            )
            error = relative_error(exact, outputs_of(session, few))
            known = error if math.isfinite(error) else None
            found.append(Sensitivity(node=node, error=known, samples=len(few)))
            if time.monotonic() >= ends:
                break
    return tuple(sorted(found, key=lambda each: (-each.cost, each.node)))


def _quantised_forms(
    source: Path,
    candidate: Candidate,
    sample: CalibrationSample,
    rules: CalibrationTable,
    scratch: Path,
) -> Iterator[tuple[str, ModelProto]]:
    prepared = prepare(source, scratch, quantised_form(candidate))
    ranges = ranges_for(prepared, with_pairs, sample, rules, scratch)
    for node in layers(prepared.model):
        model = with_pairs(prepared, ranges.by_tensor, only=kept_with(prepared, (node,)))
        if any(each.op_type == "QuantizeLinear" for each in model.graph.node):
            yield node, model


def _rounded_forms(source: Path, precision: Precision) -> Iterator[tuple[str, ModelProto]]:
    """The FP32 model with pairs of casts around one node at a time."""
    from onnxruntime.transformers.float16 import (  # type: ignore[import-untyped]  # noqa: PLC0415
        DEFAULT_OP_BLOCK_LIST,
    )

    model = name_nodes(onnx.load(source))
    typed = onnx.shape_inference.infer_shapes(model).graph
    values = (*typed.input, *typed.value_info, *typed.output)
    real = {v.name for v in values if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    real |= {t.name for t in typed.initializer if t.data_type == TensorProto.FLOAT}
    for index, node in enumerate(model.graph.node):
        if node.op_type in _COMPUTES_NOTHING or node.op_type in DEFAULT_OP_BLOCK_LIST:
            continue
        if real.intersection(node.output):
            yield node.name, _with_casts(model, index, real, precision)


def _with_casts(model: ModelProto, index: int, real: set[str], precision: Precision) -> ModelProto:
    """The model with what one node reads and writes rounded to 16 bits."""
    changed, kind = ModelProto(), _TYPES[precision]
    changed.CopyFrom(model)
    constants = {tensor.name: tensor for tensor in changed.graph.initializer}
    node, before, after = changed.graph.node[index], [], []
    for place, name in enumerate(node.input):
        if name in real:
            node.input[place] = f"{name}.rounded.{place}"
            if name in constants:
                narrow = round_to_16_bit(numpy_helper.to_array(constants[name]), precision)
                wide = numpy_helper.from_array(narrow.astype(np.float32), node.input[place])
                changed.graph.initializer.append(wide)
            else:
                before += _pair(name, node.input[place], kind)
    for place, name in enumerate(node.output):
        if name in real:
            node.output[place] = f"{name}.wide"
            after += _pair(node.output[place], name, kind)
    nodes = list(changed.graph.node)
    del changed.graph.node[:]
    changed.graph.node.extend([*nodes[:index], *before, node, *after, *nodes[index + 1 :]])
    return changed


def _pair(source: str, target: str, kind: int) -> list[NodeProto]:
    narrow = f"{target}.narrow"
    return [
        helper.make_node("Cast", [source], [narrow], to=kind),
        helper.make_node("Cast", [narrow], [target], to=TensorProto.FLOAT),
    ]
