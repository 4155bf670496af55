"""What must hold of an FP32 model before it is converted."""

from typing import NoReturn

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from enginegate.errors import ModelError
from enginegate.messages import counted
from enginegate.sources.onnx_form import graphs, tensors

_REAL = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})
_OF_ONNXRUNTIME = frozenset({"com.microsoft"})  # ONNX has no schemas of these


def check_convertible(model: ModelProto, *, origin: str) -> None:
    """Refuse what no converter can handle, by name.

    Raises:
        ModelError: an operator is not in the model's operator set, or a weight is NaN.
    """
    _check_operators(model, origin)
    _check_weights(model, origin)


def _check_operators(model: ModelProto, origin: str) -> None:
    versions = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    own = {(function.domain, function.name) for function in model.functions}
    for graph in graphs(model.graph):
        for node in graph.node:
            known = node.domain in _OF_ONNXRUNTIME or (node.domain, node.op_type) in own
            version = versions.get(node.domain or "ai.onnx", 0)
            domain = "" if node.domain == "ai.onnx" else node.domain
            if not known and not onnx.defs.has(node.op_type, version, domain):
                _refuse(node, version, origin)


def _refuse(node: NodeProto, version: int, origin: str) -> NoReturn:
    domain = node.domain or "ai.onnx"
    place = f"node {node.name!r}" if node.name else f"the node that makes {node.output[0]!r}"
    raise ModelError(
        f"{origin}: {place} is {node.op_type} of {domain} opset {version}, which has no such "
        "operator. Export the model at another opset, or write that part of it with standard "
        "operators: runtimes here have no kernel for it."
    )


def _check_weights(model: ModelProto, origin: str) -> None:
    """No precision can hold NaN. Infinity is let through: an attention mask may hold it."""
    for tensor in tensors(model.graph):
        if tensor.data_type not in _REAL:
            continue
        bad = np.isnan(numpy_helper.to_array(tensor))
        if bad.any():
            first = tuple(int(axis[0]) for axis in np.nonzero(np.atleast_1d(bad)))
            raise ModelError(
                f"{origin}: weight {tensor.name!r} holds "
                f"{counted(int(bad.sum()), 'NaN value')}, first at "
                f"{first}. Training diverged or the file is damaged; register a sound version."
            )
