"""Triton Python-backend model: every engine kind of this program, on a processor or a GPU.

Copied into a model's version folder as ``model.py``, with the engine, its manifest as
``engine.json`` and the module of its kind as ``engine_KIND.py``; for a GPU also ``pipeline.py``,
``serial.py``, and what these import. On a processor an instance is a process that runs one batch at
a time.

On a GPU one process computes on several streams: a batch is handed to the pipeline, `execute`
returns, and the answers are sent when they are there, so that copies overlap with computing. Where
a batch is of many requests and quick, sending each answer costs more than that gains: `execute`
waits instead, and returns them all. Where several processes share a GPU, each runs one batch at a
time and returns its answers: the others compute meanwhile.

Parameters of the model's configuration, all optional: ``streams``; ``answers``, which decides for
``sent`` or ``returned``; and those of the kind.
"""

import ctypes
import hashlib
import importlib
import itertools
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]
from numpy.typing import NDArray

Arrays: TypeAlias = dict[str, NDArray[Any]]

# A Python backend built for NumPy 1 (Triton 2.51) reads arrays of NumPy 2 wrongly and sends empty
# ones, without an error; DLPack passes tensors rightly under both. It renames the capsule it took
# to a name that NumPy does not know as used, which NumPy would report on every call.
_USED_CAPSULE = b"used_dltensor"
_set_capsule_name = ctypes.pythonapi.PyCapsule_SetName
_set_capsule_name.argtypes = [ctypes.py_object, ctypes.c_char_p]
_set_capsule_name.restype = ctypes.c_int
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p
_ON_HOST = (1, 0)  # DLPack's number of a processor
_DLPACK_TYPES = {0: "int", 1: "uint", 2: "float"}
# A thread that waits for Python's lock gets it after this long; the usual 5 ms would be longer
# than a batch takes.
_SWITCH_S = 0.0002
_PACKAGES = itertools.count()
_METRICS_EVERY_S = 0.05  # how far behind the metrics are; each writing costs a message a stage


class TritonPythonModel:
    """One instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Check the engine's bytes, then open it; an error here fails the load."""
        config = json.loads(args["model_config"])
        parameters = {k: v["string_value"] for k, v in config.get("parameters", {}).items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        device_id = int(args.get("model_instance_device_id", "0"))
        self._inputs = [_Input(entry) for entry in config["input"]]
        self._outputs: list[str] = [entry["name"] for entry in config["output"]]
        manifest = json.loads((folder / "engine.json").read_bytes())
        content = _checked(folder / manifest["filename"], manifest["file"]["sha256"])
        for name, recorded in manifest.get("external", {}).items():
            _checked(folder / name, recorded["sha256"])
        began_s, package = time.perf_counter(), _package(folder)
        kind = _module(package, f"engine_{manifest['candidate']['kind']}")
        self._engine = kind.open_for_triton(folder, content, manifest, parameters, device_id)
        opened_s = time.perf_counter()
        self._pipeline: Any = None
        self._serial: Any = None
        self._answers = parameters.get("answers", "")
        self._metrics: _Metrics | None = None
        if hasattr(self._engine, "lane"):
            self._memory = _module(package, "memory").Memory
            device = _module(package, "device").GpuDevice(device_id)
            shapes = manifest.get("profiles", {})
            example = {each.name: each.example(shapes.get(each.name)) for each in self._inputs}
            if self._answers == "returned" or (_processes(config) > 1 and not self._answers):
                self._serial = _module(package, "serial").Serial(self._engine, device, example)
            else:
                sys.setswitchinterval(_SWITCH_S)
                self._pipeline = _module(package, "pipeline").Pipeline(
                    self._engine, device, example, lanes=int(parameters.get("streams", "1"))
                )
            self._metrics = _Metrics(self._serial or self._pipeline, args, config["name"])
            warm_s = time.perf_counter() - opened_s
            triton.Logger.log_info(
                f"enginegate: {config['name']}: the engine opened in {opened_s - began_s:.1f} s, "
                f"its batch sizes were made ready in {warm_s:.1f} s"
            )

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer every request, with its own error if it has one: now, or later in a pipeline."""
        if self._serial is not None:
            return self._at_once(requests)
        if self._pipeline is not None:
            return self._begin(requests)
        given = [self._read(request) for request in requests]
        good = [arrays for arrays in given if not isinstance(arrays, str)]
        try:
            answers = iter(self._run(good))
        except Exception as error:  # noqa: BLE001 - a request without an answer blocks its client
            refusal = f"{type(error).__name__}: {error}"
            return [_refused(each if isinstance(each, str) else refusal) for each in given]
        return [_refused(each) if isinstance(each, str) else next(answers) for each in given]

    def finalize(self) -> None:
        """Wait for the batches under way."""
        runner = self._serial or self._pipeline
        if runner is not None:
            runner.close()
        if self._metrics is not None:
            self._metrics.close()

    def _at_once(self, requests: list[Any]) -> list[Any]:
        """Run requests in this thread; Triton copies the answers before it asks again."""
        began_s = time.perf_counter()
        given = [self._read(request) for request in requests]
        groups = self._grouped(given, self._serial.buckets[-1])
        read_s = time.perf_counter() - began_s
        responses = [_refused(each) if isinstance(each, str) else None for each in given]
        reply_s = 0.0
        for group in groups:
            outcome: Arrays | Exception
            try:
                arrays: Arrays = self._serial.run([parts for _, parts in group.requests])
                if len(groups) > 1:  # the next run takes the memory of this one's
                    arrays = {name: array.copy() for name, array in arrays.items()}
                outcome = arrays
            except Exception as error:  # noqa: BLE001 - each request gets it as its answer
                outcome = error
            ran_s = time.perf_counter()
            self._answer(group, responses.__setitem__)(outcome, range(len(group.requests)))
            reply_s += time.perf_counter() - ran_s
        self._serial.count("read", read_s)
        self._serial.count("reply", reply_s)
        return responses

    def _begin(self, requests: list[Any]) -> list[Any] | None:
        """Hand requests to the pipeline; returns when it has taken them, or answered them.

        The next batch overlaps with this one only if answers are sent one by one. Many requests to
        a quick engine lose more by that than they gain.
        """
        given = [self._read(request) for request in requests]
        groups = self._grouped(given, self._pipeline.buckets[-1])
        if self._waits_for(groups):
            return self._answered(given, groups)
        try:
            senders = [request.get_response_sender() for request in requests]
        except Exception:  # noqa: BLE001 - before Triton 24.06 answers can only be returned
            return self._answered(given, groups)

        def send(at: int, response: Any) -> None:
            senders[at].send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        for at, each in enumerate(given):
            if isinstance(each, str):
                _respond(send, at, _refused(each))
        for group in groups:
            self._pipeline.submit([parts for _, parts in group.requests], self._answer(group, send))
        return None

    def _waits_for(self, groups: "list[_Group]") -> bool:
        return not self._answers and all(
            self._pipeline.is_worth_waiting(len(group.requests), group.rows) for group in groups
        )

    def _answered(self, given: list[Any], groups: "list[_Group]") -> list[Any]:
        """Every request's response, once there are all."""
        responses = [_refused(each) if isinstance(each, str) else None for each in given]
        waiting = [self._pipeline.begin([parts for _, parts in group.requests]) for group in groups]
        for group, outcome in zip(groups, waiting, strict=True):
            numbers = range(len(group.requests))
            self._answer(group, responses.__setitem__)(outcome(), numbers)
        return responses

    def _grouped(self, given: list[Any], limit: int) -> "list[_Group]":
        """Requests that run together: alike in every axis but the first, as many as fit.

        Those that fit nowhere get what is wrong with them into their place.
        """
        groups: list[_Group] = []
        for at, parts in enumerate(given):
            if isinstance(parts, str):
                continue
            rows = int(parts[self._inputs[0].name].shape[0])
            if rows > limit:
                given[at] = f"it has more rows than the {limit} of the engine"
                continue
            form = [tensor.shape[1:] for tensor in parts.values()]
            if not groups or groups[-1].rows + rows > limit or form != groups[-1].form:
                groups.append(_Group(form))
            groups[-1].add(at, parts, rows)
        return groups

    def _answer(
        self, group: "_Group", respond: Callable[[int, Any], None]
    ) -> Callable[[Arrays | Exception, range], None]:
        def answer(outcome: Arrays | Exception, numbers: range) -> None:
            for number in numbers:
                rows = slice(group.starts[number], group.starts[number + 1])
                _respond(respond, group.requests[number][0], self._part(outcome, rows))

        return answer

    def _part(self, outcome: Arrays | Exception, rows: slice) -> Any:
        """One request's response: its rows, or what went wrong, here too."""
        if isinstance(outcome, Exception):
            return _refused(f"{type(outcome).__name__}: {outcome}")
        try:
            return self._response([outcome[name][rows] for name in self._outputs])
        except Exception as error:  # noqa: BLE001 - a request without an answer blocks its client
            return _refused(f"{type(error).__name__}: {error}")

    def _read(self, request: Any) -> dict[str, Any] | str:
        """The request's tensors by input name, or what is wrong with it."""
        tensors: dict[str, Any] = {}
        sent = {tensor.name(): tensor for tensor in request.inputs()}
        for wanted in self._inputs:
            tensor = sent.get(wanted.name)
            if tensor is None:
                return f"input {wanted.name} is missing"
            found = self._tensor(tensor)
            problem = wanted.problem(found)
            if problem:
                return problem
            tensors[wanted.name] = found
        rows = {tensor.shape[0] for tensor in tensors.values()}
        return (
            tensors if len(rows) == 1 and 0 not in rows else f"the inputs have {sorted(rows)} rows"
        )

    def _tensor(self, tensor: Any) -> Any:
        """An array, or on a GPU what Triton has in device memory."""
        capsule = tensor.to_dlpack()
        if tensor.is_cpu():
            return np.from_dlpack(_Capsule(capsule))
        told = _DlTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        dtype = (
            "bool" if told.code not in _DLPACK_TYPES else f"{_DLPACK_TYPES[told.code]}{told.bits}"
        )
        return self._memory(
            address=int(told.data or 0) + int(told.byte_offset),
            shape=tuple(int(told.shape[axis]) for axis in range(told.ndim)),
            dtype=np.dtype(dtype),
            owner=(tensor, capsule),
        )

    def _run(self, batch: list[Arrays]) -> list[Any]:
        if not batch:
            return []
        ends = np.cumsum([len(next(iter(arrays.values()))) for arrays in batch])
        joined = {name: np.concatenate([arrays[name] for arrays in batch]) for name in batch[0]}
        answers = self._engine.run(self._outputs, joined)
        split = [np.split(output, ends[:-1]) for output in answers]
        return [self._response(parts) for parts in zip(*split, strict=True)]

    def _response(self, parts: Sequence[NDArray[Any]]) -> Any:
        tensors = [_output(name, p) for name, p in zip(self._outputs, parts, strict=True)]
        return triton.InferenceResponse(output_tensors=tensors)


class _Group:
    """Requests that run together, by their place in what Triton gave."""

    def __init__(self, form: list[Any]) -> None:
        self.form, self.starts = form, [0]
        self.requests: list[tuple[int, dict[str, Any]]] = []

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def add(self, at: int, parts: dict[str, Any], rows: int) -> None:
        self.requests.append((at, parts))
        self.starts.append(self.rows + rows)


class _Input:
    """What the configuration says about one input."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.name: str = entry["name"]
        self._dims = tuple(int(axis) for axis in entry["dims"])
        self._dtype = np.dtype(triton.triton_string_to_numpy(entry["data_type"]))

    def example(self, shape: dict[str, list[int]] | None) -> NDArray[Any]:
        """One row of ones, at the sizes that the engine is tuned for."""
        best = shape["best"][1:] if shape else [max(axis, 1) for axis in self._dims]
        return np.ones([1, *best], self._dtype)

    def problem(self, tensor: Any) -> str:
        """Why this tensor does not fit, or nothing."""
        axes = tensor.shape[1:]
        fits = axes == self._dims or (
            len(axes) == len(self._dims)
            and all(wanted in {-1, axis} for wanted, axis in zip(self._dims, axes, strict=True))
        )
        if fits and tensor.dtype == self._dtype:
            return ""
        wanted = f"{self._dtype} with {list(self._dims)} after the batch axis"
        return f"input {self.name} is {tensor.dtype} of shape {tensor.shape}; it must be {wanted}"


class _Metrics:
    """Where a pipeline's time goes, as counters of Triton's metrics endpoint.

    Triton's own counters see a batch only until the pipeline has taken it.
    """

    def __init__(self, pipeline: Any, args: dict[str, str], model: str) -> None:
        self._pipeline, self._told = pipeline, dict.fromkeys(pipeline.totals(), 0.0)
        labels = {
            "model": model,
            "version": args["model_version"],
            "process": args.get("model_instance_name", ""),
        }
        self._stop, self._counters = threading.Event(), {}
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        with suppress(Exception):  # the server has no metrics, or an older Python backend
            self._family = triton.MetricFamily(
                name="enginegate_runner",
                description="batches, requests, and seconds by stage, of pipelined batches",
                kind=triton.MetricFamily.COUNTER,
            )
            self._counters = {
                name: self._family.Metric(labels={**labels, "counted": name}) for name in self._told
            }
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_METRICS_EVERY_S):
            totals = self._pipeline.totals()
            if totals["batches"] == self._told["batches"]:
                continue
            for name, counter in self._counters.items():
                counter.increment(totals[name] - self._told[name])
            self._told = totals

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


class _Capsule:
    """A tensor that was exported already, as NumPy asks for it.

    NumPy 2 asks with arguments that Triton's tensors do not take: it is refused, and asks again,
    which costs more than all the rest of reading a request.
    """

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_HOST


class _DlTensor(ctypes.Structure):
    """A tensor as DLPack lays it out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _output(name: str, array: NDArray[Any]) -> Any:
    capsule = np.ascontiguousarray(array).__dlpack__()
    tensor = triton.Tensor.from_dlpack(name, capsule)
    _set_capsule_name(capsule, _USED_CAPSULE)
    return tensor


def _respond(respond: Callable[[int, Any], None], at: int, response: Any) -> None:
    """Respond to one request; a client that is gone does not cost its neighbours their answers.

    Where Triton takes no answer, for want of shared memory for one, it may take the reason: a
    request that gets neither blocks its client.
    """
    try:
        respond(at, response)
    except Exception as error:  # noqa: BLE001 - Triton's errors share no base class of their own
        reason = f"an answer could not be sent: {error}"
        triton.Logger.log_warn(f"enginegate: {reason}")
        with suppress(Exception):
            respond(at, _refused(reason))


def _checked(path: Path, recorded: str) -> bytes:
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != recorded:
        raise triton.TritonModelException(
            f"{path} is not the engine that was recorded: sha256 {found}, recorded {recorded}"
        )
    return content


def _package(folder: Path) -> str:
    """Make the version's files a package of their own, which no other version shares.

    Returns:
        Its name.
    """
    package = types.ModuleType(f"enginegate_runner_{next(_PACKAGES)}")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return package.__name__


def _module(package: str, name: str) -> Any:
    """The version's own copy of a module.

    Raises:
        TritonModelException: it is missing.
    """
    (folder,) = sys.modules[package].__path__
    path = Path(folder) / f"{name}.py"
    if not path.is_file():
        raise triton.TritonModelException(f"{path} is missing. Promote the model again.")
    return importlib.import_module(f"{package}.{name}")


def _processes(config: dict[str, Any]) -> int:
    """How many processes run this model on each GPU."""
    return max(
        (int(group.get("count", 1)) for group in config.get("instance_group", [])), default=1
    )


def _refused(reason: str) -> Any:
    error = triton.TritonError(f"enginegate: {reason}")
    return triton.InferenceResponse(output_tensors=[], error=error)
