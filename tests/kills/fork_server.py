"""Processes that are made to be killed: forked from one that has imported everything already.

Run as a script it is that one: it takes pickled jobs from standard input, forks for each, and says
when the child began and how it ended. A fork of it holds nothing of the parent's.
"""

import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended.

    Attributes:
        killed: by SIGKILL; else it came to its end.
        account: what it had to tell, pickled; empty if it was killed.
        lasted_s: from its start.
    """

    killed: bool
    account: bytes
    lasted_s: float


class ForkServer:
    """The forking process, for as long as the block runs."""

    def __init__(self, folder: Path) -> None:
        """Children leave their accounts and complaints in ``folder``."""
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kills.fork_server", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.communicate()

    def run(self, job: bytes, *, kill_after_s: float | None = None) -> Ended:
        """Let a child do a pickled job; kill it then, if it has not come to its end.

        Raises:
            RuntimeError: the child failed by itself; shows its traceback.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("The fork server is not open.")
        process.stdin.write(_LENGTH.pack(len(job)) + job)
        process.stdin.flush()
        pid, began_s = int(process.stdout.readline()), time.perf_counter()
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(
                pid, signal.SIGKILL
            )  # The fork server reaps it after this, so it is no other's.
            process.stdin.write(b"k")
        else:
            process.stdin.write(b"-")
        process.stdin.flush()
        status = int(process.stdout.readline())
        lasted_s = time.perf_counter() - began_s
        account = self._folder / "account"
        if status == -signal.SIGKILL:
            return Ended(killed=True, account=b"", lasted_s=lasted_s)
        if status != 0:
            raise RuntimeError((self._folder / "complaint").read_text())
        return Ended(killed=False, account=account.read_bytes(), lasted_s=lasted_s)


def main(folder: Path) -> None:
    """Fork for every job until standard input ends."""
    from enginegate.triton.codec import vendor
    from enginegate.triton.config import config_json, read_config
    from tests.kills.job import perform

    vendor()
    config_json(read_config("", "nothing"))  # Imports what a configuration needs.
    while head := sys.stdin.buffer.read(_LENGTH.size):
        job = pickle.loads(sys.stdin.buffer.read(_LENGTH.unpack(head)[0]))  # noqa: S301
        pid = os.fork()
        if pid == 0:
            _child(folder, lambda: pickle.dumps(perform(job)))  # noqa: B023 - used at once
        print(pid, flush=True)  # noqa: T201 - the answer
        sys.stdin.buffer.read(1)  # Whoever kills has killed by now.
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


def _child(folder: Path, work: Callable[[], bytes]) -> None:
    for path in ("account", "complaint"):
        (folder / path).unlink(missing_ok=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    code = 1
    try:
        (folder / "account").write_bytes(work())
        code = 0
    except BaseException:  # noqa: BLE001 - a child never returns
        (folder / "complaint").write_text(traceback.format_exc())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
