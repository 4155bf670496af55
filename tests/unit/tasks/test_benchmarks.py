"""What a benchmark is remembered by, where it is served, and what a partial run ends in."""

from pathlib import Path

import pytest

from enginegate.candidate import Candidate, Engine, FileDigest, PrecisionProof, TensorSpec
from enginegate.canonical import sha256_file
from enginegate.engines import serving
from enginegate.errors import ModelError
from enginegate.evidence import Outcome
from enginegate.kept import Kept
from enginegate.measurement import Load, Measurement
from enginegate.policy import parse_policy, read_policy
from enginegate.serving import ServingConfig, ServingOptions
from enginegate.triton.config import read_config
from enginegate.triton.deploy import ServedModel
from enginegate.triton.install import TritonInstall
from enginegate.triton.probing import Progress
from enginegate.triton.stage import Stage
from enginegate.triton.subjects import LiveSubject, Places, Subject
from tasks import benchmark as tried
from tasks.served import served
from tests.fakes.evidence import benchmark, sha

ROOT = Path(__file__).parents[3]
PLAIN = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


@pytest.fixture
def rules(tmp_path):
    raw = read_policy(ROOT / "policies" / "digits.toml").model_dump()
    raw["target"]["repository"] = str(tmp_path / "live")
    return parse_policy(raw, "test")


@pytest.fixture
def attempt(tmp_path):
    """An engine of the store, for the CPU."""
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "manifest.json").write_bytes(b"{}")
    engine = Engine(
        candidate=Candidate.parse("onnxruntime-int8"),
        filename="model.onnx",
        file=FileDigest(sha256=sha256_file(tmp_path / "model.onnx"), size_bytes=5),
        onnx_sha256=sha("0"),
        converted_sha256=sha("1"),
        converter="none",
        calibration_sha256=None,
        builder="test",
        target="cpu",
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 4)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(-1, 4)),),
        max_batch_size=8,
        build_s=0.0,
        proof=PrecisionProof(
            weighted_layers={}, quantised_layers=0, device="cpu", proven=True, detail=""
        ),
    )
    return Kept(engine, tmp_path, reused=True)


@pytest.fixture
def stage(rules, tmp_path):
    """Of an installation that has every backend."""
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    binary = tmp_path / "tritonserver"
    binary.write_bytes(b"")
    install = TritonInstall(binary, tmp_path / "backends", (), "test")
    return Stage(rules, install, Places(tmp_path, tmp_path, tmp_path), None, sha("7"))


def on_gpu(engine):
    return engine.model_copy(update={"target": "cuda:sm_90"})


def live(**changes):
    fields = {"files": {"model.onnx": sha("a")}, "options": ServingOptions()}
    model = ServedModel("digits.live", "python", (), (), {})
    return LiveSubject(Subject(model, **(fields | changes)), PLAIN, 3)


def test_a_benchmark_is_remembered_by_what_served_it(stage, attempt):
    """Backend, and of what is live its bytes and options: a number names them in one place only."""
    one = attempt.value
    keys = [
        tried._key(stage, one, None, "python"),
        tried._key(stage, one, None, "onnxruntime"),
        tried._key(stage, one, live(), "python"),
        tried._key(stage, one, live(files={"model.onnx": sha("b")}), "python"),
        tried._key(stage, one, live(options=ServingOptions(max_queue_size=8)), "python"),
    ]

    assert len(set(keys)) == len(keys)
    assert keys[2] == tried._key(stage, one, live(), "python")


def test_an_engine_for_a_gpu_is_not_served_in_onnx_runtimes_own_backend(stage, attempt):
    """That would compute FP32 as TF32: auto takes the Python backend, and insisting is refused."""
    assert tried._backend(stage, attempt.value) == "onnxruntime"
    assert tried._backend(stage, on_gpu(attempt.value)) == "python"
    with pytest.raises(ModelError, match="FP32 as TF32"):
        serving(on_gpu(attempt.value), attempt.folder, backend="onnxruntime")


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_one_candidate_alone_wins_and_gets_the_configuration_it_was_measured_in(
    rules, attempt, backend
):
    """Although the policy asks for a speedup over FP32, which is not part of the run."""
    measured = benchmark(candidate=attempt.value.candidate).model_copy(update={"backend": backend})

    found = served.fn(rules, [attempt], [measured])

    assert rules.slo.min_speedup is not None
    assert found.report.candidates[0].outcome is Outcome.PASSED
    assert found.report.winner == attempt.value.candidate
    assert "Speedup was not judged" in found.report.reason
    assert read_config(found.config_pbtxt, "test").backend == backend


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (False, "trying 53.8/s, batch <= 8, delay 0 us, 1 instance: p99 unknown (7 of 120 s)"),
        (True, "measured before: 53.8/s, batch <= 8, delay 0 us, 1 instance: p99 unknown"),
    ],
)
def test_what_was_measured_before_is_not_shown_as_tried(before, said):
    """It took none of the budget."""
    measurement = Measurement(
        config=PLAIN,
        load=Load(rate_per_s=53.7965, duration_s=1.0, seed=1),
        invalid=(),
        sent=1,
        completed=1,
        failed=0,
        throughput_per_s=53.7965,
        percentiles=(),
        late_p99_ms=0.0,
        stages=None,
        latencies_sha256=sha("f"),
    )
    at = Progress("search", 1, 7.0, 120.0, measurement, before=before)

    assert tried.progress_words(at) == said
