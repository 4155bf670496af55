"""AOTInductor packages: the model's torch program, compiled in a process of its own.

The program is the one that was saved beside the ONNX; weights are cast here, and inputs and outputs
keep their types. A package is bound to one PyTorch, its CUDA libraries and one compute capability,
or to one processor's instructions.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from enginegate.candidate import (
    Engine,
    Precision,
    PrecisionProof,
    TensorSpec,
)
from enginegate.data import Tensors
from enginegate.engine_kinds import NativeBackend
from enginegate.engines import cuda
from enginegate.engines.batching import check_batch, run_rows
from enginegate.engines.cuda import Device, Gpu
from enginegate.engines.made_elsewhere import MadeFile
from enginegate.engines.onnxruntime.gpu import buckets_up_to
from enginegate.engines.plan import BuildPlan
from enginegate.engines.protocol import (
    Availability,
    DecisionObstacle,
    EngineKind,
    Runner,
    ServedFiles,
    missing,
)
from enginegate.engines.python_backend import runner_files
from enginegate.engines.torch_inductor.library import (
    REMEDY,
    builder_name,
    package_device,
    target_name,
    torch_cuda,
    torch_version,
)
from enginegate.engines.torch_inductor.package import (
    PackageEvidence,
    read_package,
    why_not_frozen,
)
from enginegate.engines.torch_inductor.process import (
    LOG_FILE,
    PackageJob,
    PackageReport,
    TorchInductorTable,
    compile_package,
)
from enginegate.engines.torch_inductor.run import BucketedPackage, open_calls
from enginegate.errors import BuildError, EnginegateError, ModelError
from enginegate.precision import Conversion
from enginegate.serving import BackendSettings

ENGINE_FILE = "model.pt2"
STAMP = "enginegate_key"
_RUN_FILE = "torch_inductor_run.py"
# As PyTorch writes them into a package's metadata.
_DEVICE_KEY, _CAPABILITY_KEY = "AOTI_DEVICE_KEY", "AOTI_COMPUTE_CAPABILITY"
_NEEDED = {Precision.TF32: cuda.AMPERE, Precision.BF16: cuda.AMPERE}
_LIMITS = {"timeout_s", "memory_mib"}  # these stop a build
_LEAST_SHARE = 0.5  # of the multiplications that have the type of the name


@dataclass(frozen=True, slots=True)
class TorchInductorHere:
    """What this machine has for a policy's packages.

    Attributes:
        torch: the installed version, or None.
        compiler: whether a C++ compiler is on the path.
        device: what packages are to be for under the policy.
        cuda: the CUDA version that PyTorch was built for, or None.
        gpu: the first GPU.
    """

    torch: str | None
    compiler: bool
    device: Device
    cuda: str | None
    gpu: Gpu | None


class TorchInductorKind(EngineKind):
    """Packages of native code that PyTorch's AOTInductor compiles for a GPU or a processor."""

    name = "torch_inductor"
    title = "AOTInductor"
    table = TorchInductorTable
    largest: ClassVar = {
        "timeout_s": (604_800.0, "that is a week"),
        "batch_buckets": (65_536, "rows are held in memory together"),
        "working_batch": (65_536, "rows are held in memory together"),
    }
    precisions = frozenset({Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16})
    takes_program = True
    native = NativeBackend(
        "pytorch", ENGINE_FILE, platform="torch_aoti", names_platform=True, since=(2, 71)
    )
    packages = ("torch",)

    def availability(self) -> Availability:
        """Whether PyTorch and a compiler are here; a processor can do the rest."""
        found = torch_version()
        if found is None:
            return missing(self.name, "torch is not installed", REMEDY)
        compiles = _has_compiler()
        return Availability(
            self.name,
            f"torch {found}",
            can_build=compiles,
            can_run=True,
            why_not="" if compiles else "AOTInductor needs g++, which is not on the path",
            remedy="" if compiles else "apt-get install g++",
        )

    def inspect(self, table: TorchInductorTable, /) -> TorchInductorHere:
        return TorchInductorHere(
            torch=torch_version(),
            compiler=_has_compiler(),
            device=package_device(table.device),
            cuda=torch_cuda(),
            gpu=cuda.gpu(),
        )

    def undecidable(  # noqa: PLR0911 - one return for each thing that may be missing
        self, precision: Precision, table: TorchInductorTable, here: TorchInductorHere, /
    ) -> DecisionObstacle | None:
        del table
        if here.torch is None:
            return DecisionObstacle("PyTorch is not installed here", f"Run: {REMEDY}.")
        if not here.compiler:
            return DecisionObstacle(
                "AOTInductor compiles C++, and there is no g++ on the path", "apt-get install g++"
            )
        drop = f"drop {precision} from torch_inductor under [candidates]."
        if here.device == "cpu" and precision is Precision.TF32:
            return DecisionObstacle(
                "tf32 is arithmetic of GPUs, and packages are for the processor here",
                f"Qualify on a machine with a GPU, or {drop}",
            )
        if here.device == "cpu":
            return None
        if here.gpu is None or here.cuda is None:
            lacks = "no NVIDIA GPU with a driver" if here.gpu is None else "a PyTorch without CUDA"
            return DecisionObstacle(
                f'packages are for device = "cuda", and this machine has {lacks}',
                'Qualify where both are, or set device = "auto" under [torch_inductor].',
            )
        needed = _NEEDED.get(precision, 0)
        if here.gpu.capability_number >= needed:
            return None
        return DecisionObstacle(
            f"{precision} needs compute capability {needed / 10:.1f}, and the GPU here is "
            f"{here.gpu}",
            f"Qualify on a newer GPU, or {drop}",
        )

    def undecidable_made(
        self, precision: Precision, table: TorchInductorTable, here: TorchInductorHere, /
    ) -> DecisionObstacle | None:
        """Nothing is compiled, so no compiler is needed."""
        return self.undecidable(precision, table, replace(here, compiler=True))

    def toolchain(self, table: TorchInductorTable, /) -> str:
        """PyTorch, its CUDA libraries, and the GPU or the processor's instructions."""
        if torch_version() is None:
            return "absent"
        device = package_device(table.device)
        gpu = f" {cuda.gpu()}" if device == "cuda" else ""
        return f"{builder_name(device)} on {target_name(device)}{gpu}"

    def deciding_settings(self, table: TorchInductorTable, /) -> Mapping[str, object]:
        return table.model_dump(mode="json", exclude=_LIMITS)

    def build_limit_s(self, table: TorchInductorTable, /) -> float:
        return table.timeout_s

    def build(self, plan: BuildPlan, folder: Path, /) -> Engine:
        """Compile ``model.pt2`` in a process of its own; its log is kept beside it.

        Raises:
            BuildError: the model has no torch program, it cannot be compiled, freezing did not take
                place, a batch that was tried gives other answers than eager, or the process crashed
                or went over its time or memory.
        """
        if plan.made is not None:
            return _made(plan, plan.made, folder)
        program, saved = plan.program, plan.onnx.program
        if program is None or saved is None:
            raise BuildError(
                f"{plan.candidate} is compiled from a PyTorch program, and {plan.onnx.source} gave "
                f"none: {plan.onnx.no_program}. Drop torch_inductor from [candidates]."
            )
        started, table = time.monotonic(), plan.table_as(TorchInductorTable)
        device = package_device(table.device)
        plan.check_profiles()
        buckets = buckets_up_to(plan.max_batch_size, table.batch_buckets)
        best = max((shape.best[0] for shape in plan.profiles.values()), default=1)
        job = PackageJob(
            program=program.absolute(),
            package=(folder / ENGINE_FILE).absolute(),
            precision=plan.candidate.precision.value,
            device=device,
            inputs=saved.inputs,
            max_batch_size=plan.max_batch_size,
            working_batch=min(table.working_batch or best, plan.max_batch_size),
            buckets=buckets if table.packages == "per_bucket" else (),
            profiles=plan.profiles,
            autotune=table.autotune,
            graphs=table.cuda_graphs and device == "cuda",
            memory_mib=table.memory_mib,
            stamp={STAMP: plan.key},
        )
        report = compile_package(plan, job)
        evidence = read_package(job.package)
        _check_package(plan, evidence, report)
        return plan.engine(
            job.package,
            Conversion(program.read_bytes(), _cast(plan)),
            builder=builder_name(device),
            target=target_name(device),
            flags=_flags(job, buckets, evidence, report, saved.outputs),
            beside=[folder / LOG_FILE],
            proof=_proof(plan, evidence, device),
            started_s=started,
        )

    def obstacle(self, engine: Engine, /) -> str | None:
        """Why this machine cannot run the package; PyTorch would only warn."""
        if torch_version() is None:
            return f"PyTorch is not installed here. Run: {REMEDY}."
        device = _device(engine)
        if device == "cuda" and cuda.gpu() is None:
            return f"it is for {engine.target}; there is no NVIDIA GPU with a driver here."
        if engine.builder != builder_name(device):
            return (
                f"it was compiled by {engine.builder}, and calls its libraries; "
                f"{builder_name(device)} is here. Build it again here, or run it where that is."
            )
        if engine.target != target_name(device):
            return f"it is machine code for {engine.target}; {target_name(device)} is here."
        return None

    @contextmanager
    def load(self, engine: Engine, path: Path, /) -> Iterator[Runner]:
        """Load a package, native code of which the digest was checked; on a GPU, warm.

        Raises:
            EnginegateError: this machine cannot run it.
            ModelError: PyTorch refuses it, or it is stamped as another engine's.
        """
        reason = self.obstacle(engine)
        if reason:
            raise EnginegateError(f"{engine.candidate} cannot run: {reason}")
        device, own = _device(engine), engine.flags["packages"] == "per_bucket"
        number = 0 if device == "cuda" else -1
        buckets = tuple(int(size) for size in engine.flags["batch_buckets"].split())
        try:
            calls = open_calls(path, buckets, own=own, device_id=number)
        except RuntimeError as error:
            raise ModelError(
                f"torch {torch_version()} cannot load {path}: {str(error).strip()[:500]}\n"
                "Build it again here."
            ) from error
        bucketed = BucketedPackage(
            calls,
            inputs=engine.flags["inputs"].split(),
            outputs=engine.flags["outputs"].split(),
            device_id=number,
            graphs=engine.flags["cuda_graphs"] == "on",
            tf32=engine.candidate.precision is Precision.TF32,
        )
        yield PackageRunner(bucketed, engine.inputs, _device_name(device))

    def serving(self, engine: Engine, path: Path, /) -> ServedFiles:
        """Our runner in Triton's Python backend, with this kind's part of it."""
        here, on_gpu = Path(__file__), _device(engine) == "cuda"
        files = {
            **runner_files(self.name, here.with_name("serve.py"), gpu=on_gpu),
            "engine.json": path.with_name("manifest.json"),
            engine.filename: path,
            _RUN_FILE: here.with_name("run.py"),
        }
        return ServedFiles(backend="python", files=files, gpu=on_gpu)

    def native_settings(self, engine: Engine, /) -> BackendSettings:
        """Settings for Triton's PyTorch backend, platform ``torch_aoti``.

        Raises:
            ModelError: that backend cannot run the engine as it was validated.
        """
        reason = _unfit_natively(engine)
        if reason:
            raise ModelError(
                f"{engine.candidate} cannot be served in Triton's PyTorch backend: {reason} Serve "
                'it with serving.backend = "python".'
            )
        return BackendSettings()

    def native_drawback(self, engine: Engine, /) -> str | None:
        return _unfit_natively(engine) or (
            "it replays no CUDA graph, loads the weights once an instance, and batches from Triton "
            "26.07 on only."
        )


KIND = TorchInductorKind()


class PackageRunner:
    """A package, for any number of rows."""

    def __init__(
        self, bucketed: BucketedPackage, specs: tuple[TensorSpec, ...], device: str
    ) -> None:
        self.device = device
        self._bucketed, self._specs = bucketed, specs

    def run(self, inputs: Tensors) -> Tensors:
        """Outputs of any number of rows."""
        limit = self._bucketed.buckets[-1]
        return run_rows(inputs, self._specs, limit=limit, run_once=self._bucketed.run)

    def bound(self, inputs: Tensors) -> AbstractContextManager[Callable[[int], float]]:
        """Runs of one bucket's buffers, replaying its graph where there is one."""
        check_batch(inputs, self._specs, limit=self._bucketed.buckets[-1])
        return self._bucketed.bound(inputs)


def _made(plan: BuildPlan, made: MadeFile, folder: Path) -> Engine:
    """A package that something else compiled, tried in a process of its own.

    Raises:
        BuildError: it is no package, is for another device, takes or answers other tensors than the
            model does, mixes rows, or the process crashed.
    """
    started, table = time.monotonic(), plan.table_as(TorchInductorTable)
    device, package = package_device(table.device), (folder / ENGINE_FILE).absolute()
    plan.check_profiles()
    made.copy_package(package)
    evidence = read_package(package)
    _check_device(evidence, device, made)
    inputs = _in_order(made.table.inputs, plan.onnx.inputs, made)
    outputs = _in_order(made.table.outputs, plan.onnx.outputs, made)
    fixed = () if made.table.batch is None else (made.table.batch,)
    job = PackageJob(
        program=None,
        package=package,
        precision=plan.candidate.precision.value,
        device=device,
        inputs=tuple(spec.name for spec in inputs),
        max_batch_size=plan.max_batch_size,
        working_batch=made.table.batch or plan.max_batch_size,
        buckets=fixed,
        profiles=plan.profiles,
        autotune=False,
        graphs=False,
        memory_mib=table.memory_mib,
        stamp={},
        specs=inputs,
        answers=outputs,
    )
    report = compile_package(plan, job)
    buckets = fixed or buckets_up_to(plan.max_batch_size, table.batch_buckets)
    return plan.engine(
        package,
        Conversion(package.read_bytes(), made.description),
        builder=builder_name(device),
        target=target_name(device),
        flags={
            "packages": "dynamic",
            "batch_buckets": " ".join(map(str, buckets)),
            "inputs": " ".join(job.inputs),
            "outputs": " ".join(spec.name for spec in outputs),
            "cuda_graphs": "off",
            "largest_difference_by_order": f"{max(report.tried.values(), default=0.0):.3g}",
        },
        beside=[folder / LOG_FILE],
        proof=_proof(plan, evidence, device),
        started_s=started,
    )


def _in_order(
    names: tuple[str, ...], specs: tuple[TensorSpec, ...], made: MadeFile
) -> tuple[TensorSpec, ...]:
    """The model's tensors in the order of a package.

    Raises:
        BuildError: the policy names others.
    """
    by_name = {spec.name: spec for spec in specs}
    if names and set(names) != set(by_name):
        raise BuildError(
            f"{made.provenance.file}: the policy names {', '.join(names)} as its tensors, and the "
            f"model's are {', '.join(by_name)}. Name each of them once, in the package's order."
        )
    return tuple(by_name[name] for name in names) if names else specs


def _check_device(evidence: PackageEvidence, device: Device, made: MadeFile) -> None:
    """Refuse a package for another device, which might crash instead of refusing.

    Raises:
        BuildError: what it is for, and what is here.
    """
    of = evidence.stamp.get(_DEVICE_KEY, device)
    capability = evidence.stamp.get(_CAPABILITY_KEY, "")
    if of != device:
        raise BuildError(
            f"{made.provenance.file} is for {of}, and packages are for {device} here (device under "
            "[torch_inductor]). Qualify where that device is."
        )
    if device == "cuda" and capability and not target_name(device).endswith(f"sm{capability}"):
        raise BuildError(
            f"{made.provenance.file} is machine code for compute capability {capability}, and the "
            f"GPU here is {cuda.gpu()}. Compile it for this GPU."
        )


def _device(engine: Engine) -> Device:
    return "cuda" if engine.target.startswith("cuda") else "cpu"


def _device_name(device: Device) -> str:
    return str(cuda.gpu()) if device == "cuda" else "CPU"


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("g++", "c++", "clang++"))


def _cast(plan: BuildPlan) -> str:
    precision = plan.candidate.precision
    return "none" if precision.is_as_exported else f"torch {torch_version()}, cast to {precision}"


def _check_package(plan: BuildPlan, evidence: PackageEvidence, report: PackageReport) -> None:
    reason = why_not_frozen(
        evidence, weights=report.weights, statistics=frozenset(report.statistics)
    )
    if reason:
        raise BuildError(
            f"{plan.candidate} was compiled without freezing: {reason}. PyTorch drops freezing "
            "without a word where gradients are on; report this with the build's log."
        )
    if evidence.stamp.get(STAMP) != plan.key:
        raise BuildError(
            f"{plan.candidate}: the package is stamped {evidence.stamp.get(STAMP)!r} and not "
            f"{plan.key!r}. Build it again."
        )


def _flags(
    job: PackageJob,
    buckets: tuple[int, ...],
    evidence: PackageEvidence,
    report: PackageReport,
    outputs: tuple[str, ...],
) -> dict[str, str]:
    graphs = job.graphs and not report.graph_refusal
    told = {
        "packages": "per_bucket" if job.buckets else "dynamic",
        "batch_buckets": " ".join(map(str, buckets)),
        "working_batch": str(job.working_batch),
        "inputs": " ".join(job.inputs),
        "outputs": " ".join(outputs),
        "cuda_graphs": "on" if graphs else "off",
        "autotune": "on" if job.autotune else "off",
        "freezing": f"{evidence.frozen} constants frozen, {len(evidence.original)} as they were",
        "largest_difference_from_eager": f"{max(report.tried.values(), default=0.0):.3g}",
    }
    return told | ({"no_cuda_graphs": report.graph_refusal} if report.graph_refusal else {})


def _proof(plan: BuildPlan, evidence: PackageEvidence, device: Device) -> PrecisionProof:
    """What the generated source multiplies in."""
    precision = plan.candidate.precision
    tf32 = precision is Precision.TF32
    counts = {
        ("tf32" if tf32 and w == "fp32" else w): n for w, n in evidence.multiplications.items()
    }
    word, total = precision.value, sum(counts.values())
    listed = ", ".join(f"{n} {w}" for w, n in sorted(counts.items())) or "none"
    share = counts.get(word, 0) / total if total else 0.0
    stored = evidence.weights.get("fp32" if tf32 else word, 0)
    by_weights = stored / max(sum(evidence.weights.values()), 1)
    proven = share >= _LEAST_SHARE if total else by_weights >= _LEAST_SHARE
    if precision.is_as_exported:
        proven = set(counts) <= {word} and set(evidence.weights) <= {"fp32"}
    detail = (
        f"Generated source: kernels that multiply: {listed}; {by_weights:.0%} of the stored "
        f"numbers are {'fp32' if tf32 else word}; {evidence.frozen} constants frozen."
    )
    if tf32 or (precision is Precision.FP32 and device == "cuda"):
        detail += (
            f" TF32 is no type in it: that it is {'on' if tf32 else 'off'} is a switch of the "
            "process, set when it was compiled and for every run here."
        )
    if not proven:
        detail += f" That is not {word}, as the name says."
    shapes = {name: shape.best for name, shape in plan.profiles.items()}
    stats = Conversion(plan.onnx_path.read_bytes(), "none").stats(shapes)
    return PrecisionProof(
        weighted_layers=counts,
        quantised_layers=0,
        flops={word: sum(stats.layer_flops.values())} if stats.layer_flops else {},
        weights=dict(evidence.weights),
        executed_layers=counts,
        device=_device_name(device),
        proven=proven,
        detail=detail,
    )


def _unfit_natively(engine: Engine) -> str | None:
    """Why Triton's PyTorch backend cannot run an engine as it was validated, or None."""
    flags = engine.flags
    names = [*flags.get("inputs", "").split(), *flags.get("outputs", "").split()]
    unnumbered = [name for name in names if not name.rpartition("__")[2].isdecimal()]
    if unnumbered:
        return (
            "it takes tensors by their numbers (INPUT__0), and this model's are called "
            f"{', '.join(unnumbered)}."
        )
    if flags.get("packages") == "per_bucket":
        return "it opens one package, and this engine has one for each batch size."
    if engine.candidate.precision.is_as_exported and _device(engine) == "cuda":
        return "it sets PyTorch's TF32 switches its own way, so fp32 and tf32 are not told apart."
    return None
