"""Records a sample of live requests through Triton's trace extension, then puts its settings back.

Tried on Triton 2.51: level, rate, count and log frequency can be set on a running server, for one
model; the file only when the server starts (server.py names one). Rate N records every Nth request.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from enginegate.errors import ModelError, ServerError
from enginegate.triton.client import TritonClient
from enginegate.triton.server import Server
from enginegate.triton.trace_file import UNREADABLE, Recording, read_traces

_FLUSH_EVERY = 32
_SETTLE_S = 0.2
_SETTLE_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Recorder:
    """A recording under way.

    Attributes:
        folder: where the server writes; its files hold what users sent.
    """

    folder: Path
    prefix: str
    model: str
    before: frozenset[Path]

    def read(self) -> Recording:
        """What was recorded; call it after the block. The server's files are deleted."""
        self._settle()
        files = self._files()
        recording = read_traces(files, self.model)
        self.discard()
        return recording

    def discard(self) -> None:
        """Delete what was recorded."""
        for file in self._files():
            file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        found = set(self.folder.glob(f"{self.prefix}*")) - self.before
        return sorted(found, key=lambda file: file.stat().st_mtime_ns)

    def _settle(self) -> None:
        """Wait for the server's last write: it comes after the answer it is about."""
        deadline = time.monotonic() + _SETTLE_LIMIT_S
        seen: list[tuple[Path, int]] = []
        while time.monotonic() < deadline:
            now = [(file, file.stat().st_size) for file in self._files()]
            if now and now == seen:
                return
            seen = now
            time.sleep(_SETTLE_S)


@contextmanager
def recorded(server: Server, model: str, *, one_in: int, max_requests: int) -> Iterator[Recorder]:
    """Record one request in ``one_in`` of a model, at most ``max_requests``, during the block.

    The trace settings are put back at the end, also when the block raises; then what was recorded
    is deleted.

    Raises:
        ServerError: the server was not started here (its files would be elsewhere), or does not
            answer.
        ModelError: the model has a tensor that Triton's traces cannot hold.
    """
    if server.trace_file is None:
        raise ServerError(
            f"Requests to {server.grpc} cannot be recorded: it writes traces on its own machine.\n"
            "Record there and name the sample in the policy: [data] shadow."
        )
    folder, prefix = server.trace_file.parent, server.trace_file.name
    with server.client() as client:
        _check_types(client, model)
        recorder = Recorder(folder, prefix, model, frozenset(folder.glob(f"{prefix}*")))
        try:
            with _tracing(client, model, one_in, max_requests):
                yield recorder
        except BaseException:
            recorder.discard()
            raise


@contextmanager
def _tracing(client: TritonClient, model: str, one_in: int, max_requests: int) -> Iterator[None]:
    wanted: dict[str, tuple[str, ...] | None] = {
        "trace_level": ("TIMESTAMPS", "TENSORS"),
        "trace_rate": (str(one_in),),
        "trace_count": (str(max_requests),),
        "log_frequency": (str(_FLUSH_EVERY),),
    }
    before, default = client.trace_settings(model), client.trace_settings()
    undo = {
        name: None if before.get(name) == default.get(name) else before.get(name) for name in wanted
    }
    try:
        client.set_trace(wanted, model)
        yield
    except BaseException:
        # The server may be what failed; its settings died with it.
        with suppress(ServerError):
            client.set_trace(undo, model)
        raise
    client.set_trace(undo, model)


def _check_types(client: TritonClient, model: str) -> None:
    config = client.config(model)
    bad = [str(spec) for spec in (*config.inputs, *config.outputs) if spec.dtype in UNREADABLE]
    if bad:
        raise ModelError(
            f"Requests to {model} cannot be recorded: Triton's traces cannot hold "
            f"{', '.join(bad)}.\nRecord a sample in front of the server and name it in the policy: "
            "[data] shadow."
        )
