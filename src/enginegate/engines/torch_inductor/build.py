"""The process that compiles one package: ``python -m …torch_inductor.build JOB REPORT``.

It runs alone because Inductor leaks and may crash. Its log goes to standard error.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginegate.engines.torch_inductor.foreign import (
    ROUNDING,
    PackageRefusedError,
    brief,
    share_apart,
    try_foreign,
)
from enginegate.engines.torch_inductor.process import PackageJob, PackageReport
from enginegate.engines.torch_inductor.run import BucketedPackage, open_calls
from enginegate.engines.torch_inductor.typed_program import (
    AxisSizes,
    torch_type,
    traced_again,
    typed_module,
)
from enginegate.errors import BuildError

if TYPE_CHECKING:
    import torch

_DIE_WITH_PARENT = 1
_CPP = "libstdc++.so"
_SEED = 20
_MULTIPLYING = ("conv", "linear", "addmm", "matmul", "bmm", "mm", "lstm", "gru", "rnn")
_TRACEABLE = 2  # tracing takes sizes of 1 for constants


def main(job_path: Path, report_path: Path) -> None:
    """Compile, try, and write the report; without a report the process died."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    job = PackageJob.read(job_path)
    if job.device == "cpu":  # CUDA reserves more address space than there is memory
        limit = _address_space() + job.memory_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        report = compile_job(job)
    except (PackageRefusedError, BuildError) as refusal:
        report = PackageReport(error=str(refusal))
    report_path.write_bytes(report.canonical_json())


def compile_job(job: PackageJob) -> PackageReport:
    """Write the package, run it at its smallest and largest batch, and see it refuse one more.

    A package that is there already, made by something else, is only run.
    """
    import torch  # noqa: PLC0415

    torch.manual_seed(_SEED)
    torch.set_num_threads(1)  # what a package for a CPU is generated for
    use_tf32(on=job.precision == "tf32")
    if job.program is None:
        return PackageReport(tried=try_foreign(job))
    program = torch.export.load(job.program)
    statistics, weights = _statistics(program), _weights(program)
    shapes = _shapes(program, job)
    module = typed_module(program, dtype=torch_type(job.precision), device=job.device)
    try:
        if job.buckets:
            _compile_buckets(module, job, shapes)
        else:
            _compile_dynamic(module, job, shapes)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise PackageRefusedError(f"{type(error).__name__}: {brief(error)}") from error
    return PackageReport(
        weights=weights,
        statistics=tuple(sorted(statistics)),
        tried=_try(module, job, shapes),
        graph_refusal=_graph_refusal(job, shapes) if job.graphs else "",
    )


def use_tf32(*, on: bool) -> None:
    """Whether this process multiplies float32 in TF32: in kernels, cuBLAS and cuDNN."""
    import torch  # noqa: PLC0415

    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


class _Shapes:
    """Shapes of a program's inputs: fixed sizes, and the ranges of its dynamic axes."""

    def __init__(
        self,
        specs: Sequence["torch.Tensor"],
        axes: Sequence[Mapping[int, AxisSizes]],
        best: Sequence[Mapping[int, int]],
    ) -> None:
        self.axes = axes
        self._specs, self._best = specs, best

    def example(self, batch: int, device: str) -> tuple["torch.Tensor", ...]:
        """Rows of noise, or of zeros and ones that begin with a one: no mask hides all of a row."""
        import torch  # noqa: PLC0415

        made = []
        for spec, best in zip(self._specs, self._best, strict=True):
            shape = [batch, *(best.get(at, size) for at, size in enumerate(spec.shape) if at)]
            if spec.dtype.is_floating_point:
                tensor = torch.randn(shape).to(spec.dtype)
            else:
                tensor = torch.randint(0, 2, shape)
                tensor[:, :1] = 1
                tensor = tensor.to(spec.dtype)
            made.append(tensor.to(device))
        return tuple(made)


def _shapes(program: "torch.export.ExportedProgram", job: PackageJob) -> _Shapes:
    specs = dict(zip(job.inputs, _placeholders(program), strict=True))
    axes: list[dict[int, AxisSizes]] = []
    best: list[dict[int, int]] = []
    for name, spec in specs.items():
        ranges = job.profiles.get(name)
        of: dict[int, AxisSizes] = {}
        sizes: dict[int, int] = {}
        for at, size in enumerate(spec.shape):
            if isinstance(size, int) or ranges is None:
                continue
            symbol = "".join(c if c.isalnum() else "_" for c in str(size))
            least, most = ranges.min[at], ranges.max[at]
            sizes[at] = ranges.best[at]
            if at == 0:
                least, most = 1, job.max_batch_size
            if least < most:
                of[at] = AxisSizes(symbol, least, most)
                sizes[at] = max(sizes[at], min(_TRACEABLE, most))
        axes.append(of)
        best.append(sizes)
    return _Shapes(list(specs.values()), axes, best)


def _compile_dynamic(module: Any, job: PackageJob, shapes: _Shapes) -> None:
    import torch  # noqa: PLC0415

    batch = max(job.working_batch, min(_TRACEABLE, job.max_batch_size))
    program = traced_again(module, shapes.example(batch, job.device), shapes.axes)
    with torch.no_grad():  # with gradients on, freezing is ignored without a word
        torch._inductor.aoti_compile_and_package(  # noqa: SLF001
            program, package_path=str(job.package), inductor_configs=_configs(job)
        )


def _compile_buckets(module: Any, job: PackageJob, shapes: _Shapes) -> None:
    """One package for each bucket, of fixed batch, in one archive."""
    import torch  # noqa: PLC0415
    import torch._inductor.package as packages  # noqa: PLC0415

    archive: Any = packages

    files: dict[str, Any] = {}
    within = [{at: sizes for at, sizes in of.items() if at} for of in shapes.axes]
    for bucket in job.buckets:
        program = traced_again(module, shapes.example(bucket, job.device), within)
        arguments, keywords = program.example_inputs
        options = {**_configs(job), "aot_inductor.package": True}
        with torch.no_grad():
            files[f"batch{bucket}"] = torch._inductor.aot_compile(  # noqa: SLF001
                program.module(check_guards=False), arguments, keywords, options=options
            )
    archive.package_aoti(str(job.package), files)


def _configs(job: PackageJob) -> dict[str, Any]:
    return {
        "freezing": True,
        "aot_inductor.metadata": dict(job.stamp),
        # Tracing assumes two rows or more, and its kernels take one: which is tried below.
        "aot_inductor.check_lowerbound": False,
        "aot_inductor.custom_op_libs": _link_shared_cpp(),
        "max_autotune": job.autotune,
        "coordinate_descent_tuning": job.autotune,
        # Headers compiled beforehand pay from the third file on; a package has two.
        "aot_inductor.precompile_headers": bool(job.buckets),
    }


def _link_shared_cpp() -> list[str]:
    """The C++ library that PyTorch loaded, as one to link; none if it loaded no such library.

    Some compilers would link a second one into the package, which then crashes when it is loaded.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = next((Path(line.split()[-1]) for line in lines if _CPP in line), None)
    if loaded is None:
        return []
    folders = (str(loaded.parent), os.environ.get("LIBRARY_PATH", ""))
    os.environ["LIBRARY_PATH"] = ":".join(filter(None, folders))
    return [f":{loaded.name}"]


def _try(module: Any, job: PackageJob, shapes: _Shapes) -> dict[str, float]:
    """Differences from eager at each batch; refuses those that rounding does not explain."""
    import torch._inductor.package as packages  # noqa: PLC0415

    archive: Any = packages
    tried = {}
    for bucket in job.buckets or (0,):
        runner = archive.load_package(
            str(job.package), f"batch{bucket}" if bucket else "model", run_single_threaded=True
        )
        most = bucket or job.max_batch_size
        sizes = {most} if bucket else {1, (most + 1) // 2, most}
        for size in sorted(sizes):
            tried[str(size)] = _difference(module, runner, shapes.example(size, job.device), job)
        if _is_refused(runner, shapes.example(most + 1, job.device)):
            # A guard's refusal changes nothing; after any other error this fails, or is wrong.
            _difference(module, runner, shapes.example(most, job.device), job)
            continue
        raise PackageRefusedError(
            f"it is for batches of up to {most} and takes {most + 1} as well, so its batch axis "
            "is not the one that was asked for. Answers could be of other rows."
        )
    return tried


def _is_refused(runner: Any, inputs: tuple["torch.Tensor", ...]) -> bool:
    """Whether the package does not take a batch; the guard's own words go to standard error.

    Raises:
        PackageRefusedError: it took it, and the device had no memory for it.
    """
    import torch  # noqa: PLC0415

    try:
        runner(*inputs)
    except torch.OutOfMemoryError as error:
        raise PackageRefusedError(
            f"whether it refuses a batch of {len(inputs[0])} is not known: {brief(error)}"
        ) from error
    except RuntimeError:
        return True
    return False


def _difference(
    module: Any, runner: Any, inputs: tuple["torch.Tensor", ...], job: PackageJob
) -> float:
    import torch  # noqa: PLC0415

    rows = len(inputs[0])
    try:
        with torch.no_grad():
            given = runner(*inputs)
    except RuntimeError as error:
        raise PackageRefusedError(f"it does not take a batch of {rows}: {brief(error)}") from error
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(module(*inputs))  # noqa: SLF001
    worst = 0.0
    for left, right in zip(expected, given, strict=True):
        if left.shape != right.shape:
            raise PackageRefusedError(
                f"for {rows} rows an output is {tuple(right.shape)}, and eager's is "
                f"{tuple(left.shape)}."
            )
        share = share_apart(left.double(), right.double())
        if not share <= ROUNDING[job.precision]:  # NaN is refused too
            raise PackageRefusedError(
                f"for {rows} rows its answers differ from eager {job.precision} by {share:.3g} of "
                "the largest; rounding does not explain that."
            )
        worst = max(worst, share)
    return worst


def _graph_refusal(job: PackageJob, shapes: _Shapes) -> str:
    """Why the largest batch cannot be captured as a CUDA graph; empty if it can."""
    bucket = max(job.buckets, default=job.max_batch_size)
    calls = open_calls(job.package, (bucket,), own=bool(job.buckets), device_id=0)
    bucketed = BucketedPackage(calls, inputs=job.inputs, outputs=(), device_id=0, graphs=True)
    examples = shapes.example(bucket, "cpu")
    bucketed.warm_up({name: t.numpy() for name, t in zip(job.inputs, examples, strict=True)})
    return bucketed.graph_refusal


def _placeholders(program: "torch.export.ExportedProgram") -> list["torch.Tensor"]:
    """The inputs, with symbols for sizes that vary."""
    wanted = set(program.graph_signature.user_inputs)
    return [
        node.meta["val"]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in wanted
    ]


def _statistics(program: "torch.export.ExportedProgram") -> frozenset[str]:
    """Running means and variances of batch normalisation, as the compiled module calls them."""
    buffers = program.graph_signature.inputs_to_buffers
    return frozenset(
        f"inner.{buffers[given.name]}"
        for node in program.graph.nodes
        if "batch_norm" in str(node.target)
        for given in node.all_input_nodes
        if given.name in buffers
    )


def _weights(program: "torch.export.ExportedProgram") -> int:
    """Weights of layers that multiply, and of normalisations that fold into them."""
    stored = program.graph_signature.inputs_to_parameters
    return sum(
        any(given.name in stored for given in node.all_input_nodes)
        for node in program.graph.nodes
        if node.op == "call_function" and any(word in str(node.target) for word in _MULTIPLYING)
    )


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
