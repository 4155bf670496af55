"""What this machine is: processor, GPU and driver. A measurement holds for one machine."""

import getpass
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from enginegate.atomic_io import file_lock
from enginegate.errors import ServerError

LAST_PORT = 65_535
_QUERY = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
_TIMEOUT_S = 20.0
# The longest benchmark of one candidate that a policy usually allows takes minutes.
_WAIT_FOR_MACHINE_S = 3600.0


def user_at_host() -> str:
    """Who runs this program, and where; a user id without a name is given as it is."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


@cache
def processor() -> str:
    """Count and name of the processors, e.g. as /proc/cpuinfo has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


@cache
def gpus() -> str:
    """Name, driver and memory of each GPU, as nvidia-smi has them; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        asked = subprocess.run(  # noqa: S603 - the tool is found on PATH, the arguments are ours
            [tool, *_QUERY], capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in asked.stdout.splitlines() if line.strip())


def free_memory() -> int | None:
    """Bytes of memory that this process may still take: of the machine, or of its container."""
    free = _number("/proc/meminfo", "MemAvailable:")
    known = [] if free is None else [free * 1024]
    group = Path("/sys/fs/cgroup")
    most, used = _number(group / "memory.max"), _number(group / "memory.current")
    # What a container's files take of its memory is given back when it is needed.
    cached = _number(group / "memory.stat", "inactive_file") or 0
    if most is not None and used is not None:
        known.append(max(0, most - used + cached))
    return min(known, default=None)


def _number(path: Path | str, word: str = "") -> int | None:
    """The number after a word, or the whole content; None where there is none."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
        parts = next(line for line in lines if not word or line[0] == word)
        return int(parts[1 if word else 0])
    except (OSError, StopIteration, IndexError, ValueError):
        return None


def runs(pid: int) -> bool:
    """Whether a process with this number runs on this machine, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def measuring_lock(root: Path) -> Iterator[None]:
    """One measurement at a time: two on one machine would measure each other.

    Args:
        root: of the workspace.

    Raises:
        ServerError: another measurement had the machine for an hour.
    """
    with ExitStack() as stack:
        try:
            lock = file_lock(root / ".measuring.lock", timeout_s=_WAIT_FOR_MACHINE_S)
            stack.enter_context(lock)
        except TimeoutError as error:
            raise ServerError(
                f"Another benchmark ({error}) has used this machine for an hour. Stop it, or wait."
            ) from error
        yield
