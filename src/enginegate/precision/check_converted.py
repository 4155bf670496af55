"""What every converted model must be, whichever tool made it."""

import onnx
from onnx import ModelProto

from enginegate.errors import BuildError, tool_errors
from enginegate.sources.onnx_form import canonical, opset


def well_formed(model: ModelProto, *, what: str) -> ModelProto:
    """The model with its nodes in order, without notes, and valid by ONNX's own checker.

    Args:
        what: the model and precision, for the message.

    Raises:
        BuildError: the tool made a graph that contradicts its own types.
    """
    from onnxruntime.quantization.onnx_model import (  # type: ignore[import-untyped]  # noqa: PLC0415
        ONNXModel,
    )

    sortable = ONNXModel(model)
    sortable.topological_sort()
    clean = canonical(sortable.model)
    try:
        onnx.checker.check_model(clean, full_check=True)
        onnx.shape_inference.infer_shapes(clean, check_type=True, strict_mode=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        raise BuildError(
            f"{what} is not valid ONNX: {str(error).strip()}\n"
            "Drop that precision from [candidates], or keep that operation out of the model."
        ) from error
    return clean


def with_opset(model: ModelProto, version: int, *, what: str) -> ModelProto:
    """The model at this operator set or a later one.

    Raises:
        ToolError: ONNX cannot raise it.
    """
    if opset(model) >= version:
        return model
    with tool_errors(
        f"{what} needs opset {version}, the model uses {opset(model)}, and ONNX cannot raise it",
        remedy=f"Export the model at opset {version}.",
    ):
        return onnx.version_converter.convert_version(model, version)
