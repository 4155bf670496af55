"""An engine kind that another package brings: no line of this one changes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginegate import engine_kinds
from enginegate.candidate import Candidate, Unbuilt
from enginegate.data import DataSet, write_data
from enginegate.engines import (
    availability,
    engine_kind,
    open_engine,
    open_reference,
    plan_engine,
    serving,
    this_machine,
    undecidable,
)
from enginegate.errors import ModelError, PolicyError
from enginegate.evidence import Outcome
from enginegate.policy import parse_policy
from enginegate.triton.backends import backend_for
from enginegate.triton.config import opened_file
from enginegate.workspace import Workspace
from tasks.build import build
from tasks.engine_speed import measure_alone
from tasks.validate import EvaluationSamples, observe, validate
from tests.fakes import evidence, toy_kind
from tests.integration.engines.conftest import POLICY
from validation.choice import choose, not_benchmarked
from validation.outputs import CLASSIFY

pytestmark = pytest.mark.xdist_group("engines")
ROOT = Path(__file__).parents[3]


def install(folder, entry_points):
    """A distribution in a folder of Python's path, as pip leaves it."""
    metadata = folder / "toy_kind-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kind\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[enginegate.engine_kinds]\n{entry_points}\n")
    return folder


@pytest.fixture
def installed(tmp_path_factory, monkeypatch):
    """The package with the toy kind is on Python's path; it is gone afterwards."""
    folder = install(tmp_path_factory.mktemp("site"), "toy = tests.fakes.toy_kind:KIND")
    monkeypatch.syspath_prepend(folder)
    engine_kinds._installed.cache_clear()
    yield folder
    engine_kinds._installed.cache_clear()


@pytest.fixture
def rules(installed, samples, tmp_path, monkeypatch):  # noqa: ARG001
    """Reads the test policy with candidates of the toy kind, and its table."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "home"))
    labelled = replace(samples, labels=np.arange(len(samples)) % 10)
    write_data(labelled, tmp_path / "eval.npz")

    def read(*precisions, **toy):
        data = {"evaluation": str(tmp_path / "eval.npz")}
        tables = {"data": data, "candidates": {"toy": list(precisions)}, "toy": toy}
        return parse_policy({**POLICY, **tables}, "test policy")

    return read


def test_it_is_planned_built_proven_and_judged_like_any_other(rules, cnn):
    """From the policy to a verdict, with the kind's own table deciding."""
    policy = rules("fp32", "fp16", rows=4)
    workspace, tables = Workspace.of(policy), policy.engine_tables
    reference = observe.fn(
        cnn, EvaluationSamples(policy.data.evaluation), (CLASSIFY,), policy.evaluation, workspace
    )

    for candidate in policy.candidates.all():
        built = build.fn(candidate, tables, cnn, workspace)
        verdict = validate.fn(built, reference, policy.gates, tables, workspace).verdict

        assert candidate.name == f"toy-{candidate.precision}"
        assert built.value.proof.proven
        assert built.value.proof.weighted_layers == {candidate.precision.value: 3}
        assert built.value.flags == {"rows": "4"}
        assert verdict.finding("top1_agreement", "evaluation").outcome is Outcome.PASSED


@pytest.fixture
def one_class(installed, network, samples, tmp_path, monkeypatch):  # noqa: ARG001
    """A policy that only asks for accuracy and top-1 agreement, with data of mostly one class.

    The class is the one that FP32 answers with, and the first sample is of it.
    """
    import torch

    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "home"))
    with torch.no_grad():
        logits = network(torch.from_numpy(samples.inputs["image"])).numpy()
    classes = logits.argmax(axis=1)
    usual = np.bincount(classes).argmax()
    of_it, others = np.flatnonzero(classes == usual), np.flatnonzero(classes != usual)
    places = np.concatenate([np.resize(of_it, 950), np.resize(others, 50)])
    data = DataSet(
        "eval.npz",
        {"image": samples.inputs["image"][places]},
        classes[places],
        np.array([f"image-{place}" for place in range(len(places))]),
        {},
    )
    write_data(data, tmp_path / "eval.npz")
    limits = {"max_kl_p99_nats": 1e9, "max_abs_error": 1e9, "min_top1_agreement": 0.9}

    def read(**toy):
        tables = {
            "data": {"evaluation": str(tmp_path / "eval.npz")},
            "candidates": {"toy": ["fp32"]},
            "gates": {"default": POLICY["gates"]["default"] | limits},
            "toy": toy,
        }
        return parse_policy({**POLICY, **tables}, "test policy")

    return read


@pytest.mark.parametrize(
    ("answers", "gates"),
    [
        pytest.param("right", set(), id="right"),
        pytest.param("zeros", {"constant_answers"}, id="zeros"),
        pytest.param("nan", {"nonfinite"}, id="nan"),
        pytest.param("constant", {"constant_answers"}, id="the-usual-class"),
    ],
)
def test_a_wrong_engine_is_refused_however_fast_it_is(one_class, cnn, answers, gates):
    """Its verdict failed, so it is never benchmarked nor chosen, and the reason says so.

    A constant answer of the usual class loses five percent of accuracy here, which the policy
    allows.
    """
    policy = one_class(answers=answers)
    workspace, tables = Workspace.of(policy), policy.engine_tables
    reference = observe.fn(
        cnn, EvaluationSamples(policy.data.evaluation), (CLASSIFY,), policy.evaluation, workspace
    )
    built = build.fn(Candidate.parse("toy-fp32"), tables, cnn, workspace)
    verdict = validate.fn(built, reference, policy.gates, tables, workspace).verdict
    speed = measure_alone.fn(
        built, policy.benchmark, policy.search, policy.traffic_tables, workspace
    )

    failed = {finding.gate for finding in verdict.blocking}
    assert gates <= failed
    assert (verdict.outcome is Outcome.FAILED) is (answers != "right"), verdict.blocking
    assert speed.best.samples_per_s > 0
    if answers == "constant":
        assert {f.gate for f in verdict.blocking if f.outcome is Outcome.FAILED} == gates
    if answers != "right":
        served = evidence.benchmark(1e6, candidate=verdict.candidate)
        skipped = not_benchmarked([verdict], also_inconclusive=True, baselines=False)
        assert list(skipped) == [verdict.candidate]
        assert choose([verdict], [served], policy.search).winner is None


def test_a_wrong_engine_is_faster_alone(one_class, cnn):
    """So speed alone would have chosen it."""
    speeds = {}
    for answers in ("right", "zeros"):
        policy = one_class(answers=answers)
        workspace = Workspace.of(policy)
        built = build.fn(Candidate.parse("toy-fp32"), policy.engine_tables, cnn, workspace)
        speeds[answers] = measure_alone.fn(
            built, policy.benchmark, policy.search, policy.traffic_tables, workspace
        )

    assert speeds["zeros"].best.samples_per_s > speeds["right"].best.samples_per_s


def test_its_engine_runs_as_fp32_does(rules, cnn, samples):
    """The engine that was built is opened through the same door as every other."""
    policy = rules("fp32")
    built = build.fn(Candidate.parse("toy-fp32"), policy.engine_tables, cnn, Workspace.of(policy))

    with open_engine(built.value, built.folder) as runner:
        answers = runner.run(dict(samples.inputs))
    with open_reference(cnn.value, cnn.folder) as runner:
        expected = runner.run(dict(samples.inputs))

    assert runner.device != toy_kind.ToyRunner.device
    for name, array in expected.items():
        np.testing.assert_allclose(answers[name], array, rtol=1e-3, atol=1e-5)


def test_its_settings_that_decide_the_engine_are_in_the_plans_key(rules, cnn):
    """Of its table, `deciding_settings` says which."""

    def key(**toy):
        tables = rules("fp32", **toy).engine_tables
        candidate = Candidate.parse("toy-fp32")
        return plan_engine(cnn, candidate, tables=tables, calibration=None).key

    assert key() == key(rows=16) == key(verbose=True)
    assert key() != key(rows=8)


def test_kind_states_its_own_obstacle(rules, cnn):
    """A precision that it lacks, and one that this machine lacks; nothing is built for either."""
    policy = rules("fp32", "bf16", "int8")
    obstacles = undecidable(policy.engine_tables, this_machine(policy.engine_tables))

    assert {each.name: obstacle.why for each, obstacle in obstacles.items()} == {
        "toy-bf16": "it rounds bf16 wrongly here",
        "toy-int8": "the reference evaluator has no int8",
    }
    attempt = build.fn(Candidate.parse("toy-int8"), policy.engine_tables, cnn, Workspace.of(policy))
    assert isinstance(attempt, Unbuilt)
    assert (attempt.undecidable, attempt.remedy) == (True, "Drop int8 from toy under [candidates].")


def test_it_is_served_natively_where_the_server_has_its_backend(rules, cnn):
    """Its backend's name and file are the registry's; without that backend, by its own runner."""
    policy = rules("fp32")
    built = build.fn(Candidate.parse("toy-fp32"), policy.engine_tables, cnn, Workspace.of(policy))

    natively = serving(built.value, built.folder, backend="toy")
    usually = serving(built.value, built.folder)

    assert (natively.backend, set(natively.files)) == ("toy", {"model.toy"})
    assert (usually.backend, set(usually.files)) == ("python", {"model.py", "model.toy"})
    assert opened_file("toy") == "model.toy"
    assert engine_kind("toy").onnx_graph(built.value, built.folder).is_file()
    assert [each.kind for each in availability()] == [
        "onnxruntime",
        "tensorrt",
        "torch_inductor",
        "toy",
    ]


@pytest.mark.parametrize(
    ("toy", "message"),
    [
        ({"row": 4}, r"toy\.row: there is no such key; did you mean rows\? \(given: 4\)"),
        ({"rows": 0}, r"toy\.rows: must be more than 0 \(given: 0\)"),
        ({"rows": "4"}, r"toy\.rows: must be a number \(given: '4'\)"),
        ({"rows": 2000}, r"toy\.rows: 2000 cannot be meant; allowed is at most 1,024 \(it is slow"),
    ],
)
def test_errors_in_its_table_name_the_file_the_table_and_the_key(rules, toy, message):
    """As in every other table of a policy."""
    with pytest.raises(PolicyError, match=r"(?s)test policy is not a valid policy.*" + message):
        rules("fp32", **toy)


def test_kind_not_installed_is_refused_by_name():
    """In a policy, and in an engine of another machine's store."""
    tables = {"candidates": {"toy": ["fp32"]}, "toy": {"rows": 4}}

    with pytest.raises(PolicyError, match=r"(?s)candidates\.toy: there is no such.*\n  toy: there"):
        parse_policy({**POLICY, **tables}, "test policy")
    with pytest.raises(ModelError, match="no engine kind 'toy' here; there are onnxruntime, tens"):
        engine_kind("toy")


def test_the_command_knows_an_installed_kind(installed, tmp_path):
    """`enginegate policy check` reads its table, and lists its candidates."""
    text = (ROOT / "policies" / "digits.toml").read_text()
    own = '[toy]\nrows = 4\n\n[candidates]\ntoy = ["fp32", "bf16"]\n'
    (tmp_path / "policy.toml").write_text(text.replace("[candidates]\n", own, 1))
    environment = os.environ | {"PYTHONPATH": f"{installed}:{ROOT}"}

    done = subprocess.run(
        [Path(sys.executable).with_name("enginegate"), "policy", "check", tmp_path / "policy.toml"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    shown = " ".join(done.stdout.split())
    assert "toy-fp32, toy-bf16" in shown, done.stderr


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("toy = tests.fakes.nowhere:KIND", "of tests.fakes.nowhere:KIND.*cannot be loaded: Module"),
        ("toy = tests.fakes.toy_kind:VERSION", r"VERSION \(toy-kind\) is str, and an engine kind"),
        ("a = tests.fakes.toy_kind:KIND\nb = tests.fakes.toy_kind:KIND", "of that name already"),
    ],
)
def test_broken_kind_package_is_named(tmp_path, monkeypatch, entry_point, message):
    """The message names the package, so that it can be mended or uninstalled."""
    monkeypatch.syspath_prepend(install(tmp_path, entry_point))
    engine_kinds._installed.cache_clear()
    try:
        with pytest.raises(ModelError, match=message):
            engine_kinds.engine_kinds()
    finally:
        engine_kinds._installed.cache_clear()


def test_registering_by_a_call(monkeypatch):
    """For a kind that is no package; a name is taken once."""
    monkeypatch.setattr(engine_kinds, "_registered", {})
    engine_kinds.register(toy_kind.KIND)

    assert "toy" in engine_kinds.engine_kinds()
    with pytest.raises(ModelError, match="an engine kind 'toy' already"):
        engine_kinds.register(toy_kind.KIND)


def test_triton_without_a_native_backend_serves_by_the_kinds_own_runner():
    """Unless the policy insists."""
    assert backend_for("auto", None, install=None, live=None) == "python"
    with pytest.raises(ModelError, match="no backend of its own for this engine kind"):
        backend_for("native", None, install=None, live=None)
