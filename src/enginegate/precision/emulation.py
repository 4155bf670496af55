"""FP16 or BF16 ONNX -> FP32 ONNX that rounds and overflows in the same places.

ONNX Runtime on a CPU computes most 16-bit nodes in FP32 and drops the casts between them, so a
model that overflows looks sound there (measured: relative error 0.0003 where ONNX's reference
evaluator gives 0.70), and it has no BF16 kernels. It keeps a Cast to 16 bits that is followed by a
Cast back. So every 16-bit tensor becomes FP32 and passes such a pair: the true range and rounding.
Products are summed in FP32, as tensor cores do. Peaks before each pair become outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from enginegate.errors import BuildError
from enginegate.precision.check_converted import with_opset
from enginegate.sources.onnx_form import graphs

# The largest finite value, and the smallest that rounds to infinity: half a step above it.
_HALVES: dict[int, tuple[float, float]] = {
    TensorProto.FLOAT16: (65504.0, 65520.0),
    TensorProto.BFLOAT16: ((2 - 2**-7) * 2.0**127, (2 - 2**-8) * 2.0**127),
}
_REDUCE_OPSET = 18  # from here ReduceMax without axes has one form
_PEAK = "enginegate.peak."


@dataclass(frozen=True, slots=True)
class Emulation:
    """A model that can be run anywhere, and where it is watched.

    Attributes:
        model: FP32, with the real model's inputs and outputs first.
        watched: extra output -> node of the 16-bit model whose result it is the peak magnitude of.
        finite_max: the largest finite value of the 16-bit type.
        overflows_at: the smallest magnitude that rounds to infinity.
    """

    model: ModelProto
    watched: dict[str, str]
    finite_max: float
    overflows_at: float


def emulation(converted: ModelProto, *, what: str) -> Emulation:
    """The emulation of a 16-bit model.

    Args:
        converted: the very model that is compiled; its inputs and outputs are FP32.
        what: the model, for messages.

    Raises:
        BuildError: it has control flow, or holds no 16-bit tensor.
    """
    if len(list(graphs(converted.graph))) > 1:
        raise BuildError(
            f"{what} has control flow (If, Loop or Scan), whose ranges are not emulated. Judge it "
            "on a GPU."
        )
    typed = onnx.shape_inference.infer_shapes(with_opset(converted, _REDUCE_OPSET, what=what))
    kinds = _halves(typed)
    if not kinds:
        raise BuildError(f"{what} computes nothing in 16 bits, so there is nothing to emulate.")
    watched: dict[str, str] = {}
    nodes = [part for node in typed.graph.node for part in _emulated(node, kinds, watched)]
    del typed.graph.node[:], typed.graph.value_info[:]
    typed.graph.node.extend(nodes)
    for tensor in typed.graph.initializer:
        _widen(tensor)
    typed.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in watched
    )
    finite_max, overflows_at = min(_HALVES[kind] for kind in set(kinds.values()))
    return Emulation(typed, watched, finite_max, overflows_at)


def _halves(model: ModelProto) -> dict[str, int]:
    """16-bit tensors by name."""
    graph = model.graph
    values: Iterator[ValueInfoProto] = iter((*graph.input, *graph.value_info, *graph.output))
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    return {name: kind for name, kind in kinds.items() if kind in _HALVES}


def _emulated(
    node: NodeProto, kinds: dict[str, int], watched: dict[str, str]
) -> Iterator[NodeProto]:
    """The node in FP32, then for each 16-bit output its peak and its pair of casts."""
    wide = NodeProto()
    wide.CopyFrom(node)
    for attribute in wide.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _widen(attribute.t)
        if attribute.name in {"to", "dtype"} and attribute.i in _HALVES:
            attribute.i = TensorProto.FLOAT
    narrow = [index for index, name in enumerate(node.output) if name in kinds]
    for index in narrow:
        wide.output[index] = f"{node.output[index]}.wide"
    yield wide
    for index in narrow:
        yield from _rounded(node, node.output[index], kinds[node.output[index]], watched)


def _rounded(node: NodeProto, name: str, kind: int, watched: dict[str, str]) -> Iterator[NodeProto]:
    peak = f"{_PEAK}{name}"
    watched[peak] = node.name or name
    yield helper.make_node("Abs", [f"{name}.wide"], [f"{name}.magnitude"])
    yield helper.make_node("ReduceMax", [f"{name}.magnitude"], [peak], keepdims=0)
    yield helper.make_node("Cast", [f"{name}.wide"], [f"{name}.narrow"], to=kind)
    yield helper.make_node("Cast", [f"{name}.narrow"], [name], to=TensorProto.FLOAT)


def _widen(tensor: TensorProto) -> None:
    if tensor.data_type in _HALVES:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
