"""What a vendor's tool raises becomes one error of this program; the machine's faults pass."""

import errno

import pytest

from enginegate.errors import DataError, TookTooLongError, ToolError, told_by, tool_errors


@pytest.mark.parametrize(
    "raised",
    [
        Exception("Incomplete symbolic shape inference"),
        IndexError("list index out of range"),
        FileNotFoundError(errno.ENOENT, "No such file", "optimised.onnx"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_becomes_one_error(raised):
    """Its kind and words stay, and what could not be done and what to do next are there."""
    with (
        pytest.raises(ToolError, match=r"^int8 cannot be made: ") as caught,
        tool_errors("int8 cannot be made", remedy="Drop int8."),
    ):
        raise raised

    assert caught.value.__cause__ is raised
    assert type(raised).__name__ in str(caught.value)
    assert str(raised) in str(caught.value)
    assert str(caught.value).endswith("\nDrop int8.")


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError(),
        KeyboardInterrupt(),
        OSError(errno.ENOSPC, "No space left on device"),
        DataError("calibration data does not fit"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_not_from_the_tool_pass_through(raised):
    """A lack of memory or space, an interruption and this program's own errors stay as they are."""
    with pytest.raises(type(raised)) as caught, tool_errors("int8 cannot be made"):
        raise raised

    assert caught.value is raised


def test_tool_timeout_fails_its_candidate_only():
    """It costs its own candidate, not the run; what to change stays in the message."""
    with (
        pytest.raises(ToolError, match=r"^int8 cannot be made: one run took 300 s"),
        tool_errors("int8 cannot be made"),
    ):
        raise TookTooLongError("one run took 300 s")


def test_text_is_cleaned_and_short():
    """No colours, no source lines of ONNX Runtime, one line, cut at a word."""
    text = (
        "\x1b[1;31m[ONNXRuntimeError] : 1 : FAIL : Load failed:"
        "/onnxruntime_src/onnxruntime/core/graph/model.cc:181 Unsupported\n\n  IR version\x1b[m "
    )

    told = told_by(RuntimeError(text + "word " * 500))

    assert told.startswith("RuntimeError: Load failed:Unsupported IR version word word")
    assert told.endswith("word …")
    assert len(told) < 450
