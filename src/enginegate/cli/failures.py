"""The message for a failure that no part of this program expected: never a traceback.

Pure but for `keep_traceback`: which exception it was decides the sentence and the exit code.
"""

import errno
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from enginegate.errors import ExitCode
from enginegate.evidence import Outcome
from enginegate.messages import first_line
from enginegate.workspace import Workspace

EXIT_CODES = {
    Outcome.PASSED: ExitCode.OK,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Outcome.FAILED: ExitCode.GATES_FAILED,
    Outcome.ERRORED: ExitCode.COULD_NOT_FIND_OUT,
}
# By the package whose exception reaches us: who did not answer. They may not be imported here.
_SERVERS = {
    "httpx": "Prefect",
    "httpcore": "Prefect",
    "prefect": "Prefect",
    "mlflow": "MLflow",
    "sqlalchemy": "the database of MLflow or Prefect",
    "aiosqlite": "the database of MLflow or Prefect",
}
_MOST_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Failure:
    """How a failure is reported.

    Attributes:
        kind: in two or three words.
        message: what happened, the evidence, and what to do.
        exit_code: of the command.
        our_fault: whether its traceback is worth keeping.
    """

    kind: str
    message: str
    exit_code: ExitCode
    our_fault: bool = True


def failure_of(error: BaseException) -> Failure:
    """The message and exit code for an exception that nobody caught."""
    chain = tuple(_chain(error))
    for each in chain:
        if isinstance(each, OSError) and each.errno in _REMEDIES:
            return _of_system(each, _REMEDIES[each.errno])
        if isinstance(each, MemoryError):
            message = (
                f"There is not enough memory: {_first_line(each) or 'no more could be had'}.\n"
                "Stop what else runs here, use a smaller model or batch, or a larger machine."
            )
            return Failure("Could not find out", message, ExitCode.COULD_NOT_FIND_OUT)
    full = next((each for each in chain if "database or disk is full" in str(each)), None)
    if full is not None:
        return _of_system(OSError(errno.ENOSPC, "No space left on device"), _no_space)
    if isinstance(error, OSError):
        message = f"{_place(error)}: {error.strerror or str(error) or type(error).__name__}."
        return Failure("Could not find out", message, ExitCode.COULD_NOT_FIND_OUT)
    server = _SERVERS.get(type(error).__module__.partition(".")[0])
    if server is not None or _is_prefect_away(error):
        message = (
            f"{server or 'Prefect'} did not do what it was asked: {type(error).__name__}: "
            f"{_first_line(error)}\n"
            "What was finished is kept. See that it runs and can be reached (PREFECT_API_URL, "
            "MLFLOW_TRACKING_URI), then run the command again."
        )
        return Failure("Could not find out", message, ExitCode.COULD_NOT_FIND_OUT)
    message = f"{type(error).__name__}: {_first_line(error)}"
    return Failure("A fault in this program", message, ExitCode.CRASH)


def keep_traceback(error: BaseException) -> Path | None:
    """Write the whole traceback into the workspace's logs, else into a temporary file.

    Returns:
        The file, readable by its owner only; None where nothing can be written.
    """
    text = "".join(traceback.format_exception(error))
    name = f"crash-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    places: tuple[Callable[[], Path], ...] = (
        lambda: Workspace.here().logs,
        lambda: Path(tempfile.gettempdir()),
    )
    for place in places:
        try:
            folder = place()  # without a current folder, which may be deleted, there is none here
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / name
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(text)
        except OSError:
            continue
        return path
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that led to it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _of_system(error: OSError, remedy: Callable[[OSError], str]) -> Failure:
    message = f"{_place(error)}: {error.strerror}.\n{remedy(error)}"
    return Failure("Could not find out", message, ExitCode.COULD_NOT_FIND_OUT, our_fault=False)


def _place(error: OSError) -> str:
    named = [str(name) for name in (error.filename, error.filename2) if name not in {None, ""}]
    return " -> ".join(named) or "A file or a pipe"


def _not_allowed(error: OSError) -> str:
    who = f"uid {os.getuid()}"
    return (
        f"This process ({who}) may not do that there. Run it as the owner of {_place(error)}, or "
        "give this user the right (chown, chmod); the live repository and the workspace need "
        "reading and writing."
    )


def _no_space(error: OSError) -> str:
    places = {Workspace.here().root, Path(tempfile.gettempdir())}
    if error.filename:
        places.add(Path(os.fsdecode(error.filename)).parent)
    free = "; ".join(f"{place}: {_free(place)}" for place in sorted(places))
    return (
        f"Free space ({free}). Make room: {Workspace.here().root / 'store'} may be deleted, it is "
        "made again. What was finished is kept; run the command again."
    )


def _free(place: Path) -> str:
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return f"{shutil.disk_usage(place).free / (1 << 20):,.0f} MiB free"
    except OSError as error:
        return str(error.strerror)


def _read_only(_error: OSError) -> str:
    return (
        "That file system is mounted read-only. Mount it for writing, or name other folders: "
        "[target] repository in the policy, ENGINEGATE_HOME for the workspace, TMPDIR."
    )


def _too_many(_error: OSError) -> str:
    return "Raise the limit on open files (ulimit -n) and run the command again."


def _broken_disk(_error: OSError) -> str:
    return "The disk or the network file system failed; see the system's log (dmesg)."


_REMEDIES: dict[int, Callable[[OSError], str]] = {
    errno.EACCES: _not_allowed,
    errno.EPERM: _not_allowed,
    errno.ENOSPC: _no_space,
    errno.EDQUOT: _no_space,
    errno.EROFS: _read_only,
    errno.EMFILE: _too_many,
    errno.ENFILE: _too_many,
    errno.EIO: _broken_disk,
    errno.ESTALE: _broken_disk,
}


def _is_prefect_away(error: BaseException) -> bool:
    """Prefect says this with Python's own exception, and only by its words."""
    return isinstance(error, RuntimeError) and (
        "Failed to reach API at" in str(error) or "ephemeral Prefect API server" in str(error)
    )


def _first_line(error: BaseException) -> str:
    return first_line(error)[:_MOST_CHARACTERS]
