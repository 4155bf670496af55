"""Shapes and types of every tensor, which ONNX Runtime's quantiser needs.

Its symbolic inference cannot follow some models that are perfectly valid: masks of encoders as
transformers exports them, operators of ``ai.onnx.ml``. ONNX's own inference, which runs after it in
any case, is enough to quantise those; where it knows no operator, ONNX Runtime itself is asked.
"""

import logging

import onnx
from onnx import ModelProto, TensorProto, helper

from enginegate.errors import BuildError, told_by
from enginegate.precision.session import open_session

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


def with_symbolic_shapes(model: ModelProto) -> tuple[ModelProto, str]:
    """The model with what symbolic inference found, and why it found nothing (empty if it did).

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
    session = open_session(asked.SerializeToString(), what=what, optimised=False)
    found = {output.name: _TYPES.get(output.type) for output in session.get_outputs()}
    for name in untyped:
        kind = found[name]
        if kind is not None:
            graph.value_info.append(helper.make_tensor_value_info(name, kind, None))
    return model
