"""Which server serves a live repository: the policy's endpoint, else the one `serve` started.

A server that this program started leaves its addresses in a file in the repository's root, where
Triton ignores the file and every other command finds it. The server's process holds a lock beside
that file while it serves: a second server on the same repository is refused, because a promotion
would reach only one of the two, and the file of a killed server is known by its free lock.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from enginegate.atomic_io import file_lock, write_file
from enginegate.errors import InputError, ServerError
from enginegate.machine import runs
from enginegate.policy.operating import PromotionTarget
from enginegate.records import Record
from enginegate.triton.client import TritonClient
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server, ServerOptions, start
from enginegate.workspace import Workspace

_STATE = ".enginegate-server.json"
_LOCK = ".enginegate-server.lock"
# A command that asks whether the lock is free takes it for an instant.
_LOCK_TIMEOUT_S = 1.0
# A closed port is refused at once; a busy server takes its time.
_ANSWER_S = 10.0


class LiveAddresses(Record):
    """Where a live server listens."""

    grpc: str
    http: str | None = None
    pid: int | None = None
    metrics: str | None = None


def live_addresses(target: PromotionTarget) -> LiveAddresses | None:
    """Where the repository's server should be; None when not known. It may be dead."""
    if target.endpoint is not None:
        return LiveAddresses(grpc=target.endpoint, metrics=target.metrics)
    try:
        addresses = LiveAddresses.read(target.repository / _STATE)
    except InputError:
        return None
    # A server that was killed leaves its file behind, and its port may be another server's by now.
    gone = addresses.pid is not None and not runs(addresses.pid)
    return None if gone or not _is_served(target.repository) else addresses


def live_client(target: PromotionTarget) -> TritonClient | None:
    """A connection to the repository's server; None when none answers."""
    addresses = live_addresses(target)
    if addresses is None:
        return None
    with TritonClient(addresses.grpc, timeout_s=_ANSWER_S) as probe:
        if not probe.live():
            return None
    return TritonClient(addresses.grpc)


@contextmanager
def live_server(
    repository: Path,
    workspace: Workspace,
    options: ServerOptions | None = None,
    *,
    server_name: str = "",
) -> Iterator[Server]:
    """Run a server on a live repository for as long as the block runs; it starts empty.

    Args:
        repository: made if there is none.
        workspace: has the installed Triton, and keeps the log.
        options: ports, limits and further flags.
        server_name: in the policy's fleet, which has its address; empty: the server
            that other commands find by the file it leaves.

    Raises:
        ServerError: there is no Triton here, a port is taken, it did not start, or another server
            that was started here serves this repository.
    """
    repository.mkdir(parents=True, exist_ok=True)
    install = find_triton(workspace.root / "triton")
    folder = workspace.logs / "live" / repository.name
    if server_name:
        with start(install, repository, folder=folder / server_name, options=options) as server:
            yield server
        return
    with (
        _only_server(repository),
        start(install, repository, folder=folder, options=options) as server,
    ):
        addresses = LiveAddresses(
            grpc=server.grpc, http=server.http, pid=server.pid, metrics=server.metrics
        )
        write_file(repository / _STATE, addresses.pretty_json())
        try:
            yield server
        finally:
            (repository / _STATE).unlink(missing_ok=True)


@contextmanager
def _only_server(repository: Path) -> Iterator[None]:
    """Hold the lock of the server that the file in the repository describes.

    Raises:
        ServerError: another process holds it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(repository / _LOCK, timeout_s=_LOCK_TIMEOUT_S))
        except TimeoutError as error:
            addresses = live_addresses(PromotionTarget(repository=repository))
            where = f" at gRPC {addresses.grpc}" if addresses else ""
            raise ServerError(
                f"{repository} is served already{where} (by {str(error) or 'another process'}). "
                "A promotion would reach only one of two servers. Use that server, or stop it "
                "first (Ctrl-C where it runs). For a second server of the same repository, name "
                "its address in the policy (`fleet` under [target]), and start it on its port: "
                "docs/targets.md."
            ) from error
        yield


def _is_served(repository: Path) -> bool:
    """Whether a process that runs now is the server that the file describes."""
    try:
        handle = os.open(repository / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
