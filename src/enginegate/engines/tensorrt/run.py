"""Plans that run in a process of their own, fed through shared memory.

Rows are written once, into memory that the other process has mapped and pinned; the device copies
from there and back (``worker.run``). Rows are padded to the next bucket, so that a graph captured
once serves every size below. A process that dies or hangs is an error, never a wait without end.
"""

import json
import mmap
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginegate.candidate import Engine, TensorSpec
from enginegate.data import Array, Tensors, cast_integers
from enginegate.engines.batching import check_batch, check_rows
from enginegate.engines.onnxruntime.gpu import bucket_of, buckets_up_to, pad_rows
from enginegate.engines.tensorrt.library import (
    TensorRtLibrary,
    ending,
    worker_command,
    worker_environment,
)
from enginegate.errors import ModelError, TookTooLongError

_OPEN_S = 300.0  # reading, loading and warming the largest plans from a cold disk
_ANSWER_S = 120.0  # a run of a few batches takes milliseconds; a device that hangs never answers
_END_S = 10.0
_PARTS = 8  # batches of one request: copies overlap computing, and memory stays small
_ALIGNED = 256
_SHOWN = 400


@dataclass(frozen=True, slots=True)
class _Batch:
    """Where one batch's arrays lie in the shared memory.

    Attributes:
        rows: how many of them were asked for; the rest pad the bucket.
        shapes: of the inputs.
        inputs: offsets by name.
        outputs: offset and shape by name.
    """

    rows: int
    shapes: dict[str, tuple[int, ...]]
    inputs: dict[str, int]
    outputs: dict[str, tuple[int, tuple[int, ...]]]

    def told(self) -> dict[str, Any]:
        """As the worker takes it."""
        return {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "inputs": self.inputs,
            "outputs": {name: offset for name, (offset, _) in self.outputs.items()},
        }


class _Worker:
    """The process that holds the plan, and the socket and memory shared with it."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", channel: socket.socket, memory: int, log: Path
    ) -> None:
        self._process, self._channel, self._memory, self._log = process, channel, memory, log
        self._reader = channel.makefile("rb")
        self._mapped: mmap.mmap | None = None
        self.what = "The plan"

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send one command, and wait for its answer.

        Raises:
            ModelError: the process died, refused, or answered nonsense.
            TookTooLongError: it did not answer in time, and was killed.
        """
        with suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        return self.answer(_ANSWER_S)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next answer; see `ask`."""
        self._channel.settimeout(limit_s)
        try:
            line = self._reader.readline()
        except TimeoutError as error:
            self._process.kill()
            raise TookTooLongError(
                f"{self.what} did not answer within {limit_s:g} s, and its process was killed. The "
                f"GPU may hang: see nvidia-smi and dmesg.{self._said()}"
            ) from error
        except ConnectionResetError:
            line = b""
        if not line:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            code = self._process.poll()
            how = "closed its channel" if code is None else ending(code)
            raise ModelError(f"{self.what}: the process that ran it {how}.{self._said()}")
        try:
            found = json.loads(line)
            refusal = str(found.get("error", ""))
        except (ValueError, AttributeError) as fault:
            raise ModelError(
                f"{self.what}: its process answered {line[:80]!r}, which is no answer. Check which "
                f"program ENGINEGATE_TENSORRT names.{self._said()}"
            ) from fault
        if refusal:
            raise ModelError(f"{self.what}: {refusal}{self._said()}")
        return dict(found)

    def room(self, size: int) -> memoryview:
        """Shared memory of at least so many bytes."""
        if self._mapped is None or len(self._mapped) < size:
            pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._memory, pages)
            self._mapped = mmap.mmap(self._memory, pages)
            self.ask(do="map")
        return memoryview(self._mapped)

    def close(self) -> None:
        """End the process: it ends by itself when nobody holds its socket."""
        self._reader.close()
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()
        os.close(self._memory)

    def _said(self) -> str:
        lines = [x for x in self._log.read_text(errors="replace").splitlines() if "[I]" not in x]
        text = " ".join("\n".join(lines).split())[-_SHOWN:]
        return f" Its log ends: {text}" if text else ""


class PlanRunner:
    """A plan, run at a few batch sizes.

    Attributes:
        device: the GPU, and how the plan is launched there.
        device_bytes: device memory that it holds, at its largest batch.
    """

    def __init__(self, worker: _Worker, engine: Engine, gpu: str, device_bytes: int) -> None:
        self.device, self.device_bytes = gpu, device_bytes
        self._worker, self._engine, self._gpu = worker, engine, gpu
        self._buckets = buckets_up_to(engine.max_batch_size)
        self._outputs: dict[tuple[tuple[int, ...], ...], dict[str, tuple[int, ...]]] = {}

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of any number of rows.

        Raises:
            DataError: an input does not fit.
            ModelError: the process that runs the plan died or refused.
            TookTooLongError: it hung.
        """
        fitting = self._in_types(inputs)
        rows, most = check_rows(fitting, self._engine.inputs), self._engine.max_batch_size
        parts = []
        for start in range(0, rows, most * _PARTS):
            several = {
                name: array[start : start + most * _PARTS] for name, array in fitting.items()
            }
            parts.append(self._run_some(several))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @contextmanager
    def bound(self, inputs: Tensors) -> Iterator[Callable[[int], float]]:
        """Runs in the other process, between device buffers; one graph where it can be captured."""
        fitting = self._in_types(inputs)
        check_batch(fitting, self._engine.inputs, limit=self._engine.max_batch_size)
        batch, whole = self._laid_out([fitting])
        self._fill(batch, whole)
        self._worker.ask(do="load", part=batch[0].told())
        shapes = batch[0].told()["shapes"]

        def repeat(count: int) -> float:
            answer = self._worker.ask(do="repeat", shapes=shapes, count=count)
            self._note(answer)
            return float(answer["seconds"])

        yield repeat

    def _run_some(self, inputs: Tensors) -> Tensors:
        rows, most = len(next(iter(inputs.values()))), self._engine.max_batch_size
        starts = range(0, rows, most)
        cut = [{n: array[start : start + most] for n, array in inputs.items()} for start in starts]
        batches, whole = self._laid_out(cut)
        memory = self._fill(batches, whole)
        self._note(self._worker.ask(do="run", parts=[each.told() for each in batches]))
        return {
            spec.name: np.concatenate([self._read(memory, each, spec) for each in batches])
            for spec in self._engine.outputs
        }

    def _laid_out(self, cut: list[Tensors]) -> tuple[list[_Batch], list[Tensors]]:
        """Where each batch's arrays go, and the batches padded to their buckets."""
        batches, padded, end = [], [], 0

        def place(size: int) -> int:
            nonlocal end
            start, end = end, end + -(-size // _ALIGNED) * _ALIGNED
            return start

        for part in cut:
            rows = len(next(iter(part.values())))
            size = bucket_of(rows, self._buckets)
            whole = {name: pad_rows(array, size) for name, array in part.items()}
            shapes = {name: array.shape for name, array in whole.items()}
            made = self._output_shapes(shapes)
            kinds = {spec.name: np.dtype(spec.dtype).itemsize for spec in self._engine.outputs}
            inputs = {name: place(array.nbytes) for name, array in whole.items()}
            outputs = {
                name: (place(int(np.prod(shape)) * kinds[name]), shape)
                for name, shape in made.items()
            }
            batches.append(_Batch(rows, shapes, inputs, outputs))
            padded.append(whole)
        return batches, padded

    def _fill(self, batches: list[_Batch], whole: list[Tensors]) -> memoryview:
        last = batches[-1]
        end = max(
            offset + int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
            for spec in self._engine.outputs
            for offset, shape in [last.outputs[spec.name]]
        )
        memory = self._worker.room(end)
        for batch, arrays in zip(batches, whole, strict=True):
            for name, array in arrays.items():
                place: Array = np.ndarray(array.shape, array.dtype, memory, batch.inputs[name])
                place[...] = array
        return memory

    def _read(self, memory: memoryview, batch: _Batch, spec: TensorSpec) -> Array:
        offset, shape = batch.outputs[spec.name]
        found: Array = np.ndarray(shape, spec.dtype, memory, offset)
        return found[: batch.rows].copy()

    def _output_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        key = tuple(shapes[spec.name] for spec in self._engine.inputs)
        if key not in self._outputs:
            told = {name: list(shape) for name, shape in shapes.items()}
            found = self._worker.ask(do="shapes", shapes=told)["shapes"]
            self._outputs[key] = {name: tuple(shape) for name, shape in found.items()}
        return self._outputs[key]

    def _in_types(self, inputs: Tensors) -> Tensors:
        return cast_integers(inputs, self._engine.inputs, origin=str(self._engine.candidate))

    def _note(self, answer: dict[str, Any]) -> None:
        if answer.get("why_no_graph") and self._engine.flags.get("cuda_graphs") != "off":
            self.device = f"{self._gpu}, without CUDA graphs ({answer['why_no_graph']})"


@contextmanager
def plan_runner(
    library: TensorRtLibrary, engine: Engine, path: Path, *, gpu: str
) -> Iterator[PlanRunner]:
    """Load a plan in a process of its own; the caller made sure that a device can run it.

    Args:
        gpu: the device, for messages.

    Raises:
        ModelError: the library refuses the plan, or its process died.
        TookTooLongError: it hung.
    """
    with tempfile.TemporaryDirectory(prefix="enginegate-run-") as name:
        worker = _start(library, engine, path, Path(name))
        worker.what = f"{engine.candidate} ({engine.builder}) on {gpu}"
        try:
            ready = worker.answer(_OPEN_S)
            _check_signature(engine, ready["tensors"])
            yield PlanRunner(worker, engine, gpu, int(ready["device_bytes"]))
        finally:
            worker.close()


def _start(library: TensorRtLibrary, engine: Engine, path: Path, scratch: Path) -> _Worker:
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("enginegate-plan")
    job = {
        "command": "run",
        "module": library.module,
        "plan": str(path.resolve()),
        "host_code": engine.flags.get("version_compatible") == "true",
        "graphs": engine.flags.get("cuda_graphs") != "off",
        "shares_profile": engine.flags.get("shares_profile") == "true",
        "socket": theirs.fileno(),
        "memory": memory,
    }
    log = scratch / "run.log"
    (scratch / "job.json").write_text(json.dumps(job))
    try:
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - our own program, the user's own interpreter
                worker_command(library.python, scratch / "job.json"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), memory),
                env=worker_environment(library.python),
            )
    except OSError as error:
        ours.close()
        os.close(memory)
        raise ModelError(f"{library.python} cannot be run: {error}.") from error
    return _Worker(process, ours, memory, log)


def _check_signature(engine: Engine, tensors: list[dict[str, Any]]) -> None:
    found = {each["name"]: each["dtype"] for each in tensors}
    wanted = {spec.name: spec.dtype for spec in (*engine.inputs, *engine.outputs)}
    if found != wanted:
        raise ModelError(
            f"The plan of {engine.candidate} has {found}; its manifest says {wanted}. Build it "
            "again."
        )
