"""Starts a Triton server on this machine and ends it, whatever happens; or finds a running one.

Not in scope: the models it serves (benchmark/deployment.py), and how well (measuring/).
"""

import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from enginegate.errors import InputError, ServerError
from enginegate.machine import LAST_PORT
from enginegate.triton.client import TritonClient
from enginegate.triton.install import TritonInstall
from enginegate.triton.supervised_process import SupervisedProcess, supervise

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a server listens; 0 asks for any free port."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def chosen(self) -> "Ports":
        """A copy with every 0 replaced by a port that is free now.

        Raises:
            InputError: a number is no port, or is asked for twice.
            ServerError: a port that was asked for cannot be used.
        """
        given = [port for port in (self.http, self.grpc, self.metrics) if port]
        if wrong := [port for port in given if not 0 < port <= LAST_PORT]:
            raise InputError(
                f"{wrong[0]} is no port: they are 1 to {LAST_PORT:,}, and 0 takes any free one."
            )
        if len(set(given)) < len(given):
            raise InputError(
                "HTTP, gRPC and metrics each need a port of their own, and two of them were asked "
                f"to listen on the same (http {self.http}, gRPC {self.grpc}, metrics "
                f"{self.metrics}). 0 takes any free one."
            )
        with ExitStack() as stack:
            return Ports(
                http=_bind(stack, "HTTP", self.http),
                grpc=_bind(stack, "gRPC", self.grpc),
                metrics=_bind(stack, "metrics", self.metrics),
            )

    def all_free(self) -> bool:
        """Whether no program listens on any of them."""
        with suppress(ServerError):
            self.chosen()
            return True
        return False


def _bind(stack: ExitStack, name: str, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        raise ServerError(
            f"Port {port} on {LOOPBACK}, asked for as Triton's {name} port, cannot be used: "
            f"{error.strerror}.\n`ss -ltnp 'sport = :{port}'` shows who holds it. Stop that, or "
            "ask for another port (0 takes any free one)."
        ) from error
    return int(listener.getsockname()[1])


_ATTEMPTS = 3
_POLL_S = 0.02
_KILL_AFTER_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the system's shared memory, not a temporary file
_TAIL_LINES = 25
# What requests in CUDA shared memory are copied to for a model in the Python backend. Beyond it
# every request allocates device memory, which waits for the device. Triton's own 64 MB hold 13
# requests of eight images; this holds 200.
_GPU_POOL_BYTES = 1 << 30
_TAIL_BYTES = 20_000
# As Triton says it of each of its three ports.
_TAKEN = b"already in use"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server is started.

    Attributes:
        ports: where it listens, on loopback only.
        ready_timeout_s: limit on starting and loading the first models.
        exit_timeout_s: how long requests under way may take when it is stopped.
        flags: further ``tritonserver`` flags, e.g. ``--rate-limit=execution_count``.
        environment: further variables for the server and its models.
    """

    ports: Ports = field(default_factory=Ports)
    ready_timeout_s: float = 60.0
    exit_timeout_s: int = 5
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. Values are None where another program runs the server.

    Attributes:
        grpc: ``HOST:PORT``; so are ``http`` and ``metrics``.
        version: Triton's version, e.g. 2.51.0.
        log: what it printed.
        trace_file: how the names of its trace files begin (shadow/trace_files.py).
    """

    grpc: str
    version: str
    http: str | None = None
    metrics: str | None = None
    pid: int | None = None
    log: Path | None = None
    repository: Path | None = None
    trace_file: Path | None = None

    def client(self, *, timeout_s: float = 10.0) -> TritonClient:
        """A connection to it."""
        return TritonClient(self.grpc, timeout_s=timeout_s)

    def check_alive(self) -> None:
        """Return if the server answers.

        Raises:
            ServerError: it does not; shows the end of its log.
        """
        with self.client() as client:
            if client.live():
                return
        raise ServerError(
            f"The Triton server at {self.grpc} does not answer.{_tail(self.log)}\n"
            "Start it again; if it dies again, its log says on what."
        )


def connect(endpoint: str) -> Server:
    """The running server at the gRPC address ``HOST:PORT``.

    Raises:
        InputError: that is no address.
        ServerError: nothing answers there.
    """
    host, _, port = endpoint.rpartition(":")
    # gRPC would wrap a port that is too large around to another port.
    if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= LAST_PORT:
        raise InputError(
            f"{endpoint!r} is no address of a Triton: write HOST:PORT of its gRPC, for example "
            "127.0.0.1:8001."
        )
    with TritonClient(endpoint) as client:
        return Server(grpc=endpoint, version=client.metadata().version)


@contextmanager
def start(
    install: TritonInstall,
    repository: Path,
    *,
    folder: Path,
    load: Sequence[str] = (),
    options: ServerOptions | None = None,
) -> Iterator[Server]:
    """Run a server for as long as the block runs.

    It ends with the block, with an exception out of it, and with this process even if that is
    killed. Models are loaded and unloaded on request only.

    Args:
        install: which server.
        repository: its model repository.
        folder: where ``triton.log`` and traces go.
        load: models to load before it counts as started.
        options: ports, limits and further flags.

    Raises:
        ServerError: a port that was asked for is taken, it died (shows the end of the log), or it
            was not ready in time.
    """
    run = _Run(install, repository.absolute(), folder.absolute(), options or ServerOptions())
    # Traces hold what users sent.
    run.trace_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for attempt in range(_ATTEMPTS):
        ports = run.options.ports.chosen()
        with run.process(ports, tuple(load)) as process:
            try:
                server = run.wait(process, ports)
            except ServerError:
                if process.status() is None or attempt + 1 == _ATTEMPTS:
                    raise
                # Another program took a port meanwhile, and may have left it again.
                if ports.all_free() and _TAKEN not in run.log.read_bytes():
                    raise
                continue
            yield server
            return


@dataclass(frozen=True, slots=True)
class _Run:
    install: TritonInstall
    repository: Path
    folder: Path
    options: ServerOptions
    identity: str = field(default_factory=lambda: f"enginegate-{uuid.uuid4().hex[:12]}")

    @property
    def log(self) -> Path:
        return self.folder / "triton.log"

    @property
    def trace_file(self) -> Path:
        return self.folder / "traces" / "trace.json"

    @contextmanager
    def process(self, ports: Ports, load: tuple[str, ...]) -> Iterator[SupervisedProcess]:
        self.log.write_bytes(b"")
        try:
            with supervise(
                self._command(ports, load),
                log=self.log,
                environment={**self.install.environment(), **self.options.environment},
                grace_s=self.options.exit_timeout_s + _KILL_AFTER_S,
                private=self.identity,
            ) as process:
                yield process
        finally:
            # A crashed or killed server leaves the memory that it shared with its models.
            for region in _SHARED_MEMORY.glob(f"{self.identity}*"):
                region.unlink(missing_ok=True)

    def _command(self, ports: Ports, load: tuple[str, ...]) -> list[str]:
        flags = {
            "id": self.identity,
            "model-repository": self.repository,
            "model-control-mode": "explicit",
            "strict-readiness": "false",
            "exit-timeout-secs": self.options.exit_timeout_s,
            "http-address": LOOPBACK,
            "grpc-address": LOOPBACK,
            "metrics-address": LOOPBACK,
            "http-port": ports.http,
            "grpc-port": ports.grpc,
            "metrics-port": ports.metrics,
            # Level, rate and count can be changed on a running server; the file cannot.
            "trace-config": f"triton,file={self.trace_file}",
            "backend-config": f"python,shm-region-prefix-name={self.identity}",
        }
        if self.install.backends is not None:
            flags["backend-directory"] = self.install.backends
        return [
            str(self.install.binary),
            *(f"--{name}={value}" for name, value in flags.items()),
            # Configurations are complete, and completing them starts every Python model once more.
            "--disable-auto-complete-config",
            *(f"--load-model={name}" for name in load),
            *(f"--cuda-memory-pool-byte-size={gpu}:{_GPU_POOL_BYTES}" for gpu in range(_gpus())),
            *self.options.flags,
        ]

    def wait(self, process: SupervisedProcess, ports: Ports) -> Server:
        deadline = time.monotonic() + self.options.ready_timeout_s
        grpc = f"{LOOPBACK}:{ports.grpc}"
        with TritonClient(grpc) as client:
            # Another server may have taken the port meanwhile: this one is known by its name.
            while not (
                _listen(ports) and client.ready() and client.metadata().name == self.identity
            ):
                self._check_starting(process, deadline)
                time.sleep(_POLL_S)
            version = client.metadata().version
        return Server(
            grpc=grpc,
            version=version,
            http=f"{LOOPBACK}:{ports.http}",
            metrics=f"{LOOPBACK}:{ports.metrics}",
            pid=process.pid,
            log=self.log,
            repository=self.repository,
            trace_file=self.trace_file,
        )

    def _check_starting(self, process: SupervisedProcess, deadline: float) -> None:
        status = process.status()
        if status is not None:
            raise ServerError(
                f"Triton ({self.install.origin}) ended while starting, with status {status}."
                f"{_tail(self.log)}\nThe whole log is {self.log}."
            )
        if time.monotonic() > deadline:
            raise ServerError(
                f"Triton was not ready after {self.options.ready_timeout_s:g} s.{_tail(self.log)}\n"
                f"If a model just takes longer to load, raise the limit. The log is {self.log}."
            )


def _listen(ports: Ports) -> bool:
    """Whether all three answer; Triton opens them one after the other."""
    for port in (ports.grpc, ports.http, ports.metrics):
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) != 0:
                return False
    return True


def _tail(log: Path | None) -> str:
    """The end of a log without Triton's tables and without a crash's raw addresses."""
    if log is None or not log.is_file():
        return ""
    text = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("|", "+"))]
    return "\nThe end of its log:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def _gpus() -> int:
    """How many GPUs this machine's driver has devices for."""
    return sum(
        path.name.removeprefix("nvidia").isdecimal() for path in Path("/dev").glob("nvidia*")
    )
