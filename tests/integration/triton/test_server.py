import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from enginegate.benchmark.deployment import DeployedBenchmark, deploy
from enginegate.errors import ServerError
from enginegate.loadgen.traffic import Traffic, Transport, run_load
from enginegate.measurement import Load
from enginegate.measuring.p99 import SequentialTest
from enginegate.serving import ServingConfig
from enginegate.triton.server import Ports, ServerOptions, connect, start

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("triton")]


def _processes_below(pid):
    """Every process of the group that the server leads, itself included."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _gone(pid, within_s=30.0):
    deadline = time.monotonic() + within_s
    while _processes_below(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _start(install, folder, **options):
    repository = folder / "repository"
    repository.mkdir(exist_ok=True)
    chosen = ServerOptions(exit_timeout_s=1, **options)
    return start(install, repository, folder=folder, options=chosen)


def _crash_once_asked(server, model, client):
    """Crash a server once it has answered five more requests, from another thread."""
    began, deadline = client.statistics(model).requests, time.monotonic() + 60.0

    def crash():
        while client.statistics(model).requests < began + 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(server.pid, signal.SIGSEGV)

    threading.Thread(target=crash).start()


def test_server_tells_its_version_and_is_alive(server):
    """A started server answers, names its version and passes its own check."""
    server.check_alive()

    assert server.version.split(".")[0] == "2"
    assert connect(server.grpc).version == server.version


def test_it_listens_on_loopback_only(server):
    """No port of an embedded server can be reached from another machine."""
    wanted = {int(address.rpartition(":")[2]) for address in (server.grpc, server.http)}
    wanted.add(int(server.metrics.rpartition(":")[2]))
    listening = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, port = local.split(":")
            if state == "0A" and int(port, 16) in wanted:
                listening[int(port, 16)] = address

    assert set(listening) == wanted
    assert all(address.endswith("0100007F") for address in listening.values())


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_taken_port_is_named(install, tmp_path, name):
    """A port that was asked for and is in use ends the start with its number and the remedy."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]

        with (
            pytest.raises(
                ServerError, match=rf"(?s)Port {port} on 127\.0\.0\.1.*another port"
            ) as caught,
            _start(install, tmp_path, ports=Ports(**{name: port})),
        ):
            pass

    assert name.lower() in str(caught.value).lower()


def test_dying_at_start_shows_the_log(install, tmp_path):
    """A server that ends while starting gives its status and the end of its log."""
    with (
        pytest.raises(ServerError, match=r"(?s)ended while starting, with status 1.*absent"),
        start(install, tmp_path, folder=tmp_path, load=["absent"]),
    ):
        pass


def test_exception_ends_the_server_also_from_another_thread(install, tmp_path):
    """The server outlives the thread that started it, and ends with the block, even by an error."""
    stack = ExitStack()
    entered = []
    starter = threading.Thread(
        target=lambda: entered.append(stack.enter_context(_start(install, tmp_path)))
    )
    starter.start()
    starter.join()
    time.sleep(0.3)
    entered[0].check_alive()

    with pytest.raises(KeyboardInterrupt), stack:
        raise KeyboardInterrupt

    assert _gone(entered[0].pid)
    with pytest.raises(ServerError, match="does not answer"):
        entered[0].check_alive()


def test_killing_the_owner_ends_the_server(install, tmp_path):
    """SIGKILL of the process that started a server leaves no server behind."""
    script = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from enginegate.triton.install import TritonInstall
        from enginegate.triton.server import start
        from pathlib import PosixPath
        with start({install!r}, Path({str(tmp_path)!r}), folder=Path({str(tmp_path)!r})) as server:
            print(server.pid, flush=True)
            time.sleep(60)
    """)
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(owner.stdout.readline())
    assert _processes_below(pid)

    owner.kill()
    owner.communicate()

    assert _gone(pid)


def test_crash_in_a_measurement_is_reported(install, tmp_path, scale_model, samples):
    """A server that dies under load is an error with its log, and its helpers are gone too."""
    serving = ServingConfig(max_batch_size=1, max_queue_delay_us=0, instances=1)
    load = Load(rate_per_s=50, duration_s=0.4, seed=1)
    # It ends once enough requests have failed; until then a slow machine has time to crash.
    longer = Load(rate_per_s=100, duration_s=6.0, seed=1)

    with _start(install, tmp_path) as doomed, deploy(doomed, scale_model("doomed")) as model:
        shared = model.client.metadata().name
        bench = DeployedBenchmark(model, Traffic.of("doomed", samples), tmp_path, slo_p99_ms=100)
        assert bench.measure(serving, load).measurement.failed == 0
        assert len(_processes_below(doomed.pid)) > 1
        assert list(SHARED_MEMORY.glob(f"{shared}*"))
        _crash_once_asked(doomed, "doomed", model.client)

        with pytest.raises(ServerError, match=r"(?s)does not answer.*Signal \(11\)"):
            bench.measure(serving, longer, ends=SequentialTest(0.99))

        assert _gone(doomed.pid)
    assert not list(SHARED_MEMORY.glob(f"{shared}*"))


def test_no_shared_memory_with_tensors_is_readable_by_others(server, scale, traffic, client):
    """Neither what requests travel in nor what Triton shares with its models, under load too."""
    prefixes, modes, done = (client.metadata().name, "enginegate-load-"), {}, threading.Event()

    def look():
        for region in SHARED_MEMORY.iterdir():
            with suppress(OSError):
                if region.name.startswith(prefixes):
                    modes[region.name] = region.stat().st_mode & 0o777

    def look_on():
        while not done.wait(0.05):
            look()

    looking = threading.Thread(target=look_on)
    assert scale.serving is not None
    # Triton makes its memory readable by everybody; the watchdog takes that right away soon after.
    deadline = time.monotonic() + 30.0
    look()
    while set(modes.values()) != {0o600}:
        assert time.monotonic() < deadline, modes
        time.sleep(0.02)
        modes.clear()
        look()
    looking.start()
    try:
        load = Load(rate_per_s=50, duration_s=1.0, seed=1)
        sent = run_load(server.grpc, traffic, load, sending=Transport(shared_memory="system"))
    finally:
        done.set()
        looking.join()

    assert sent.failed == 0
    assert {name[: len("enginegate-load-")] for name in modes} >= {"enginegate-load-"}
    assert any(name.startswith(prefixes[0]) for name in modes)
    assert set(modes.values()) == {0o600}
