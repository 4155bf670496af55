"""What an error of torch.export means for whoever brought the model, in one message."""

import re

from enginegate.errors import DataError, ModelError

FAULTS = (RuntimeError, AssertionError, TypeError, ValueError, IndexError, NotImplementedError)
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_VIOLATED = re.compile(r"Constraints violated \(([^)]*)\)")
_REASON = re.compile(r"^ *- (.*)$", re.MULTILINE)


def explain_torch_error(error: Exception, origin: str, *, opset: int) -> ModelError | DataError:
    """The error to raise instead; names the operator, axis or shape that is in the way."""
    cause = error.__cause__ or error
    text = str(cause).strip()
    first_line = text.partition("\n")[0]
    operator = _OPERATOR.search(_chain(error))
    if operator:
        return ModelError(
            f"{origin} uses the operator {operator[1]}, which torch.onnx cannot write at opset "
            f"{opset}. Write that part of forward() with other operators."
        )
    if "Guard failed" in first_line and "size()[0]" not in first_line:
        return DataError(
            f"The data does not have the shape that {origin} was traced with: {first_line}. Give "
            "the samples that shape, or log the model again with such an input_example."
        )
    violated = _VIOLATED.search(text)
    if violated and "batch" not in violated[1].split(", "):
        return ModelError(
            f"{origin} does not take every size of {violated[1]}: {_reason(text)}\n"
            "Export the program with bounds, torch.export.Dim(NAME, min=.., max=..), or with "
            "that axis fixed."
        )
    if violated or "Guard failed" in first_line or "onstraint" in first_line:
        return ModelError(
            f"{origin} was logged for one batch size ({first_line}). Log it again with an "
            "input_example of two or more samples, so that its batch axis is dynamic."
        )
    return ModelError(
        f"{origin} cannot become ONNX: {type(cause).__name__}: {first_line}\n"
        "Every operation of forward() must be one that torch.export can trace."
    )


def _reason(text: str) -> str:
    """The last of torch's reasons is the plainest."""
    reasons = _REASON.findall(text)
    return reasons[-1] if reasons else text.partition("\n")[0]


def _chain(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)
