"""The one door to a Triton server. Control calls go through gRPC only.

Over HTTP a load stalls every HTTP inference until it has finished (Triton runs it on the worker
that serves the connection). A success status does not prove which version serves: ask the index and
send a probe.
"""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from enginegate.data import Tensors
from enginegate.errors import ServerError
from enginegate.triton.codec import channel_options, fill_request, reply_of, vendor
from enginegate.triton.config import Config, config_json, received
from enginegate.triton.types import IndexRow, Reply, ServerMetadata, Statistics

_LOAD_TIMEOUT_S = 120.0
_COUNTED_WITHIN_S, _STILL_WITHIN_S, _COUNTED_POLL_S = 5.0, 0.5, 0.01
_REMEDIES = {
    "UNAVAILABLE": "Check that the server runs at this address (its log says why it stopped) and "
    "that this model version is ready in its index.",
    "DEADLINE_EXCEEDED": "The server may still be working on it: a deadline does not stop a load. "
    "Ask its index before concluding anything; if nothing moves, restart it.",
    "NOT_FOUND": "Load the model first; the server's index lists what is ready.",
    "INVALID_ARGUMENT": "Compare names, types and shapes with the model's configuration; the "
    "server's log says more.",
    "INTERNAL": "The server's log says why: most often a folder or config.pbtxt is missing, does "
    "not parse, or names another model.",
    "UNIMPLEMENTED": "This server cannot do that, or was started without it.",
}


class SharedRegion(NamedTuple):
    """Memory that a server on this machine can read; on a GPU if it has a handle.

    Attributes:
        name: requests name the region by it; also the key of system memory.
        size: bytes.
        handle: CUDA's handle of it.
        device: the GPU's number.
    """

    name: str
    size: int
    handle: bytes | None = None
    device: int = 0

    @property
    def kind(self) -> Literal["System", "Cuda"]:
        """The word in the names of Triton's calls for such memory."""
        return "System" if self.handle is None else "Cuda"


class TritonClient:
    """A connection to one server. Every call has a deadline; every failure is a `ServerError`.

    Safe to share between threads.
    """

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        """Connect lazily to ``HOST:PORT``; ``timeout_s`` limits every call but load and unload."""
        library = vendor()
        self.address = address
        self._timeout_s = timeout_s
        self._messages = library.messages
        self._error = library.grpc.RpcError
        self._channel = library.grpc.insecure_channel(address, options=channel_options(address))
        self._stub = library.stubs.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; no call may follow."""
        self._channel.close()

    def live(self) -> bool:
        """Whether the server answers at all."""
        return self._yes("ServerLive", "live")

    def ready(self) -> bool:
        """Whether the server takes requests. Says nothing about any one model."""
        return self._yes("ServerReady", "ready")

    def model_ready(self, model: str, version: str = "") -> bool:
        """Whether a model (a version of it, if given) answers requests."""
        return self._yes("ModelReady", "ready", name=model, version=version)

    def metadata(self) -> ServerMetadata:
        """The server's name and version, e.g. 2.51.0."""
        reply = self._call("ServerMetadata", "name itself")
        return ServerMetadata(reply.name, reply.version, tuple(reply.extensions))

    def load(
        self,
        model: str,
        config: Config | None = None,
        *,
        files: Mapping[str, bytes] | None = None,
        timeout_s: float = _LOAD_TIMEOUT_S,
    ) -> None:
        """Load or reload a model; returns when the new version answers, or raises.

        With a configuration the load always happens. Without one Triton answers "done" and does
        nothing when it believes that the files have not changed (it compares times, not content).
        With files (``VERSION/NAME`` -> content) it loads those instead of any folder.

        Raises:
            ServerError: the model did not load; what served before still serves. After a deadline
                it may still load later.
        """
        request = self._messages.RepositoryModelLoadRequest(model_name=model)
        if config is not None:
            request.parameters["config"].string_param = config_json(config)
        for path, content in (files or {}).items():
            request.parameters[f"file:{path}"].bytes_param = content
        self._send("RepositoryModelLoad", request, f"load {model}", timeout_s)

    def unload(self, model: str, *, timeout_s: float = _LOAD_TIMEOUT_S) -> None:
        """Unload every version; returns at once, in-flight requests finish afterwards."""
        request = self._messages.RepositoryModelUnloadRequest(model_name=model)
        self._send("RepositoryModelUnload", request, f"unload {model}", timeout_s)

    def index(self) -> tuple[IndexRow, ...]:
        """Every model and version the server knows."""
        reply = self._call("RepositoryIndex", "list its repository")
        return tuple(
            IndexRow(row.name, int(row.version or 0), row.state, row.reason) for row in reply.models
        )

    def config(self, model: str, version: str = "") -> Config:
        """The configuration that is in force, with Triton's own defaults filled in."""
        reply = self._call(
            "ModelConfig", f"show the configuration of {model}", name=model, version=version
        )
        return received(reply.config)

    def parameters(self, model: str, version: str = "") -> dict[str, str]:
        """The string parameters of the configuration that is in force."""
        return self.config(model, version).parameters

    def infer(
        self, model: str, inputs: Tensors, *, version: str = "", timeout_s: float | None = None
    ) -> Reply:
        """Ask for one batch; all outputs come back.

        Raises:
            ServerError: no answer in time, or the server refused.
        """
        request = self._messages.ModelInferRequest(model_name=model, model_version=version)
        fill_request(request, inputs)
        answer = self._send("ModelInfer", request, f"answer for {model}", timeout_s)
        return reply_of(answer)

    def statistics(self, model: str, version: str = "") -> Statistics:
        """Counters since the model was loaded, over all its versions unless one is given."""
        reply = self._call("ModelStatistics", f"count {model}", name=model, version=version)
        return sum((_statistics(row) for row in reply.model_stats), Statistics())

    def statistics_since(
        self, model: str, since: Statistics, *, answers: int, version: str = ""
    ) -> Statistics:
        """The counters' change since an earlier reading, once it includes that many answers.

        Triton answers a request before it counts it, and its batch after that: read at once, the
        counters may miss the last requests. They are read until they include them, for five seconds
        at most, and stand still, for half a second at most: with other clients they never do.
        Counters that went backwards have begun again, and are returned at once.
        """
        deadline, complete, is_last = time.monotonic() + _COUNTED_WITHIN_S, False, False
        change = self.statistics(model, version) - since
        while not is_last and change.requests >= 0:
            time.sleep(_COUNTED_POLL_S)
            # Asked before reading: however long this process was held up, the last reading is new.
            is_last = time.monotonic() > deadline
            earlier, change = change, self.statistics(model, version) - since
            if change.requests < answers:
                continue
            if change == earlier and change.is_whole:
                break
            if not complete:
                deadline, complete, is_last = time.monotonic() + _STILL_WITHIN_S, True, False
        return change

    def trace_settings(self, model: str = "") -> dict[str, tuple[str, ...]]:
        """Trace settings: of one model, or the server's default."""
        reply = self._call("TraceSetting", "show its trace settings", model_name=model)
        return {name: tuple(setting.value) for name, setting in reply.settings.items()}

    def set_trace(self, settings: Mapping[str, tuple[str, ...] | None], model: str = "") -> None:
        """Change trace settings; None resets a setting to the default."""
        request = self._messages.TraceSettingRequest(model_name=model)
        for name, values in settings.items():
            request.settings[name].value.extend(values or ())
        self._send("TraceSetting", request, f"trace {model}", None)

    def share_memory(self, region: SharedRegion) -> None:
        """Let requests name a region of memory instead of carrying their tensors.

        Raises:
            ServerError: the server cannot open it, most often because it is on another machine.
        """
        fields: dict[str, Any] = {"name": region.name, "byte_size": region.size}
        if region.handle is None:
            fields |= {"key": region.name}
        else:
            fields |= {"raw_handle": region.handle, "device_id": region.device}
        kind = f"{region.kind}SharedMemoryRegister"
        request = getattr(self._messages, f"{kind}Request")(**fields)
        self._send(kind, request, f"open shared memory {region.name}", None)

    def shared_memory(self, kind: Literal["System", "Cuda"] = "System") -> tuple[str, ...]:
        """Names of the regions of memory that any program shares with it."""
        return tuple(self._call(f"{kind}SharedMemoryStatus", "list shared memory").regions)

    def forget_memory(self, region: SharedRegion) -> None:
        """Unregister a region; it stays listed until requests that use it are answered."""
        self._call(
            f"{region.kind}SharedMemoryUnregister",
            f"forget shared memory {region.name}",
            name=region.name,
        )

    def _yes(self, method: str, field: str, **fields: str) -> bool:
        try:
            return bool(getattr(self._call(method, "say whether it is ready", **fields), field))
        except ServerError:
            return False

    def _call(self, method: str, what: str, **fields: str) -> Any:
        kind = "RepositoryIndexRequest" if method == "RepositoryIndex" else f"{method}Request"
        return self._send(method, getattr(self._messages, kind)(**fields), what, None)

    def _send(self, method: str, request: Any, what: str, timeout_s: float | None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return getattr(self._stub, method)(request, timeout=limit_s)
        except self._error as error:
            code = error.code().name
            raise ServerError(
                f"Triton at {self.address} could not {what}: {error.details()} "
                f"({code}, limit {limit_s:g} s).\n{_REMEDIES.get(code, 'See the server log.')}"
            ) from error


def _statistics(row: Any) -> Statistics:
    stats = row.inference_stats
    return Statistics(
        requests=stats.success.count,
        failures=stats.fail.count,
        success_ns=stats.success.ns,
        inferences=row.inference_count,
        executions=row.execution_count,
        queue_ns=stats.queue.ns,
        compute_input_ns=stats.compute_input.ns,
        compute_infer_ns=stats.compute_infer.ns,
        compute_output_ns=stats.compute_output.ns,
        batches={batch.batch_size: batch.compute_infer.count for batch in row.batch_stats},
    )
