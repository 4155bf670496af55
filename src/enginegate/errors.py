"""Every error this program raises on purpose.

::

    EnginegateError               exit code 5: the pipeline could not find out
    ├── InputError                exit code 6: something the user gave is wrong
    │   ├── PolicyError           a policy file
    │   ├── ModelError            a registered model, an ONNX file, an engine asked for
    │   │   └── TookTooLongError  opening a model, or one run of it, was given up
    │   └── DataError             evaluation, calibration or shadow data
    ├── BuildError                an engine could not be built
    │   └── ToolError             a vendor's tool broke, so whether it can be built is not known
    ├── ServerError               a Triton server is missing, dead, or will not load a model
    │   └── NotLoadedError        a server that was there did not load a model
    ├── RepositoryError           the live repository cannot be changed, or is not what it should be
    │   ├── RepositoryBusyError   another promotion holds the lock
    │   ├── NotWritableError      it may be read here, and not changed
    │   ├── NoReleaseError        there is no release with that number
    │   ├── RollbackTargetError   exit code 6: a release that somebody named for a rollback is unfit
    │   ├── NotEverywhereError    a release is live, but not on every server of the fleet
    │   ├── TamperedError         bytes on disk differ from the digest that was approved
    │   └── PublishError          a release was published, did not prove itself, and was undone
    ├── TrackingError             MLflow cannot be reached or refuses
    ├── PromiseBrokenError        exit code 3: a live release fell short (watching.py)
    └── ApprovalError             exit code 7: no valid approval binds to this scorecard
        └── RejectedError         a person said no, and nobody changed that since

A candidate that is not good enough is never an error: it is a `Finding`. An error means that the
pipeline could not find out. Each message says what happened, the evidence, and what to do next.

Converters and runtimes raise whatever they like, bare ``Exception`` included, and their texts hold
colours, source lines of their own and whole graphs: `tool_errors` makes one short message of them.
"""

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """What the ``enginegate`` command's exit status means."""

    OK = 0
    CRASH = 1
    USAGE = 2
    GATES_FAILED = 3
    INCONCLUSIVE = 4
    COULD_NOT_FIND_OUT = 5
    BAD_INPUT = 6
    NOT_APPROVED = 7
    INTERRUPTED = 130


class EnginegateError(Exception):
    """The pipeline could not find out; the message says why and what to do next."""

    exit_code: ClassVar[ExitCode] = ExitCode.COULD_NOT_FIND_OUT


class InputError(EnginegateError):
    """Something the user gave is wrong."""

    exit_code = ExitCode.BAD_INPUT


class PolicyError(InputError):
    """A policy file cannot be read, or asks for something that cannot be."""


class ModelError(InputError):
    """A registered model, an ONNX file or an engine is missing, corrupt or refused."""


class TookTooLongError(ModelError):
    """Opening a model, or one run of it, was given up when its time was over."""


class DataError(InputError):
    """Evaluation, calibration or shadow data is missing, malformed or does not fit the model."""


class BuildError(EnginegateError):
    """An engine could not be built; nothing half-written is left."""


class ToolError(BuildError):
    """A vendor's tool raised something, so whether the engine can be built is not known."""


class ServerError(EnginegateError):
    """A Triton server is missing, dead, or will not load a model."""


class NotLoadedError(ServerError):
    """A server that was there did not load a model in the configuration asked for."""


class RepositoryError(EnginegateError):
    """The live repository cannot be changed, or is not what it should be."""


class RepositoryBusyError(RepositoryError):
    """Another promotion holds the repository's lock."""


class NotWritableError(RepositoryError):
    """The live repository may be read from here, and not written to."""


class NoReleaseError(RepositoryError):
    """No release of that model has that number."""


class RollbackTargetError(RepositoryError):
    """The release that somebody named for a rollback is live already, or cannot be live again."""

    exit_code = ExitCode.BAD_INPUT


class NotEverywhereError(RepositoryError):
    """What was asked for is live, proved and stays; the message names servers not brought to it."""


class TamperedError(RepositoryError):
    """Bytes on disk differ from the digest that was validated or approved."""


class PublishError(RepositoryError):
    """A release did not prove itself after loading; the previous release was restored."""


class TrackingError(EnginegateError):
    """MLflow cannot be reached, or refuses what was asked."""


class ApprovalError(EnginegateError):
    """No valid approval binds to this scorecard."""

    exit_code = ExitCode.NOT_APPROVED


class RejectedError(ApprovalError):
    """A person rejected the scorecard, and no later approval changes that."""


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
