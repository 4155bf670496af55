"""The process that builds one plan: ``python -m enginegate.engines.tensorrt_build JOB REPORT``.

It runs alone because a builder may crash, hang or fill the memory. Its log goes to standard error.
"""

import ctypes
import importlib
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from enginegate.engines.tensorrt_job import Job, Report

_WORDS = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}
_DIE_WITH_PARENT = 1


class _RefusedError(Exception):
    """The library will not build this; the message says why."""


def main(job_path: Path, report_path: Path) -> None:
    """Build, and write the report; without a report the process died."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    job = Job.read(job_path)
    trt: Any = importlib.import_module(job.library)
    _limit_memory(job.memory_mib)
    try:
        report = _build(trt, job)
    except _RefusedError as refusal:
        report = Report(error=str(refusal))
    report_path.write_bytes(report.canonical_json())


def _limit_memory(memory_mib: int) -> None:
    """Libraries reserve address space when they load, so the limit is on what comes after."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _build(trt: Any, job: Job) -> Report:
    logger = trt.Logger(trt.Logger.INFO)
    builder = trt.Builder(logger)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(job.onnx)):
        raise _RefusedError("\n".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
    config = _config(trt, builder, job)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise _RefusedError("The builder returned no plan.")
    job.plan.write_bytes(plan)
    return _audit(trt, network, tf32=config.get_flag(trt.BuilderFlag.TF32))


def _config(trt: Any, builder: Any, job: Job) -> Any:
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace_mib * 2**20)
    (config.set_flag if job.tf32 else config.clear_flag)(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    profile = builder.create_optimization_profile()
    for spec in job.inputs:
        shapes = ((rows, *spec.shape[1:]) for rows in (1, job.max_batch_size, job.max_batch_size))
        profile.set_shape(spec.name, *shapes)
    if not profile or config.add_optimization_profile(profile) < 0:
        raise _RefusedError(f"Batches of 1 to {job.max_batch_size} make no valid profile.")
    if job.targets:
        _set_targets(trt, config, job.targets)
    return config


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


def _audit(trt: Any, network: Any, *, tf32: bool) -> Report:
    """Which types the parser gave the layers: the proof that does not need a GPU."""
    kinds = trt.LayerType
    multiplying = {kinds.CONVOLUTION, kinds.DECONVOLUTION, kinds.MATRIX_MULTIPLY}
    weighted: Counter[str] = Counter()
    quantise: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        word = _WORDS.get(layer.get_output(0).dtype.name, "other")
        weighted[word] += layer.type in multiplying
        quantise[word] += layer.type == kinds.QUANTIZE
    return Report(weighted=dict(+weighted), quantise=dict(+quantise), tf32=bool(tf32))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
