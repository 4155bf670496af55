"""Sessions of ONNX Runtime: on which provider, at which optimisation level, and what they became.

ONNX Runtime falls back to the CPU without an error when the CUDA libraries cannot be loaded. So
the provider that was asked for and the one that was got are different things here.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx

from enginegate.candidate import Precision, ShapeRange, TensorSpec
from enginegate.data import Array, Tensors
from enginegate.engines import cuda
from enginegate.engines.batching import check_batch, run_rows, timed_repeat
from enginegate.engines.cuda import Device
from enginegate.engines.onnxruntime.gpu import PROVIDER as CUDA
from enginegate.engines.onnxruntime.gpu import Bucketed, load_cuda_libraries, provider
from enginegate.engines.protocol import Runner
from enginegate.errors import BuildError, InputError, ModelError
from enginegate.precision import executed_layers
from enginegate.precision.deadline import limit_opening, run_in_time

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, SessionOptions  # type: ignore[import-untyped]

CPU = "CPUExecutionProvider"
PROVIDERS: dict[Device, str] = {"cpu": CPU, "cuda": CUDA}
INTRA_OP_THREADS = 1
"""Threads inside one node, unless the policy says otherwise: what engines are validated, measured
and served with."""
REMEDY = "pip install 'enginegate[cpu]'"
PRECISIONS: dict[Device, frozenset[Precision]] = {
    "cpu": frozenset({Precision.FP32, Precision.INT8}),
    "cuda": frozenset(Precision) - {Precision.FP8},
}
_WEIGHTS_BESIDE = "session.optimized_model_external_initializers_file_name"
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(bool)": "bool",
}
_MULTIPLYING = ("Conv", "Gemm", "MatMul", "Attention", "GRU", "LSTM", "RNN")


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session, and what the runtime made of the model.

    Attributes:
        session: ready to run.
        provider: what really runs it.
        graphs: whether CUDA graphs may be captured.
        layers: Conv, Gemm, MatMul and recurrent layers of the optimised graph, by type.
        copies: copies between CPU and GPU that the runtime put into the graph.
        elsewhere: layers that multiply and were left to another provider.
        on_cpu: types of the operators that a session on a GPU leaves to the CPU.
    """

    session: "InferenceSession"
    provider: str
    graphs: bool = False
    layers: dict[str, int] | None = None
    copies: int = 0
    elsewhere: int = 0
    on_cpu: tuple[str, ...] = ()


def version() -> str | None:
    """The installed version, or None."""
    try:
        import onnxruntime  # noqa: PLC0415
    except ImportError:
        return None
    return str(onnxruntime.__version__)


def device_for(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device that sessions are opened for; whether they get it is found out when opened."""
    if wanted != "auto":
        return wanted
    if version() is None or cuda.gpu() is None:
        return "cpu"
    import onnxruntime  # noqa: PLC0415

    return "cuda" if CUDA in onnxruntime.get_available_providers() else "cpu"


def providers() -> frozenset[str]:
    """The execution providers that the installed ONNX Runtime has; none if it is not installed."""
    if version() is None:
        return frozenset()
    import onnxruntime  # noqa: PLC0415

    return frozenset(onnxruntime.get_available_providers())


def check_precision(precision: Precision, device: Device) -> None:
    """Refuse what the provider or the GPU has no arithmetic for.

    Raises:
        BuildError: names the precision, the device and what to change.
    """
    why = lacks(precision, device, cuda.gpu() if device == "cuda" else None)
    if why:
        raise BuildError(f"{why}. Drop {precision} from onnxruntime under [candidates].")


def lacks(precision: Precision, device: Device, gpu: cuda.Gpu | None) -> str:
    """Why a device has no arithmetic for a precision; empty when it has."""
    if precision not in PRECISIONS[device]:
        instead = (
            "that needs the CUDA provider and a GPU"
            if device == "cpu" and precision in PRECISIONS["cuda"]
            else "TensorRT has fp8"
        )
        computes = "fp32 or int8" if device == "cpu" else "fp32, tf32, fp16, bf16 or int8"
        return (
            f"ONNX Runtime's {PROVIDERS[device]} computes in {computes}, not in {precision}; "
            f"{instead}"
        )
    old = gpu is not None and gpu.capability_number < cuda.AMPERE
    if old and precision in {Precision.TF32, Precision.BF16}:
        return f"{precision} needs compute capability 8.0, and the GPU here is {gpu}"
    return ""


def open_session(
    path: Path,
    precision: Precision,
    device: Device,
    *,
    graphs: bool = False,
    inspect: bool = False,
    threads: int = INTRA_OP_THREADS,
) -> OpenSession:
    """A session as it is served: every optimisation the precision allows.

    Args:
        graphs: capture CUDA graphs if the whole model can be captured.
        inspect: also count the layers of the optimised graph.
        threads: of the processor, inside one node of the graph.

    Raises:
        ModelError: ONNX Runtime cannot load the model.
    """
    if device == "cpu":
        return _opened(path, precision, [CPU], inspect=inspect, threads=threads)
    load_cuda_libraries()
    if graphs:
        with suppress(ModelError):
            found = _opened(path, precision, [_cuda(precision, graphs=True)], inspect=inspect)
            return found if found.provider == CUDA else _without_graphs(found)
    return _opened(path, precision, [_cuda(precision, graphs=False)], inspect=inspect)


def open_plain(path: Path) -> "InferenceSession":
    """A session on the CPU that optimises nothing, to compare others with."""
    options = _options(level="ORT_DISABLE_ALL")
    return _load(path, options, [CPU])


def level_for(precision: Precision) -> str:
    """The optimisation level; above basic, FP8 pairs are fused into operators nobody has."""
    return "ORT_ENABLE_BASIC" if precision is Precision.FP8 else "ORT_ENABLE_ALL"


def write_portable(path: Path, target: Path) -> None:
    """Write the model with the optimisations that hold on any hardware and version."""
    options = _options(level="ORT_ENABLE_BASIC")
    options.optimized_model_filepath = str(target)
    _load(path, options, [CPU])


def specs(session: "InferenceSession") -> tuple[TensorSpec, ...]:
    """The inputs as ONNX Runtime tells them."""
    return tuple(
        TensorSpec(
            name=value.name,
            dtype=_TYPES.get(value.type, value.type),
            shape=tuple(axis if isinstance(axis, int) else -1 for axis in value.shape),
        )
        for value in session.get_inputs()
    )


@contextmanager
def open_onnx(path: Path) -> Iterator[Runner]:
    """Load an FP32 ONNX file to compare others with: no optimisation, any batch up to 64 rows.

    Raises:
        ModelError: ONNX Runtime cannot load it.
    """
    session = open_plain(path)
    yield SessionRunner(session, specs(session), limit=64)


@dataclass(frozen=True, slots=True)
class SessionRunner:
    """Runs at most ``limit`` rows at a time."""

    session: "InferenceSession"
    specs: tuple[TensorSpec, ...]
    limit: int

    @property
    def device(self) -> str:
        """The provider that runs it."""
        return str(self.session.get_providers()[0])

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of any number of rows."""
        return run_rows(inputs, self.specs, limit=self.limit, run_once=self._once)

    @contextmanager
    def bound(self, inputs: Tensors) -> Iterator[Callable[[int], float]]:
        """Plain runs on one batch: a processor reads host memory where it lies."""
        check_batch(inputs, self.specs, limit=self.limit)
        names = [output.name for output in self.session.get_outputs()]
        yield timed_repeat(lambda: run_in_time(self.session, names, inputs))

    def _once(self, inputs: Tensors) -> Tensors:
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, run_in_time(self.session, names, inputs), strict=True))


@dataclass(frozen=True, slots=True)
class GpuRunner:
    """Runs at most the largest bucket at a time."""

    bucketed: Bucketed
    specs: tuple[TensorSpec, ...]
    device: str = CUDA

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of any number of rows."""
        limit = self.bucketed.buckets[-1]
        return run_rows(inputs, self.specs, limit=limit, run_once=self.bucketed.run)

    @contextmanager
    def bound(self, inputs: Tensors) -> Iterator[Callable[[int], float]]:
        """Runs of one bucket's buffers; ONNX Runtime waits for the device after each run."""
        check_batch(inputs, self.specs, limit=self.bucketed.buckets[-1])
        yield timed_repeat(self.bucketed.loaded(inputs).execute)


def warm(
    opened: OpenSession,
    again: Callable[[], OpenSession],
    sizes: tuple[int, ...],
    shapes: Mapping[str, ShapeRange],
) -> Bucketed:
    """Every bucket settled in a session of its own, and captured where graphs may be.

    Args:
        opened: the first bucket's.
        again: opens one more like it.
        shapes: by input; dynamic axes besides the batch are settled at their best size.
    """
    ready = [opened.session]
    bucketed = Bucketed(
        lambda: ready.pop() if ready else again().session, sizes, graphs=opened.graphs
    )
    examples = {spec.name: _example(spec, shapes.get(spec.name)) for spec in specs(opened.session)}
    bucketed.warm_up(examples)
    return bucketed


def _example(spec: TensorSpec, shape: ShapeRange | None) -> Array:
    """One row of ones: an index that exists, a mask that hides nothing."""
    best = shape.best[1:] if shape else [max(axis, 1) for axis in spec.shape[1:]]
    row: Array = np.ones((1, *best), spec.dtype)
    return row


def _without_graphs(found: OpenSession) -> OpenSession:
    return replace(found, graphs=False, copies=0)


def _cuda(precision: Precision, *, graphs: bool) -> tuple[str, dict[str, str]]:
    return provider(tf32=precision is Precision.TF32, graphs=graphs)


def _opened(
    path: Path,
    precision: Precision,
    providers: list[Any],
    *,
    inspect: bool,
    threads: int = INTRA_OP_THREADS,
) -> OpenSession:
    options = _options(level=level_for(precision))
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if not inspect:
        session = _load(path, options, providers)
        return OpenSession(session, session.get_providers()[0], _graphs_on(session))
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    with tempfile.TemporaryDirectory(prefix="enginegate-optimised-") as scratch:
        optimised = Path(scratch) / "model.onnx"
        options.optimized_model_filepath = str(optimised)
        options.add_session_config_entry(_WEIGHTS_BESIDE, "weights.bin")
        session = _load(path, options, providers)
        graph = onnx.load(optimised, load_external_data=False)
    left = _left_over(session)
    return OpenSession(
        session,
        session.get_providers()[0],
        _graphs_on(session),
        layers=executed_layers(graph),
        copies=sum(node.op_type.startswith("Memcpy") for node in graph.graph.node),
        elsewhere=sum(any(word in name for word in _MULTIPLYING) for name in left),
        on_cpu=tuple(sorted(set(left))),
    )


def is_on(setting: str) -> bool:
    """Whether a provider's setting is on, as it tells it."""
    return setting.lower() in {"1", "true"}


def _graphs_on(session: "InferenceSession") -> bool:
    told = session.get_provider_options().get(CUDA, {})
    return is_on(told.get("enable_cuda_graph", ""))


def _left_over(session: "InferenceSession") -> list[str]:
    """Types of the operators that are not on the session's first provider, one each."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return []
    return [
        node.op_type
        for group in session.get_provider_graph_assignment_info()
        if group.ep_name != session.get_providers()[0]
        for node in group.get_nodes()
    ]


def _options(*, level: str) -> "SessionOptions":
    import onnxruntime as ort  # noqa: PLC0415

    # Warnings about attempts that fall back here would otherwise be coloured lines of a worker.
    ort.set_default_logger_severity(3)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _load(path: Path, options: "SessionOptions", providers: list[Any]) -> "InferenceSession":
    import onnxruntime as ort  # noqa: PLC0415

    try:
        with warnings.catch_warnings(), limit_opening(options, what=str(path)):
            # A provider that is missing shows in what the session has, not by a warning.
            warnings.filterwarnings("ignore", "Specified provider")
            return ort.InferenceSession(str(path), options, providers=providers)
    except InputError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no base class of its own
        raise ModelError(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {str(error).strip()}\n"
            "If it names an operator, export the model at another opset or without it."
        ) from error
