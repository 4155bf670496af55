"""Whether arithmetic or memory traffic limits an engine (Williams, Waterman and Patterson, 2009).

The work of a batch is counted on its graph (`precision.graph_stats`), the device's peak throughput
is measured: large matrix products and large copies, through ONNX Runtime, which serves here too, so
what a library cannot reach is no ceiling. A batch can take no less than its operations at the one
ceiling, and no less than its traffic at the other: the larger of the two limits it.
"""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from onnx import TensorProto, helper
from pydantic import Field, NonNegativeFloat

from enginegate.candidate import Precision
from enginegate.engines.cuda import Device
from enginegate.engines.onnxruntime.gpu import PROVIDER as CUDA
from enginegate.engines.onnxruntime.gpu import load_cuda_libraries, provider
from enginegate.errors import EnginegateError
from enginegate.evidence import Roofline
from enginegate.precision import GraphStats
from enginegate.records import Record

if TYPE_CHECKING:
    from onnxruntime import InferenceSession  # type: ignore[import-untyped]

_SIDE: dict[Device, int] = {"cpu": 1024, "cuda": 8192}
_CHAIN: dict[Device, int] = {"cpu": 1, "cuda": 4}
_COPIED_BYTES: dict[Device, int] = {"cpu": 128 << 20, "cuda": 1 << 30}
_BLOCK = 512
_REPEATS = 5
_LIMIT_S = 0.4
_OPSET, _IR = 17, 8
_MIN_COVERED = 0.8  # with less of the graph counted, which of the two limits is a guess
_TYPES = {
    Precision.FP32: TensorProto.FLOAT,
    Precision.TF32: TensorProto.FLOAT,
    Precision.FP16: TensorProto.FLOAT16,
}


class PeakThroughput(Record):
    """What was reached; None where it could not be measured."""

    flops_per_s: NonNegativeFloat | None = Field(
        default=None, description="of matrix products, on the whole device"
    )
    bytes_per_s: NonNegativeFloat | None = Field(
        default=None, description="read and written by a copy"
    )
    one_thread_flops_per_s: NonNegativeFloat | None = Field(
        default=None, description="on a processor, with one thread, as one instance has"
    )

    def flops_for(self, instances: int) -> float | None:
        """What so many instances can reach: on a processor, each has one thread."""
        if self.flops_per_s is None or self.one_thread_flops_per_s is None:
            return self.flops_per_s
        return min(self.flops_per_s, instances * self.one_thread_flops_per_s)


def peak_throughput(device: Device, precision: Precision) -> PeakThroughput:
    """Measure the first device of that kind; takes about a second, so keep the answer.

    Arithmetic is measured for fp32, tf32 and fp16 on a GPU and for fp32 on a processor; for other
    precisions it is None. Without ONNX Runtime for the device everything is None.

    Raises:
        EnginegateError: ONNX Runtime failed on the device, e.g. for want of memory.
    """
    try:
        import onnxruntime  # noqa: PLC0415
    except ImportError:
        return PeakThroughput()
    if device == "cuda" and CUDA not in onnxruntime.get_available_providers():
        return PeakThroughput()
    try:
        return _of_processor(precision) if device == "cpu" else _of_gpu(precision)
    except Exception as error:  # ONNX Runtime's errors share no base class of its own
        raise EnginegateError(
            f"ONNX Runtime {onnxruntime.__version__} could not measure what this {device} device "
            f"can do: {str(error).strip()}\nFree its memory of other programs and try again."
        ) from error


def roofline(
    stats: GraphStats,
    peak: PeakThroughput,
    *,
    samples_per_s: float | None = None,
    instances: int = 1,
) -> Roofline:
    """What limits one batch, and how near its limit the engine comes.

    Args:
        stats: of one batch.
        peak: of the device it runs on, in its precision.
        samples_per_s: what was measured, all instances together; None: not measured.
        instances: that ran; on a processor each has one thread.
    """
    flops_per_s = peak.flops_for(instances)
    limit_s = _limit_s(stats, flops_per_s, peak.bytes_per_s)
    reached = None
    if limit_s and samples_per_s is not None:
        reached = limit_s * samples_per_s / stats.batch_size
    return Roofline(
        batch_size=stats.batch_size,
        flops=stats.flops,
        bytes_moved=stats.bytes_moved,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=peak.bytes_per_s,
        bound=_bound(stats, flops_per_s, peak.bytes_per_s),
        reached=reached,
    )


def _limit_s(
    stats: GraphStats, flops_per_s: float | None, bytes_per_s: float | None
) -> float | None:
    if not flops_per_s or not bytes_per_s:
        return None
    return max(stats.flops / flops_per_s, stats.bytes_moved / bytes_per_s)


def _bound(
    stats: GraphStats, flops_per_s: float | None, bytes_per_s: float | None
) -> Literal["compute", "memory", "unknown"]:
    if not flops_per_s or not bytes_per_s or not stats.flops or stats.covered < _MIN_COVERED:
        return "unknown"
    by_arithmetic = stats.flops / flops_per_s >= stats.bytes_moved / bytes_per_s
    return "compute" if by_arithmetic else "memory"


def _of_processor(precision: Precision) -> PeakThroughput:
    cores = len(os.sched_getaffinity(0))
    bytes_per_s = _copied_per_s(cores)
    if precision is not Precision.FP32:
        return PeakThroughput(bytes_per_s=bytes_per_s)
    one = _multiplied_per_s("cpu", precision, threads=1)
    every = _multiplied_per_s("cpu", precision, threads=cores) if cores > 1 else one
    return PeakThroughput(
        flops_per_s=max(one, every), bytes_per_s=bytes_per_s, one_thread_flops_per_s=one
    )


def _of_gpu(precision: Precision) -> PeakThroughput:
    load_cuda_libraries()
    session = _session("cuda", _negation(), Precision.FP32, threads=1)
    if session.get_providers()[0] != CUDA:
        return PeakThroughput()
    numbers = np.zeros(_COPIED_BYTES["cuda"] // 4, np.float32)
    copied = 2 * numbers.nbytes / _fastest_s(_on_device(session, {"x": numbers}, "cuda"))
    if precision not in _TYPES:
        return PeakThroughput(bytes_per_s=copied)
    return PeakThroughput(
        flops_per_s=_multiplied_per_s("cuda", precision, threads=1), bytes_per_s=copied
    )


def _multiplied_per_s(device: Device, precision: Precision, *, threads: int) -> float:
    """Operations a second of ``x @ w @ w ...`` with square matrices."""
    side, chain = _SIDE[device], _CHAIN[device]
    session = _session(device, _products(chain, precision), precision, threads=threads)
    dtype = np.float16 if precision is Precision.FP16 else np.float32
    # Zeros would draw less power, and so clock higher, than anything real.
    block = np.random.default_rng(0).standard_normal((_BLOCK, _BLOCK), np.float32) / np.sqrt(side)
    matrix = np.tile(block.astype(dtype), (side // _BLOCK, side // _BLOCK))
    run = _on_device(session, {"x": matrix, "w": matrix}, device)
    return chain * 2.0 * side**3 / _fastest_s(run)


def _copied_per_s(threads: int) -> float:
    """Bytes a second, read and written, of a copy that every thread does a part of."""
    source = np.ones(_COPIED_BYTES["cpu"] // 4, np.float32)
    target = np.empty_like(source)
    target.fill(0.0)
    parts = list(zip(np.array_split(source, threads), np.array_split(target, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))

        return 2.0 * source.nbytes / _fastest_s(copy)


def _fastest_s(run: Callable[[], object]) -> float:
    """The shortest of a few runs after one that warms up: what is in the way only slows down."""
    run()
    took_s: list[float] = []
    end_s = time.perf_counter() + _LIMIT_S
    while len(took_s) < _REPEATS and (not took_s or time.perf_counter() < end_s):
        started_s = time.perf_counter()
        run()
        took_s.append(time.perf_counter() - started_s)
    return min(took_s)


def _on_device(
    session: "InferenceSession", inputs: dict[str, Any], device: Device
) -> Callable[[], object]:
    """A run whose inputs and output stay on the device."""
    from onnxruntime import OrtValue  # noqa: PLC0415

    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array, device, 0))
    first = next(iter(inputs.values()))
    made = OrtValue.ortvalue_from_shape_and_type(first.shape, first.dtype, device, 0)
    binding.bind_ortvalue_output("y", made)
    return lambda: session.run_with_iobinding(binding)


def _session(
    device: Device, model: bytes, precision: Precision, *, threads: int
) -> "InferenceSession":
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    tf32 = precision is Precision.TF32
    providers = ["CPUExecutionProvider"] if device == "cpu" else [provider(tf32=tf32, graphs=False)]
    return ort.InferenceSession(model, options, providers=providers)


def _products(chain: int, precision: Precision) -> bytes:
    names = ["x", *(f"x{number}" for number in range(1, chain)), "y"]
    nodes = [
        helper.make_node("MatMul", [before, "w"], [after])
        for before, after in itertools.pairwise(names)
    ]
    return _model(nodes, ("x", "w"), _TYPES[precision], ("n", "n"))


def _negation() -> bytes:
    """What reads and writes everything once, and cannot be left out as a copy could."""
    return _model([helper.make_node("Neg", ["x"], ["y"])], ("x",), TensorProto.FLOAT, ("n",))


def _model(nodes: list[Any], inputs: tuple[str, ...], kind: int, shape: tuple[str, ...]) -> bytes:
    graph = helper.make_graph(
        nodes,
        "ceiling",
        [helper.make_tensor_value_info(name, kind, shape) for name in inputs],
        [helper.make_tensor_value_info("y", kind, shape)],
    )
    opset = helper.make_opsetid("", _OPSET)
    return bytes(
        helper.make_model(graph, opset_imports=[opset], ir_version=_IR).SerializeToString()
    )
