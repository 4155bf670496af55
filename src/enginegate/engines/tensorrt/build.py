"""The process that builds one plan: ``python -m enginegate.engines.tensorrt.build JOB REPORT``.

It runs alone because a builder may crash, hang or fill the memory. Its log goes to standard error.
"""

import ctypes
import importlib
import resource
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from enginegate.candidate import ShapeRange
from enginegate.engines.tensorrt.process import BuildJob, BuildReport, BuildStep

_DIE_WITH_PARENT = 1
_WORDS = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}
_CARRYING = frozenset({"SHUFFLE", "IDENTITY", "CAST"})  # between a Dequantize and its layer


class _RefusedError(Exception):
    """The library will not build this; the message says why."""


def main(job_path: Path, report_path: Path) -> None:
    """Build, and write the report; without a report the process died."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    job = BuildJob.read(job_path)
    trt: Any = importlib.import_module(job.library)
    _limit_memory(job.memory_mib)
    logger = trt.Logger(trt.Logger.INFO)
    try:
        report = _build(trt, job, logger)
    except _RefusedError as refusal:
        report = BuildReport(error=str(refusal), cancelled=job.cancel.exists())
    report_path.write_bytes(report.canonical_json())
    if job.layers and not report.error:
        _inspect(trt, job, logger)


def _limit_memory(memory_mib: int) -> None:
    """Libraries reserve address space when they load, so the limit is on what comes after."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _build(trt: Any, job: BuildJob, logger: Any) -> BuildReport:
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(job.onnx)):
        raise _RefusedError("\n".join(_told(parser.get_error(i)) for i in range(parser.num_errors)))
    config = _config(trt, builder, job)
    cache = _with_timings(config, job)
    config.progress_monitor = monitor = progress_monitor(trt, job)
    plan = builder.build_serialized_network(network, config)
    del monitor
    if plan is None:
        raise _RefusedError("The builder returned no plan.")
    try:
        job.plan.write_bytes(plan)
    except OSError as error:
        raise _RefusedError(
            f"the plan of {plan.nbytes} bytes cannot be written: {error.strerror}. Free space in "
            f"{job.plan.parent.parent}, or move the store (ENGINEGATE_HOME)."
        ) from error
    if cache is not None:
        job.timing_cache.write_bytes(bytes(config.get_timing_cache().serialize()))
    found = audit(trt, network)
    tf32 = bool(config.get_flag(trt.BuilderFlag.TF32))
    return found.model_copy(update={"tf32": tf32, "flags": _flags(trt, config, job)})


def _told(error: Any) -> str:
    """One parser error, with the node it is about."""
    name, operator = error.node_name(), error.node_operator()
    where = f"node {name!r} ({operator}): " if name or operator else ""
    return f"{where}{error.desc()}"


def _config(trt: Any, builder: Any, job: BuildJob) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace_mib * 2**20)
    (config.set_flag if job.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.hardware_compatibility != "none":
        level = job.hardware_compatibility.upper()
        config.hardware_compatibility_level = _member(trt, "HardwareCompatibilityLevel", level)
    if job.version_compatible:
        config.set_flag(_member(trt, "BuilderFlag", "VERSION_COMPATIBLE"))
    if job.profiles:
        _add_profile(builder, config, job.profiles)
    if job.targets:
        _set_targets(trt, config, job.targets)
    return config


def _member(trt: Any, kind: str, name: str) -> Any:
    """A flag by its name: the numbers differ between versions."""
    found = getattr(getattr(trt, kind, None), name, None)
    if found is None:
        raise _RefusedError(f"{_library(trt)} has no {kind}.{name}. Change it under [tensorrt].")
    return found


def _add_profile(builder: Any, config: Any, profiles: dict[str, ShapeRange]) -> None:
    profile = builder.create_optimization_profile()
    for name, shapes in profiles.items():
        profile.set_shape(name, shapes.min, shapes.best, shapes.max)
    if not profile or config.add_optimization_profile(profile) < 0:
        told = ", ".join(f"{name} {s.min} to {s.max}" for name, s in profiles.items())
        raise _RefusedError(f"These shapes make no valid profile: {told}.")


def _with_timings(config: Any, job: BuildJob) -> Any:
    if not job.keep_timings:
        return None
    known = job.timing_cache.read_bytes() if job.timing_cache.is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is not None and config.set_timing_cache(cache, False):  # noqa: FBT003 - TensorRT's API
        return cache
    return None


def _set_targets(trt: Any, config: Any, targets: tuple[str, ...]) -> None:
    known = trt.ComputeCapability.__members__
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        if target.upper() not in known:
            offered = ", ".join(name.lower() for name in known if name.startswith("SM"))
            raise _RefusedError(
                f"{_library(trt)} has no target {target}; it has {offered}. Change targets "
                "under [tensorrt]."
            )
        config.set_compute_capability(known[target.upper()], index)


def _library(trt: Any) -> str:
    """Name and version of the loaded library."""
    return f"{trt.__name__} {trt.__version__}"


def _flags(trt: Any, config: Any, job: BuildJob) -> dict[str, str]:
    """What the builder was given, by name; numbers of flags mean nothing across versions."""
    members = trt.BuilderFlag.__members__.items()
    return {
        "builder_flags": " ".join(name for name, flag in members if config.get_flag(flag)),
        "hardware_compatibility": job.hardware_compatibility,
        "version_compatible": str(job.version_compatible).lower(),
        "workspace_mib": str(job.workspace_mib),
        "typing": "strong",
    }


def audit(trt: Any, network: Any) -> BuildReport:
    """Layers that multiply, by the type they compute in, and Quantize layers by theirs.

    A layer computes in int8 or fp8 when both operands come from Dequantize layers of that type.
    """
    kinds = trt.LayerType
    multiplying = {kinds.CONVOLUTION, kinds.DECONVOLUTION, kinds.MATRIX_MULTIPLY}
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {each.get_output(n).name: each for each in layers for n in range(each.num_outputs)}
    weighted: Counter[str] = Counter()
    quantise: Counter[str] = Counter()
    for layer in layers:
        if layer.type in multiplying:
            weighted[_computes_in(layer, makers)] += 1
        if layer.type == kinds.QUANTIZE:
            quantise[_word(layer.get_output(0))] += 1
    return BuildReport(weighted=dict(weighted), quantise=dict(quantise))


def _computes_in(layer: Any, makers: dict[str, Any]) -> str:
    operands = [layer.get_input(index) for index in range(min(layer.num_inputs, 2))]
    sources = [_dequantised_from(operand, makers) for operand in operands]
    narrow = set(sources)
    if len(sources) > 1 and len(narrow) == 1 and sources[0]:
        return sources[0]
    return _word(layer.get_output(0))


def _dequantised_from(tensor: Any, makers: dict[str, Any]) -> str:
    """The type that a tensor had before it was dequantised, or nothing if it was not."""
    maker = makers.get(tensor.name)
    while maker is not None and maker.type.name in _CARRYING:
        maker = makers.get(maker.get_input(0).name)
    if maker is None or maker.type.name != "DEQUANTIZE":
        return ""
    return _word(maker.get_input(0))


def _word(tensor: Any) -> str:
    return _WORDS.get(tensor.dtype.name, "other")


def progress_monitor(trt: Any, job: BuildJob) -> Any:
    """A monitor that writes steps to ``job.progress`` and stops when ``job.cancel`` exists.

    The base class belongs to the library that was chosen, so the class is made here.
    """
    recorder = _Recorder(job.progress)

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, _parent: str | None, num_steps: int) -> None:
            recorder.begin(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            recorder.write(phase_name, step + 1)
            return not job.cancel.exists()

        def phase_finish(self, phase_name: str) -> None:
            recorder.end(phase_name)

    return Monitor()


class _Recorder:
    """Appends steps to a file, from whichever threads the builder uses."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}

    def begin(self, phase: str, steps: int) -> None:
        self._steps[phase] = steps
        self.write(phase, 0)

    def end(self, phase: str) -> None:
        self.write(phase, self._steps.get(phase, 0))

    def write(self, phase: str, step: int) -> None:
        steps = self._steps.get(phase, 0)
        line = BuildStep(phase=phase, step=step, steps=max(steps, step)).canonical_json() + b"\n"
        with self._lock, self._path.open("ab") as file:
            file.write(line)


def _inspect(trt: Any, job: BuildJob, logger: Any) -> None:
    """The layers that the GPU here will run. After the report: loading a plan may crash."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = job.version_compatible
    engine = runtime.deserialize_cuda_engine(job.plan.read_bytes())
    if engine is None or job.layers is None:
        return
    inspector = engine.create_engine_inspector()
    job.layers.write_text(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
