"""Which server serves a live repository: the policy's endpoint, else the one `serve` started.

A server that this program started leaves its addresses in a file in the repository's root, where
Triton ignores it, so that every command run beside it finds it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from enginegate.canonical import Record
from enginegate.durable import write_file
from enginegate.errors import InputError
from enginegate.machine import runs
from enginegate.operating import Target
from enginegate.triton.client import TritonClient
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server, ServerOptions, start
from enginegate.workspace import Workspace

_STATE = ".enginegate-server.json"
# A port that is closed says so at once; a server that is busy takes its time.
_ANSWER_S = 10.0


class LiveAddresses(Record):
    """Where a live server listens."""

    grpc: str
    http: str | None = None
    pid: int | None = None
    metrics: str | None = None


def live_addresses(target: Target) -> LiveAddresses | None:
    """Where the repository's server should be; None when nobody said. It may be dead."""
    if target.endpoint is not None:
        return LiveAddresses(grpc=target.endpoint, metrics=target.metrics)
    try:
        addresses = LiveAddresses.read(target.repository / _STATE)
    except InputError:
        return None
    # A server that was killed leaves its file behind, and its port may be another server's by now.
    return addresses if addresses.pid is None or runs(addresses.pid) else None


def live_client(target: Target) -> TritonClient | None:
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
    repository: Path, workspace: Workspace, options: ServerOptions | None = None
) -> Iterator[Server]:
    """Run a server on a live repository for as long as the block runs; it starts empty.

    Raises:
        ServerError: there is no Triton here, a port is taken, or it did not start.
    """
    repository.mkdir(parents=True, exist_ok=True)
    install = find_triton(workspace.root / "triton")
    folder = workspace.logs / "live" / repository.name
    with start(install, repository, folder=folder, options=options) as server:
        state = repository / _STATE
        addresses = LiveAddresses(
            grpc=server.grpc, http=server.http, pid=server.pid, metrics=server.metrics
        )
        write_file(state, addresses.pretty_json())
        try:
            yield server
        finally:
            # By now it may be of another server, that was started on this repository later.
            with suppress(InputError):
                if LiveAddresses.read(state) == addresses:
                    state.unlink(missing_ok=True)
