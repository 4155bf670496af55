"""What a vendor's tool raises, as one error of this program with one short message.

Converters and runtimes raise whatever they like, bare ``Exception`` included, and their texts hold
colours, source lines of their own and whole graphs.
"""

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from enginegate.errors import EnginegateError, TookTooLongError, ToolError

_log = logging.getLogger("enginegate.tools")
_SHOWN_CHARACTERS = 400
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ORIGIN = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+:\d+ ")
# Of this machine, not of the model: every other candidate would meet them too.
_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EACCES}
)


@contextmanager
def tool_errors(what: str, *, remedy: str = "") -> Iterator[None]:
    """Turn any exception of a vendor's tool into a ToolError; the traceback goes to the log.

    This program's own errors, a lack of memory, and a disk that is full or may not be written pass
    as they are; a tool whose time was over is one that raised.

    Args:
        what: what could not be done, e.g. ``ONNX Runtime cannot quantise model.onnx``.
        remedy: what to do next, one sentence; empty if nothing is known.

    Raises:
        ToolError: the tool raised; the message begins with ``what``.
    """
    try:
        yield
    except TookTooLongError as error:
        raise ToolError(f"{what}: {error}") from error
    except (EnginegateError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            raise
        _log.debug("%s", what, exc_info=error)
        text = f"{what}: {told_by(error)}"
        raise ToolError(f"{text}\n{remedy}" if remedy else text) from error


def told_by(error: BaseException) -> str:
    """Type and message of a tool's exception on one line of at most about 400 characters."""
    text = _ORIGIN.sub("", _COLOURS.sub("", str(error)))
    lines = (" ".join(line.split()) for line in text.splitlines())
    words = " ".join(line for line in lines if line)
    if len(words) > _SHOWN_CHARACTERS:
        words = f"{words[:_SHOWN_CHARACTERS].rsplit(' ', 1)[0]} …"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
