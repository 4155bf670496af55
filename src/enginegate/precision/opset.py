"""An ONNX model at an earlier operator set, for runtimes that stop at one; checked by running both.

ONNX converts downwards operator by operator. Operators that are newer than the set (Gelu, for
example) are first written out as the functions that define them. Nothing is trusted: the result
must be valid, and answer like the original on ONNX Runtime.
"""

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, inliner

from enginegate.candidate import TensorSpec
from enginegate.data import Array, Tensors
from enginegate.errors import BuildError, told_by, tool_errors
from enginegate.precision.deadline import run_in_time
from enginegate.precision.session import open_cpu_session
from enginegate.sources.onnx_form import graphs, input_specs, opset

_IR_OF_OPSET = {17: 8}  # what ONNX itself pairs them with; older parsers check it
_TOLERANCE = 1e-4  # of the outputs' largest magnitude: rewritten functions round in another order
_ROWS, _FREE_AXIS = 2, 8
_VERSIONLESS_DOMAINS = frozenset({"", "ai.onnx"})


def lowered(
    model: ModelProto,
    version: int,
    *,
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
    rewrite: Callable[[ModelProto], ModelProto] = lambda given: given,
) -> ModelProto:
    """The model at this operator set, or as it is where nothing has to be changed.

    Args:
        what: names the model in messages.
        shapes: of inputs with dynamic axes, that both models are run at.
        rewrite: what else a runtime needs; gives the very model that it was given if nothing.

    Raises:
        BuildError: it cannot be had there, or would not answer like the original.
    """
    if opset(model) <= version and rewrite(model) is model:
        return model
    try:
        found = rewrite(_converted(model, version))
        onnx.checker.check_model(found, full_check=True)
    except Exception as error:
        raise BuildError(
            f"{what} uses ONNX opset {opset(model)}, and it cannot be written at opset {version}: "
            f"{told_by(error)}\nExport the model at opset {version}, or build with a TensorRT that "
            "takes later ones (10 and later)."
        ) from error
    _check_same(model, found, what=what, shapes=shapes)
    return found


def _converted(model: ModelProto, version: int) -> ModelProto:
    if opset(model) <= version:
        return model
    inlined = model
    newer = _newer_functions(model, version)
    if newer:
        functions = [("", name) for name in sorted(newer)]
        inlined = inliner.inline_selected_functions(
            model, functions, exclude=False, inline_schema_functions=True
        )
        inlined = _with_casts(inlined)
    found: ModelProto = onnx.version_converter.convert_version(inlined, version)
    for graph in graphs(found.graph):
        for node in graph.node:
            _drop_unknown_defaults(node, version)
    found.ir_version = _IR_OF_OPSET.get(version, found.ir_version)
    return found


def _newer_functions(model: ModelProto, version: int) -> set[str]:
    """Standard operators that came after this set."""
    names = {
        node.op_type
        for graph in graphs(model.graph)
        for node in graph.node
        if node.domain in _VERSIONLESS_DOMAINS
    }
    return {name for name in names if not _exists(name, version)}


def _exists(name: str, version: int) -> bool:
    try:
        onnx.defs.get_schema(name, version)
    except onnx.defs.SchemaError:
        return False
    return True


def _with_casts(model: ModelProto) -> ModelProto:
    """Without CastLike, which definitions use and TensorRT's parsers lack."""
    typed = onnx.shape_inference.infer_shapes(model)
    for graph in graphs(typed.graph):
        known = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input)}
        known |= {each.name: each.data_type for each in graph.initializer}
        for node in graph.node:
            if node.op_type == "CastLike":
                to = known.get(node.input[1], TensorProto.FLOAT)
                node.op_type = "Cast"
                del node.input[1]
                node.attribute.append(helper.make_attribute("to", to))
    return typed


def _drop_unknown_defaults(node: NodeProto, version: int) -> None:
    """Remove attributes that came later and say only what was always so.

    ONNX's converter leaves some in place; the checker refuses one that says anything else.
    """
    if node.domain not in _VERSIONLESS_DOMAINS:
        return
    known = onnx.defs.get_schema(node.op_type, version).attributes
    latest = onnx.defs.get_schema(node.op_type).attributes
    for attribute in list(node.attribute):
        if attribute.name in known or attribute.name not in latest:
            continue
        default = latest[attribute.name].default_value
        if helper.get_attribute_value(attribute) == helper.get_attribute_value(default):
            node.attribute.remove(attribute)


def _check_same(
    model: ModelProto, found: ModelProto, *, what: str, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    inputs = {spec.name: _example(spec, shapes.get(spec.name)) for spec in input_specs(model)}
    was, now = (_outputs(each, inputs, what=what) for each in (model, found))
    for name, exact in was.items():
        far = _largest_difference(exact, now[name])
        if not far <= _TOLERANCE:
            raise BuildError(
                f"{what} answers differently at opset {opset(found)} than at opset "
                f"{opset(model)}: output {name!r} by {far:.2g} of its largest value, and at most "
                f"{_TOLERANCE:g} is rounding. Export the model at opset {opset(found)}."
            )


def _outputs(model: ModelProto, inputs: Tensors, *, what: str) -> Tensors:
    session = open_cpu_session(model.SerializeToString(), what=what)
    names = [output.name for output in session.get_outputs()]
    with tool_errors(f"{what} cannot be compared with its form at another opset"):
        return dict(zip(names, run_in_time(session, names, inputs), strict=True))


def _largest_difference(exact: Array, found: Array) -> float:
    """Largest difference over the largest magnitude; infinite where only one is finite."""
    if exact.shape != found.shape or exact.dtype != found.dtype:
        return float("inf")
    if exact.dtype.kind != "f":
        return 0.0 if np.array_equal(exact, found) else float("inf")
    if not np.array_equal(np.isfinite(exact), np.isfinite(found)):
        return float("inf")
    finite = np.isfinite(exact)
    scale = float(np.abs(exact[finite]).max(initial=0.0)) or 1.0
    difference = np.abs(exact[finite].astype(np.float64) - found[finite].astype(np.float64))
    return float(difference.max(initial=0.0)) / scale


def _example(spec: TensorSpec, shape: tuple[int, ...] | None) -> Array:
    """Inputs that every model of such a signature takes: integers may be indices, so 0 and 1."""
    sizes = [_ROWS, *(size if size > 0 else _FREE_AXIS for size in spec.shape[1:])]
    if shape is not None:
        sizes[1:] = shape[1:]
    if spec.shape and spec.shape[0] > 0:
        sizes[0] = spec.shape[0]
    draw = np.random.default_rng(0)
    if np.dtype(spec.dtype).kind == "f":
        return draw.standard_normal(sizes).astype(spec.dtype)
    return draw.integers(0, 2, sizes).astype(spec.dtype)
