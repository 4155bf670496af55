"""The second driver: NVIDIA's perf_analyzer sends the same load, as a cross-check of this one.

It is a program of its own (the wheel of tritonclient 2.51.0 has it, later ones do not), named by
PERF_ANALYZER or found on PATH; PERF_ANALYZER_LIBRARY_PATH names folders of libraries it needs
(libb64, libcudart). Its limits:

- It stops at the first request that fails, so it cannot count failures.
- It notes when a request left, not when it was meant to. It follows this program's schedule, whose
  start is set so that its least late request is on time: a delay that all share stays hidden.
- It reads the wall clock, which must not be set meanwhile.
- It writes every tensor as text beside each request's times, so large inputs need short runs or
  shared memory.
"""

import base64
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginegate.errors import InputError, ServerError
from enginegate.loadgen.grpc_message import parse_request
from enginegate.loadgen.schedule import due_times, shuffled
from enginegate.loadgen.traffic import LoadResult, Traffic
from enginegate.measurement import ClosedLoad, Generator, Load, SharedMemory, WireProtocol

_PROGRAM = "PERF_ANALYZER"
_LIBRARIES = "PERF_ANALYZER_LIBRARY_PATH"
_FEWEST_THREADS, _MOST_THREADS = 4, 16
_WINDOWS = 3
_GRACE_S = 60.0
_MAX_PROFILE_BYTES = 1_000_000_000
_TEXT_BYTES = 3  # of the profile, for each byte of a tensor
_TAIL = 1500


@dataclass(frozen=True, slots=True)
class _Stamps:
    """When requests left and were answered, seconds on one clock, in the order they left."""

    left_s: NDArray[np.float64]
    answered_s: NDArray[np.float64]


def find_perf_analyzer() -> Path | None:
    """The program, if this machine has it."""
    program = os.environ.get(_PROGRAM) or shutil.which("perf_analyzer")
    return Path(program) if program else None


def run_perf_analyzer(
    address: str,
    traffic: Traffic,
    load: Load | ClosedLoad,
    *,
    protocol: WireProtocol = "grpc",
    shared_memory: SharedMemory = "none",
    binary: Path | None = None,
) -> LoadResult:
    """Have perf_analyzer send a load; its numbers have the limits above.

    Args:
        address: the server's ``HOST:PORT`` for the protocol.
        traffic: all requests for one model and of one batch size; one round of its order is
            repeated.
        load: open loop (the very schedule that `traffic.run_load` would follow) or closed loop.
        protocol: gRPC or HTTP.
        shared_memory: where tensors are; the server must be on this machine.
        binary: the program; None: the one that `find_perf_analyzer` finds.

    Returns:
        As `traffic.run_load`, but model versions are not known (empty).

    Raises:
        InputError: perf_analyzer cannot send this traffic.
        ServerError: there is no such program, or it failed, as it does when any request fails.
    """
    program = binary or find_perf_analyzer()
    if program is None:
        raise ServerError(
            f"There is no perf_analyzer on this machine. Name it with {_PROGRAM} (the wheel of "
            "tritonclient 2.51.0 holds it), or use the driver python."
        )
    order = _round(traffic, load)
    due_s = _schedule(traffic, load, shared_memory)
    cpu_s, started_s = _children_s(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="enginegate-perf-") as name:
        folder = Path(name)
        command = _command(program, _write(folder, traffic, order), load, due_s)
        command += ["--shared-memory", shared_memory]
        command += ["-u", address, "-i", protocol, "--profile-export-file", f"{folder}/profile"]
        with _run(command, load.duration_s):
            stamps = _stamps(json.loads((folder / "profile").read_bytes()))
    wall_s = time.perf_counter() - started_s
    return _result(load, due_s, stamps, order, (_children_s() - cpu_s) / wall_s)


def _round(traffic: Traffic, load: Load | ClosedLoad) -> NDArray[np.int64]:
    """The first round of the order that `traffic.run_load` would draw in."""
    count = len(traffic.requests)
    seed = load.seed if isinstance(load, ClosedLoad) else load.order_seed
    order = shuffled(count, traffic.order_seed if seed is None else seed)
    return np.fromiter((next(order) for _ in range(count)), np.int64, count)


def _schedule(
    traffic: Traffic, load: Load | ClosedLoad, shared_memory: SharedMemory
) -> NDArray[np.float64] | None:
    if isinstance(load, ClosedLoad):
        return None
    due_s = np.fromiter(due_times(load, traffic.arrivals_s), np.float64)
    if not len(due_s):
        raise InputError(f"No request falls into {load.duration_s:g} s at {load}: send longer.")
    largest = max(map(len, traffic.requests)) if shared_memory == "none" else 0
    if largest * len(due_s) * _TEXT_BYTES > _MAX_PROFILE_BYTES:
        raise InputError(
            f"perf_analyzer would write {len(due_s)} requests of {largest:,} bytes as text. Send "
            "for a shorter time, share memory, or use the driver python."
        )
    return due_s


def _write(folder: Path, traffic: Traffic, order: NDArray[np.int64]) -> list[str]:
    """Write the inputs as perf_analyzer reads them; returns the flags that name them."""
    messages = [parse_request(traffic.requests[index]) for index in order]
    sizes = {int(tensor.shape[0]) for message in messages for tensor in message.inputs}
    models = {message.model_name for message in messages}
    if len(sizes) != 1 or len(models) != 1:
        raise InputError(
            f"perf_analyzer sends one model's requests of one batch size; this traffic has batch "
            f"sizes {sorted(sizes)} for {sorted(models)}. Use the driver python."
        )
    size = sizes.pop()
    rows = [row for message in messages for row in _rows(message, size)]
    path = folder / "inputs.json"
    path.write_text(json.dumps({"data": rows}))
    return ["-m", models.pop(), "-b", str(size), "--input-data", str(path)]


def _rows(message: Any, size: int) -> Iterator[dict[str, Any]]:
    for row in range(size):
        yield {
            tensor.name: {
                "b64": base64.b64encode(_part(content, row, size)).decode(),
                "shape": list(tensor.shape[1:]),
            }
            for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True)
        }


def _part(content: bytes, number: int, count: int) -> bytes:
    size = len(content) // count
    return content[number * size : (number + 1) * size]


def _command(
    program: Path,
    inputs: list[str],
    load: Load | ClosedLoad,
    due_s: NDArray[np.float64] | None,
) -> list[str]:
    # Its own judgement of stability is off: this program judges the raw times.
    command = [str(program), *inputs, "--async", "--stability-percentage", "999"]
    if isinstance(load, ClosedLoad):
        window_ms = max(1, round(load.duration_s * 1e3 / _WINDOWS))
        command += ["--concurrency-range", str(load.clients)]
        return [*command, "--measurement-interval", str(window_ms)]
    gaps_us = np.diff(due_s if due_s is not None else (), prepend=0.0) * 1e6
    path = Path(inputs[-1]).with_name("gaps")
    path.write_text("".join(f"{round(gap)}\n" for gap in gaps_us))
    command += ["--request-intervals", str(path), "--request-count", str(len(gaps_us))]
    cores = len(os.sched_getaffinity(0))
    threads = max(_FEWEST_THREADS, min(_MOST_THREADS, cores // 2))
    return [*command, "--max-threads", str(threads)]


@contextmanager
def _run(command: list[str], duration_s: float) -> Iterator[None]:
    """Run it to its end, then the block that reads its files; an error of either shows its output.

    Raises:
        ServerError: it did not run, or the block could not read its files.
    """
    libraries = [os.environ.get(_LIBRARIES), os.environ.get("LD_LIBRARY_PATH")]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
    output = ""
    try:
        done = subprocess.run(  # noqa: S603
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=4 * duration_s + _GRACE_S,
        )
        output = f"It ended with status {done.returncode} and said:\n{done.stdout + done.stderr}"
        yield
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
        raise ServerError(
            f"perf_analyzer measured nothing ({type(error).__name__}: {error}).\n"
            f"{output[-_TAIL:]}\n"
            "It stops at the first request that fails. Check the model with the driver python, "
            f"which counts failures; name missing libraries with {_LIBRARIES}."
        ) from error


def _stamps(profile: Any) -> _Stamps:
    requests = profile["experiments"][-1]["requests"]
    stamps_ns = sorted((each["timestamp"], each["response_timestamps"][-1]) for each in requests)
    first_ns = stamps_ns[0][0]
    # Times since 1970 in nanoseconds do not fit a float64; those since the first do.
    left_s = np.array([(left - first_ns) * 1e-9 for left, _ in stamps_ns])
    answered_s = np.array([(answered - first_ns) * 1e-9 for _, answered in stamps_ns])
    return _Stamps(left_s, answered_s)


def _result(
    load: Load | ClosedLoad,
    due_s: NDArray[np.float64] | None,
    stamps: _Stamps,
    order: NDArray[np.int64],
    cpu_share: float,
) -> LoadResult:
    count = len(stamps.left_s) if due_s is None else min(len(stamps.left_s), len(due_s))
    left_s, answered_s = stamps.left_s[:count], stamps.answered_s[:count]
    planned_s = left_s if due_s is None else due_s[:count]
    start_s = float((left_s - planned_s).min())
    return LoadResult(
        load=load,
        due_s=planned_s,
        sent_s=left_s - start_s,
        latency_s=answered_s - start_s - planned_s,
        samples=order[np.arange(count) % len(order)],
        versions=np.full(count, ""),
        errors={},
        cpu_share=cpu_share,
        lasted_s=load.duration_s if due_s is not None else float(left_s[-1]),
        generator=Generator(driver="perf_analyzer", cpu_share=cpu_share),
        missing=0 if due_s is None else len(due_s) - count,
    )


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
