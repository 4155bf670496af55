"""AOTInductor packages are really compiled here, for the processor, and proven by their source.

One package is compiled for all tests of a session: g++ takes 15 s for each.
"""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from enginegate.benchmark.deployment import ServedModel, deploy
from enginegate.candidate import Candidate, Unbuilt
from enginegate.engines import (
    availability,
    build_engine,
    open_engine,
    open_reference,
    runnable_here,
    serving,
)
from enginegate.engines.torch_inductor import process
from enginegate.engines.torch_inductor.build import _shapes, _try
from enginegate.engines.torch_inductor.foreign import PackageRefusedError
from enginegate.engines.torch_inductor.package import read_package, why_not_frozen
from enginegate.engines.torch_inductor.process import PackageJob
from enginegate.engines.torch_inductor.run import open_calls
from enginegate.engines.torch_inductor.typed_program import typed_module
from enginegate.errors import BuildError, DataError, EnginegateError, ModelError
from enginegate.policy import parse_policy
from enginegate.serving import ServingConfig
from enginegate.workspace import Workspace
from tasks.build import build
from tests.integration.engines.conftest import POLICY

pytestmark = pytest.mark.xdist_group("engines")
torch = pytest.importorskip("torch")
if not any(each.kind == "torch_inductor" and each.can_build for each in availability()):
    pytest.skip("there is no C++ compiler", allow_module_level=True)

TABLES = {"torch_inductor": {"device": "cpu"}}
STATISTICS = frozenset({"inner.layers.1.running_mean", "inner.layers.1.running_var"})


@pytest.fixture(scope="session")
def static_compiler(tmp_path_factory):
    """A g++ that links the C++ library into what it makes, as some images' do."""
    folder = tmp_path_factory.mktemp("compiler")
    script = folder / "g++"
    script.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) exec {shutil.which("g++")} "$@";; esac\n'
        f'exec {shutil.which("g++")} "$@" -static-libstdc++\n'
    )
    script.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def built(plan, store, static_compiler):
    """The CNN at FP32; a second C++ library inside would crash every test that opens it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{static_compiler}:{os.environ['PATH']}")
        return build_engine(plan("torch_inductor-fp32", **TABLES), store / "engines")


@pytest.fixture
def package(built):
    return built.folder / built.value.filename


def left_in(folder):
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def unfrozen(program, path):
    """The package as PyTorch compiles it where gradients are on."""
    script = (
        "import sys, torch\n"
        "program = torch.export.load(sys.argv[1])\n"
        "torch._inductor.aoti_compile_and_package(\n"
        "    program, package_path=sys.argv[2],\n"
        "    inductor_configs={'freezing': True, 'aot_inductor.precompile_headers': False})\n"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, program, path],
        check=True,
        capture_output=True,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(path.parent / "cache")},
    )
    return path


def test_package_is_proven_by_its_generated_source(built, package):
    """Types of constants and kernels, freezing, and the plan's key stamped on it."""
    engine = built.value

    assert engine.proof.proven, engine.proof.detail
    assert engine.proof.weighted_layers == {"fp32": 3}
    assert engine.proof.weights.keys() == {"fp32"}
    assert engine.builder.startswith(f"torch {torch.__version__}, ")
    assert read_package(package).stamp["enginegate_key"] == built.folder.name
    assert runnable_here(engine) is None


def test_rows_of_any_number_agree_with_the_reference(built, cnn, samples):
    """One row, a whole batch, and more rows than one run takes."""
    with (
        open_engine(built.value, built.folder) as runner,
        open_reference(cnn.value, cnn.folder) as reference,
    ):
        for count in (1, 8, 13):
            rows = {"image": samples.inputs["image"][:count]}
            given, expected = runner.run(rows)["output"], reference.run(rows)["output"]

            np.testing.assert_allclose(given, expected, atol=1e-5)


def test_bound_batch_is_repeated(built, samples):
    """More rows than the largest batch cannot be bound."""
    with open_engine(built.value, built.folder) as runner:
        with runner.bound({"image": samples.inputs["image"][:8]}) as repeat:
            assert repeat(20) > repeat(1) > 0.0
        with (
            pytest.raises(DataError, match="at most 8 rows"),
            runner.bound({"image": samples.inputs["image"][:9]}),
        ):
            pass


def test_batch_larger_than_the_largest_is_refused_by_the_package(package):
    """Its own checks are on wherever it is opened."""
    calls = open_calls(package, (8,), own=False, device_id=-1)

    with pytest.raises(RuntimeError, match="too large"):
        calls[8](torch.zeros(9, 1, 8, 8))


def test_package_that_takes_more_than_it_was_asked_to_is_refused(built, package, cnn):
    """A dynamic axis that is not the one that was asked for."""
    job = PackageJob(
        program=cnn.folder / "program.pt2",
        package=package,
        precision="fp32",
        device="cpu",
        inputs=("image",),
        max_batch_size=4,
        working_batch=4,
        buckets=(),
        profiles=built.value.profiles,
        autotune=False,
        graphs=False,
        memory_mib=1024,
        stamp={},
    )
    program = torch.export.load(job.program)
    shapes = _shapes(program, job)
    module = typed_module(program, dtype=torch.float32, device="cpu")

    with pytest.raises(PackageRefusedError, match="batches of up to 4 and takes 5 as well"):
        _try(module, job, shapes)


@pytest.mark.long
def test_package_that_was_not_frozen_is_refused(package, cnn, tmp_path):
    """With gradients on PyTorch drops freezing without a word; 20 s, because it is really done."""
    slow = read_package(unfrozen(cnn.folder / "program.pt2", tmp_path / "unfrozen.pt2"))

    refused = why_not_frozen(slow, weights=3, statistics=STATISTICS)
    accepted = why_not_frozen(read_package(package), weights=3, statistics=STATISTICS)

    assert (slow.frozen, accepted) == (0, None)
    assert "frozen" in refused or "folded" in refused


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"builder": "torch 2.4.0"}, "compiled by torch 2.4.0, and calls its libraries"),
        ({"target": "cuda sm70"}, "there is no NVIDIA GPU"),
    ],
    ids=["torch", "device"],
)
def test_package_of_another_torch_or_device_is_refused(built, changed, why):
    """PyTorch itself only warns."""
    engine = built.value.model_copy(update=changed)

    assert why in runnable_here(engine)
    with pytest.raises(EnginegateError, match=why), open_engine(engine, built.folder):
        pass


def test_compiler_that_is_killed_leaves_nothing(plan, tmp_path, monkeypatch):
    """The error names the signal."""
    script = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    monkeypatch.setattr(process, "compiler_command", lambda *_: [sys.executable, "-c", script])

    with pytest.raises(BuildError, match=r"killed by SIGKILL\. The kernel kills so when"):
        build_engine(plan("torch_inductor-bf16", **TABLES), tmp_path / "engines")

    assert left_in(tmp_path / "engines") == []


def test_compiler_that_takes_too_long_is_stopped_with_what_it_started(plan, tmp_path, monkeypatch):
    """Its own compilers are not left running."""
    mark = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {mark}; sleep 600"
    monkeypatch.setattr(process, "compiler_command", lambda *_: ["sh", "-c", script])
    tables = {"torch_inductor": {"device": "cpu", "timeout_s": 3.0}}

    with pytest.raises(BuildError, match="took longer than timeout_s = 3 and was stopped"):
        build_engine(plan("torch_inductor-bf16", **tables), tmp_path / "engines")

    assert left_in(tmp_path / "engines") == []
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", mark.read_text()], capture_output=True, text=True, check=False
    )
    assert not state.stdout.strip() or state.stdout.startswith("Z")


def test_model_without_a_program_is_inconclusive(cnn):
    """An ONNX source is no PyTorch model: nothing is wrong with the candidate."""
    policy = parse_policy({**POLICY, "candidates": {"torch_inductor": ["fp32"]}}, "test policy")
    without = cnn.value.model_copy(
        update={"program": None, "no_program": "the source is no PyTorch model"}
    )
    source = cnn.__class__(without, cnn.folder, reused=True)

    attempt = build.fn(
        Candidate.parse("torch_inductor-fp32"),
        policy.engine_tables,
        source,
        Workspace.of(policy),
    )

    assert isinstance(attempt, Unbuilt)
    assert attempt.undecidable
    assert "compiles a PyTorch program" in attempt.why
    assert "mlflow.pytorch" in attempt.remedy


def test_triton_of_its_own_backend_needs_numbered_names(built):
    """Clients call this model's tensors by their names, so it is served by our runner."""
    usual = serving(built.value, built.folder)

    assert (usual.backend, usual.gpu) == ("python", False)
    assert {"model.py", "engine_torch_inductor.py", "torch_inductor_run.py", "model.pt2"} <= set(
        usual.files
    )
    with pytest.raises(ModelError, match=r"by their numbers \(INPUT__0\).*image, output"):
        serving(built.value, built.folder, backend="pytorch")
    flags = {**built.value.flags, "inputs": "INPUT__0", "outputs": "OUTPUT__0"}
    numbered = built.value.model_copy(update={"flags": flags})
    natively = serving(numbered, built.folder, backend="pytorch")
    assert (natively.backend, set(natively.files)) == ("pytorch", {"model.pt2"})


@pytest.mark.triton
def test_triton_serves_it_by_our_runner(built, server, client, samples, cnn):
    """PyTorch in the Python that Triton runs loads the very package."""
    model = ServedModel.of("inductor", built.value, serving(built.value, built.folder))
    rows = {"image": samples.inputs["image"][:3]}
    with deploy(server, model) as deployment:
        deployment.serve(ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1))

        given = client.infer("inductor", rows).outputs["output"]

    with open_reference(cnn.value, cnn.folder) as reference:
        np.testing.assert_allclose(given, reference.run(rows)["output"], atol=1e-5)


def made(package, **changes):
    """What a policy says of a package that something else compiled."""
    table = {"file": str(package), "precision": "fp32", "name": "ours", "allow_code": True}
    return {"candidates": {"made": [table | changes]}, **TABLES}


@pytest.mark.long
def test_package_that_something_else_compiled_is_tried_and_runs(
    built, package, plan, tmp_path, samples
):
    """Without a compiler; its bytes are as they were, and so are its answers."""
    tables = made(package, made_by="a nightly build")
    images = {"image": samples.inputs["image"][:11]}

    engine = build_engine(plan("torch_inductor-fp32+ours", data=None, **tables), tmp_path)

    assert engine.value.file.sha256 == engine.value.made.sha256
    assert engine.value.converter.startswith("made elsewhere, by a nightly build: ")
    assert engine.value.proof.proven
    with (
        open_engine(engine.value, engine.folder) as theirs,
        open_engine(built.value, built.folder) as ours,
    ):
        np.testing.assert_array_equal(theirs.run(images)["output"], ours.run(images)["output"])


def test_package_is_code_and_needs_to_be_allowed(package, plan):
    """Nothing is loaded before somebody says so."""
    with pytest.raises(BuildError, match=r"is native code, .* set allow_code = true"):
        plan("torch_inductor-fp32+ours", data=None, **made(package, allow_code=False))


def test_package_of_other_tensors_is_refused_in_words(package, plan, tmp_path):
    """Its inputs are named in its own order; a name that the model lacks is a mistake."""
    tables = made(package, inputs=["pixels"])

    with pytest.raises(BuildError, match="names pixels as its tensors, and the model's are image"):
        build_engine(plan("torch_inductor-fp32+ours", data=None, **tables), tmp_path)
