"""What a benchmark is remembered by, where it is served, and what a partial run ends in."""

from dataclasses import replace
from pathlib import Path

import pytest

from enginegate.benchmark.deployment import ServedModel
from enginegate.benchmark.session import (
    BenchmarkPaths,
    BenchmarkSession,
    BenchmarkTarget,
    LiveTarget,
)
from enginegate.candidate import (
    Candidate,
    Engine,
    FileDigest,
    PrecisionProof,
    TensorSpec,
)
from enginegate.content_store import ContentFolder
from enginegate.engine_kinds import engine_kinds
from enginegate.engines import engine_kind, serving
from enginegate.errors import ModelError
from enginegate.evidence import Outcome
from enginegate.measurement import Load, Measurement
from enginegate.policy import parse_policy, read_policy
from enginegate.records import sha256_file
from enginegate.repository.store.layout import engine_config
from enginegate.search.trial_runner import SearchProgress
from enginegate.serving import BackendSettings, ServingConfig, ServingOptions
from enginegate.triton.config import config_text, read_config
from enginegate.triton.install import TritonInstall
from tasks import benchmark as tried
from tasks.record import _artifacts
from tests.fakes.evidence import FP32, benchmark, finding, release, scorecard, sha, verdict

ROOT = Path(__file__).parents[3]
PLAIN = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)
BASELINES = [("fp32", True, False), ("champion", False, False), ("champion", True, True)]


@pytest.fixture
def rules(tmp_path):
    raw = read_policy(ROOT / "policies" / "digits.toml").model_dump()
    raw["target"]["repository"] = str(tmp_path / "live")
    raw["slo"] |= {"min_speedup": 0.8, "fp32_may_win": True}
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
    return ContentFolder(engine, tmp_path, reused=True)


@pytest.fixture
def session(rules, tmp_path):
    """Of an installation that has every backend."""
    (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
    (tmp_path / "backends" / "onnxruntime" / "libtriton_onnxruntime.so").touch()
    binary = tmp_path / "tritonserver"
    binary.write_bytes(b"")
    install = TritonInstall(binary, tmp_path / "backends", (), "test")
    return BenchmarkSession(
        rules.benchmark_tables,
        install,
        BenchmarkPaths(tmp_path, tmp_path, tmp_path),
        None,
        sha("7"),
    )


def on_gpu(engine):
    return engine.model_copy(update={"target": "cuda:sm_90"})


def live(settings=None, **changes):
    fields = {"files": {"model.onnx": sha("a")}, "options": ServingOptions()}
    told = settings or BackendSettings()
    model = ServedModel("digits.live", "python", (), (), {}, settings=told)
    return LiveTarget(BenchmarkTarget(model, **(fields | changes)), PLAIN, 3)


def test_benchmark_key_covers_everything_that_served(session, attempt):
    """Backend and what it was told, and of what is live its bytes and options: a number names them
    in one place only.
    """
    one, told, other = attempt.value, BackendSettings(), BackendSettings(graph_level=1)
    threads = BackendSettings(parameters={"intra_op_thread_count": "1"})
    keys = [
        tried._key(session, one, None, "python", told),
        tried._key(session, one, None, "onnxruntime", told),
        tried._key(session, one, None, "onnxruntime", threads),
        tried._key(session, one, live(), "python", told),
        tried._key(session, one, live(files={"model.onnx": sha("b")}), "python", told),
        tried._key(session, one, live(options=ServingOptions(max_queue_size=8)), "python", told),
        tried._key(session, one, live(settings=other), "python", told),
    ]

    assert len(set(keys)) == len(keys)
    assert keys[3] == tried._key(session, one, live(), "python", told)


@pytest.mark.parametrize(
    ("key", "value", "decides"),
    [
        ("slo.p99_ms", 50.0, True),
        ("search.seed", 7, True),
        ("load.timeout_s", 9.0, True),
        ("cost.price_per_hour", 9.0, True),
        ("serving.max_queue_size", 8, True),
        ("approval.expires_hours", 1.0, False),
        ("retention.releases", 9, False),
        ("target.canary_s", 9.0, False),
        ("watch.look_s", 9.0, False),
    ],
)
def test_benchmark_is_cached_until_a_deciding_table_changes(
    session, attempt, rules, key, value, decides
):
    table, _, field = key.partition(".")
    changed = getattr(rules, table).model_copy(update={field: value})
    tables = rules.model_copy(update={table: changed}).benchmark_tables
    plain = BackendSettings()

    before = tried._key(session, attempt.value, None, "python", plain)
    after = tried._key(replace(session, tables=tables), attempt.value, None, "python", plain)

    assert (before != after) is decides


@pytest.mark.parametrize(("faster_than", "lives", "skips"), BASELINES)
def test_fp32_is_measured_only_as_a_reference(rules, faster_than, lives, skips, monkeypatch):
    """With something live as the reference, the minutes of a refuted FP32 would be for nothing."""
    slo = rules.slo.model_copy(update={"faster_than": faster_than, "min_speedup": 1.2})
    live = object() if lives else None
    monkeypatch.setattr(tried.Layout, "current", lambda _: live)
    judged = [verdict(finding(Outcome.FAILED), candidate=FP32), verdict()]

    skipped = tried.skip_hopeless.fn(
        judged, rules.benchmark, rules.approval, slo, rules.live_tables
    )

    assert (FP32 in skipped) is skips


@pytest.mark.parametrize(
    ("flags", "auto"),
    [
        pytest.param({"convolutions": "0"}, "onnxruntime", id="encoder"),
        pytest.param({"convolutions": "53"}, "python", id="convolutions"),
        pytest.param({}, "python", id="built-before-they-were-counted"),
    ],
)
def test_auto_leaves_convolutions_on_a_gpu_to_the_python_backend(
    session, attempt, rules, flags, auto
):
    """ONNX Runtime plans them anew for every batch size, unless they are padded to a few."""
    native = replace(rules.benchmark_tables, serving=ServingOptions(backend="native"))
    insisting, target = replace(session, tables=native), rules.target
    engine = on_gpu(attempt.value).model_copy(update={"flags": flags})

    assert tried._backend(session, attempt.value, target) == "onnxruntime"
    assert tried._backend(session, engine, target) == auto
    assert tried._backend(insisting, engine, target) == "onnxruntime"


KINDS_OF_DEVICE = [
    ("onnxruntime-int8", "cpu", "", "KIND_CPU"),
    ("onnxruntime-int8", "cpu", "onnxruntime", "KIND_CPU"),
    ("onnxruntime-fp32", "cuda:sm_90", "", "KIND_GPU"),
    ("onnxruntime-fp32", "cuda:sm_90", "onnxruntime", "KIND_GPU"),
    ("tensorrt-fp16", "sm90", "", "KIND_GPU"),
    ("tensorrt-fp16", "sm90", "tensorrt", "KIND_GPU"),
    ("torch_inductor-fp16", "cpu", "", "KIND_CPU"),
    ("torch_inductor-fp16", "cuda sm90", "", "KIND_GPU"),
    ("torch_inductor-fp16", "cuda sm90", "pytorch", "KIND_GPU"),
]


@pytest.mark.parametrize(("candidate", "target", "backend", "kind"), KINDS_OF_DEVICE)
def test_every_kind_of_engine_is_placed_where_it_runs(attempt, candidate, target, backend, kind):
    """Triton's TensorRT backend refuses KIND_CPU, so no plan could be loaded with it."""
    changes = {"candidate": Candidate.parse(candidate), "target": target, "builder": "tensorrt 10"}
    engine = attempt.value.model_copy(update=changes)

    served = serving(engine, attempt.folder, backend=backend)
    config = ServedModel.of("digits", engine, served).config(PLAIN)

    (group,) = config.message.instance_group
    assert group.Kind.Name(group.kind) == kind
    assert served.gpu is (kind == "KIND_GPU")


def test_every_engine_kind_is_in_the_device_table():
    """A new kind of engine needs its rows above."""
    tried_kinds = {Candidate.parse(name).kind for name, *_ in KINDS_OF_DEVICE}

    assert tried_kinds == set(engine_kinds())


@pytest.mark.parametrize(
    ("name", "candidate", "changes"),
    [
        ("onnxruntime_cpu", "onnxruntime-int8", {"flags": {"intra_op_threads": "1"}}),
        (
            "onnxruntime_cuda",
            "onnxruntime-tf32",
            {"target": "cuda sm90 NVIDIA H200", "flags": {"use_tf32": "1"}},
        ),
        ("tensorrt", "tensorrt-fp16", {"target": "sm90", "builder": "tensorrt 10.3.0"}),
    ],
)
def test_native_configurations_are_golden(attempt, name, candidate, changes):
    """Backend, device, threads and TF32 of each native backend, whole."""
    engine = attempt.value.model_copy(update={"candidate": Candidate.parse(candidate), **changes})
    native = engine_kind(engine.candidate.kind).native.backend

    served = serving(engine, attempt.folder, backend=native)
    config = ServedModel.of("digits", engine, served).config(PLAIN)

    golden = ROOT / "tests" / "golden" / f"config_{name}.pbtxt"
    assert config_text(config) == golden.read_text()


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("backend", ["", "onnxruntime"])
def test_serving_threads_are_those_validated(attempt, backend, threads):
    """Left to itself, ONNX Runtime's own backend takes every core for each instance."""
    engine = attempt.value.model_copy(update={"flags": {"intra_op_threads": threads}})

    told = serving(engine, attempt.folder, backend=backend).settings.parameters

    name = "intra_op_thread_count" if backend else "intra_op_threads"
    assert told[name] == threads


def test_tf32_stays_off_where_it_was_off(attempt):
    """The CUDA provider computes FP32 as TF32 unless it is told not to."""
    on_cuda = on_gpu(attempt.value).model_copy(update={"flags": {"use_tf32": "0"}})

    told = serving(on_cuda, attempt.folder, backend="onnxruntime").settings

    assert told.cuda_provider == {"use_tf32": "0"}


@pytest.mark.parametrize(
    ("level", "number"), [("ORT_ENABLE_ALL", 0), ("ORT_ENABLE_BASIC", -1), ("ORT_DISABLE_ALL", 2)]
)
def test_graph_is_optimised_as_it_was_validated(attempt, level, number):
    """Triton numbers ONNX Runtime's levels in its own way; all is its default."""
    engine = attempt.value.model_copy(update={"flags": {"optimisation": level}})

    served = serving(engine, attempt.folder, backend="onnxruntime")
    config = ServedModel.of("digits", engine, served).config(PLAIN)

    assert served.settings.graph_level == config.message.optimization.graph.level == number


def test_unknown_level_is_not_served_natively(attempt):
    """Without the level, the backend would run something else than what was validated."""
    engine = attempt.value.model_copy(update={"flags": {"optimisation": "ORT_ENABLE_LAYOUT"}})

    with pytest.raises(ModelError, match=r"level ORT_ENABLE_LAYOUT.*does not offer"):
        serving(engine, attempt.folder, backend="onnxruntime")


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_benchmark_release_and_mlflow_configs_agree(rules, attempt, backend):
    """The configuration that was measured is filed, and served but for versions and digests."""
    engine = attempt.value
    measured = benchmark(candidate=engine.candidate).model_copy(update={"backend": backend})
    card = scorecard(benchmarks=(measured,), verdicts=())
    told = serving(engine, attempt.folder, backend=backend)
    model = ServedModel.of(rules.name, engine, told)
    deployed = model.config(measured.chosen, measured.options)

    filed = _artifacts(card, attempt, {}).config_pbtxt
    made = release(
        model=rules.name,
        backend=told.backend,
        device="gpu" if told.gpu else "cpu",
        settings=told.settings,
        inputs=engine.inputs,
        outputs=engine.outputs,
        serving=measured.chosen,
    )

    assert read_config(filed, "filed") == deployed
    assert comparable(engine_config(made)) == comparable(deployed)
    assert deployed.backend == backend


def comparable(config):
    """What Triton is told of the engine, without versions and a benchmark's own mark."""
    message = type(config.message)()
    message.CopyFrom(config.message)
    message.ClearField("version_policy")
    message.parameters.pop("enginegate.serving", None)
    return message


@pytest.mark.parametrize("backend", ["python", "onnxruntime"])
def test_single_candidate_wins_with_its_measured_configuration(rules, attempt, backend):
    """Although the policy asks for a speedup over FP32, which is not part of the run."""
    measured = benchmark(candidate=attempt.value.candidate).model_copy(update={"backend": backend})

    found = tried.report_benchmarks.fn(
        [attempt],
        [measured],
        rules.benchmark_tables,
        rules.live_tables,
        model_uri=rules.model.uri,
        left_out=set(rules.candidates.all()) - {attempt.value.candidate},
    )

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
def test_progress_of_a_cached_measurement(before, said):
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
    at = SearchProgress("search", 1, 7.0, 120.0, measurement, cached=before)

    assert tried.progress_words(at) == said
