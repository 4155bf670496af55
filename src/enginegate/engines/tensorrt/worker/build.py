"""One plan, built from an ONNX file."""

import json
import resource
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from .library import import_library, logger, members, named

_WORDS = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}
_SHARING = "PROFILE_SHARING_0806"
_STRATEGIES = "ExecutionContextAllocationStrategy"  # came with TensorRT 10, as sharing for all did
_CARRYING = frozenset({"SHUFFLE", "IDENTITY", "CAST"})  # between a Dequantize and its layer
_TIMED = "Computing costs for"  # how TensorRT 8's log announces each layer that it times


class RefusedError(Exception):
    """The library will not build this; the message says why."""


def write_plan(job: dict[str, Any]) -> dict[str, Any]:
    """Write ``plan``; the report has ``error`` (empty when it was built), or what was built.

    Job:
        module: import name of the library.
        onnx, plan: paths.
        profiles: input -> {min, best, max}, each a shape.
        set_flags, clear_flags: names of builder flags.
        strong: whether the network is strongly typed.
        keep: names of layers that stay FP32 in a weakly typed network.
        tactic_sources: names, or null for the library's own choice.
        optimization_level: 0 to 5, or null for the library's own.
        hardware_compatibility: name, or ``none``.
        targets: compute capabilities to build for ahead of time.
        workspace_mib, memory_mib: limits; memory_mib 0 is none.
        timing_cache: path that is read and written, or empty.
        progress: path that steps are appended to, one JSON a line.
        cancel: path; the builder stops at its next step when it exists.
    """
    trt = import_library([job["module"]])
    _limit_memory(job["memory_mib"])
    recorder = ProgressRecorder(Path(job["progress"]))
    watched = None if hasattr(trt, "IProgressMonitor") else recorder.count_timed
    try:
        return _build(trt, job, logger(trt, watched), recorder)
    except (RefusedError, LookupError) as refusal:
        message = str(refusal.args[0]) if refusal.args else repr(refusal)
        return {"error": message, "cancelled": Path(job["cancel"]).exists()}


def _limit_memory(memory_mib: int) -> None:
    """Libraries reserve address space when they load, so the limit is on what comes after."""
    if not memory_mib:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _build(trt: Any, job: dict[str, Any], log: Any, recorder: "ProgressRecorder") -> dict[str, Any]:
    builder = _builder(trt, log)
    network = builder.create_network(_creation_flags(trt, strong=job["strong"]))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(job["onnx"]):
        raise RefusedError("\n".join(_told(parser.get_error(i)) for i in range(parser.num_errors)))
    config = _config(trt, builder, job)
    if job["keep"]:
        _keep(trt, network, config, job["keep"])
    had_timings = bool(job["timing_cache"]) and Path(job["timing_cache"]).is_file()
    cache, known_bytes = _with_timings(config, job["timing_cache"])
    recorder.layers = network.num_layers
    if hasattr(trt, "IProgressMonitor"):
        config.progress_monitor = monitor = progress_monitor(trt, recorder, Path(job["cancel"]))
    else:
        monitor = None
    plan = builder.build_serialized_network(network, config)
    del monitor
    if plan is None:
        raise RefusedError("The builder returned no plan.")
    _saved(Path(job["plan"]), plan)
    if cache is not None:
        Path(job["timing_cache"]).write_bytes(bytes(config.get_timing_cache().serialize()))
    on = [name for name in members(trt, "BuilderFlag") if config.get_flag(_flag(trt, name))]
    return {
        **audit(trt, network),
        "error": "",
        "cancelled": False,
        "tf32": "TF32" in on,
        "builder_flags": on,
        "shares_profile": _shares_profile(trt, config),
        "timings_read": known_bytes,
        "timings_refused": had_timings and not known_bytes,
    }


def _builder(trt: Any, log: Any) -> Any:
    try:
        return trt.Builder(log)
    except TypeError as error:  # how the bindings say that the library made none
        raise RefusedError(
            f"{trt.__name__} {trt.__version__} makes no builder; its log says why. Check the GPU, "
            "the driver, and that its libraries are whole."
        ) from error


def _creation_flags(trt: Any, *, strong: bool) -> int:
    known = members(trt, "NetworkDefinitionCreationFlag")
    wanted = ["STRONGLY_TYPED"] if strong else ["EXPLICIT_BATCH"]
    kind = trt.NetworkDefinitionCreationFlag
    return sum(1 << int(getattr(kind, name)) for name in wanted if name in known)


def _flag(trt: Any, name: str) -> Any:
    return named(trt, "BuilderFlag", name)


def _told(error: Any) -> str:
    """One parser error, with the node it is about; TensorRT 8 tells only the node's number."""
    if not hasattr(error, "node_name"):
        return f"node {error.node()}: {error.desc()}"
    name, operator = error.node_name(), error.node_operator()
    where = f"node {name!r} ({operator}): " if name or operator else ""
    return f"{where}{error.desc()}"


def _config(trt: Any, builder: Any, job: dict[str, Any]) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job["workspace_mib"] * 2**20)
    for name in job["set_flags"]:
        config.set_flag(_flag(trt, name))
    for name in job["clear_flags"]:
        config.clear_flag(_flag(trt, name))
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job["hardware_compatibility"] != "none":
        level = job["hardware_compatibility"].upper()
        config.hardware_compatibility_level = named(trt, "HardwareCompatibilityLevel", level)
    if job["tactic_sources"] is not None:
        sources = (named(trt, "TacticSource", name) for name in job["tactic_sources"])
        if not config.set_tactic_sources(sum(1 << int(source) for source in sources)):
            raise RefusedError(f"It refuses tactic sources {', '.join(job['tactic_sources'])}.")
    if job["optimization_level"] is not None:
        config.builder_optimization_level = job["optimization_level"]
    if job["profiles"]:
        _add_profile(builder, config, job["profiles"])
        _share_profile(trt, config)
    if job["targets"]:
        _set_targets(trt, config, job["targets"])
    return config


def _add_profile(builder: Any, config: Any, profiles: dict[str, Any]) -> None:
    profile = builder.create_optimization_profile()
    for name, shapes in profiles.items():
        profile.set_shape(name, tuple(shapes["min"]), tuple(shapes["best"]), tuple(shapes["max"]))
    if not profile or config.add_optimization_profile(profile) < 0:
        told = ", ".join(
            f"{name} {tuple(s['min'])} to {tuple(s['max'])}" for name, s in profiles.items()
        )
        raise RefusedError(f"These shapes make no valid profile: {told}.")


def _share_profile(trt: Any, config: Any) -> None:
    """Let several execution contexts use the profile: a preview in 8.6, always so from 10 on."""
    if _SHARING in members(trt, "PreviewFeature") and not hasattr(trt, _STRATEGIES):
        config.set_preview_feature(named(trt, "PreviewFeature", _SHARING), True)  # noqa: FBT003


def _shares_profile(trt: Any, config: Any) -> bool:
    if hasattr(trt, _STRATEGIES):
        return True
    known = _SHARING in members(trt, "PreviewFeature")
    return known and bool(config.get_preview_feature(named(trt, "PreviewFeature", _SHARING)))


def _keep(trt: Any, network: Any, config: Any, names: list[str]) -> None:
    """Hold layers at FP32: their arithmetic and the outputs that floats leave them in."""
    waiting = set(names)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.name not in waiting:
            continue
        waiting.discard(layer.name)
        layer.precision = trt.DataType.FLOAT
        for position in range(layer.num_outputs):
            if layer.get_output(position).dtype in {trt.DataType.FLOAT, trt.DataType.HALF}:
                layer.set_output_type(position, trt.DataType.FLOAT)
    if waiting:
        raise RefusedError(
            f"The network has no layer {', '.join(sorted(waiting))} to keep at fp32."
        )
    config.set_flag(_flag(trt, "OBEY_PRECISION_CONSTRAINTS"))


def _with_timings(config: Any, path: str) -> tuple[Any, int]:
    """The cache of timings that the builder uses, and how many bytes of it were known before.

    A cache that cannot be read is replaced by an empty one, with no more than an error in the log:
    TensorRT 8.6 does so without cuBLAS. So what it holds is compared with what it was given.
    """
    if not path:
        return None, 0
    known = Path(path).read_bytes() if Path(path).is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is not None and config.set_timing_cache(cache, False):  # noqa: FBT003 - TensorRT's API
        is_read = bool(known) and cache.serialize().nbytes >= len(known)
        return cache, len(known) if is_read else 0
    return None, 0


def _set_targets(trt: Any, config: Any, targets: list[str]) -> None:
    known = trt.ComputeCapability.__members__
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        if target.upper() not in known:
            offered = ", ".join(name.lower() for name in known if name.startswith("SM"))
            raise RefusedError(
                f"{trt.__name__} {trt.__version__} has no target {target}; it has {offered}. "
                "Change targets under [tensorrt]."
            )
        config.set_compute_capability(known[target.upper()], index)


def _saved(path: Path, plan: Any) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(plan)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RefusedError(
            f"the plan of {plan.nbytes} bytes cannot be written: {error.strerror}. Free space in "
            f"{path.parent.parent}, or move the store (ENGINEGATE_HOME)."
        ) from error


def audit(trt: Any, network: Any) -> dict[str, Any]:
    """Layers that multiply, by the type they compute in, and Quantize layers by theirs.

    A layer computes in int8 or fp8 when both operands come from Dequantize layers of that type. Of
    a weakly typed network these are the types that were asked for, not those that will run.
    """
    multiplying = {"CONVOLUTION", "DECONVOLUTION", "MATRIX_MULTIPLY", "FULLY_CONNECTED"}
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {each.get_output(n).name: each for each in layers for n in range(each.num_outputs)}
    weighted: Counter[str] = Counter()
    quantise: Counter[str] = Counter()
    for layer in layers:
        if layer.type.name in multiplying:
            weighted[_computes_in(layer, makers)] += 1
        if layer.type == trt.LayerType.QUANTIZE:
            quantise[_word(layer.get_output(0))] += 1
    return {"weighted": dict(weighted), "quantise": dict(quantise)}


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


def progress_monitor(trt: Any, recorder: "ProgressRecorder", cancel: Path) -> Any:
    """A monitor that writes steps and stops when ``cancel`` exists.

    The base class belongs to the library that was chosen, so the class is made here.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, _parent: str | None, num_steps: int) -> None:
            recorder.begin(phase_name, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            recorder.write(phase_name, step + 1)
            return not cancel.exists()

        def phase_finish(self, phase_name: str) -> None:
            recorder.end(phase_name)

    return Monitor()


class ProgressRecorder:
    """Appends steps to a file, from whichever threads the builder uses.

    Attributes:
        layers: of the network; how many a builder without a monitor will time at most.
    """

    def __init__(self, path: Path) -> None:
        self.layers = 0
        self._path = path
        self._lock = threading.Lock()
        self._steps: dict[str, int] = {}
        self._timed = 0

    def begin(self, phase: str, steps: int) -> None:
        """A phase of so many steps begins."""
        self._steps[phase] = steps
        self.write(phase, 0)

    def end(self, phase: str) -> None:
        """A phase is over."""
        self.write(phase, self._steps.get(phase, 0))

    def write(self, phase: str, step: int) -> None:
        """So many steps of a phase are done."""
        steps = self._steps.get(phase, 0)
        line = json.dumps({"phase": phase, "step": step, "steps": max(steps, step)}) + "\n"
        with self._lock, self._path.open("a") as file:
            file.write(line)

    def count_timed(self, message: str) -> None:
        """Take one line of a log that has no other sign of progress."""
        if _TIMED in message:
            self._timed += 1
            self._steps["timing layers"] = self.layers
            self.write("timing layers", self._timed)
