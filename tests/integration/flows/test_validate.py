"""Chunks of a large data set through Prefect's workers."""

import sys

import cloudpickle as pickle
import numpy as np
import pytest
from prefect import flow, task
from prefect.context import serialize_context

from enginegate.data import write_data
from enginegate.errors import InputError
from enginegate.evidence import Outcome
from enginegate.policy import parse_policy
from enginegate.policy.gates import Evaluation
from enginegate.workspace import Workspace
from tasks.validate import EvaluationSamples, _sending_little, _workers, observe, validate
from tests.fakes.lab import POLICY, make_lab
from validation.outputs import outputs_to_compare

pytestmark = pytest.mark.xdist_group("flows")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return make_lab(tmp_path_factory.mktemp("lab"), heads=("logits",), samples=3000)


@pytest.mark.usefixtures("prefect_server")
def test_chunks_in_parallel_workers(lab, tmp_path, monkeypatch):
    """Three chunks run as tasks of their own, are judged once, and leave only the verdict."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    write_data(lab.data, tmp_path / "eval.npz")
    rules = parse_policy(
        {
            **POLICY,
            "data": {"evaluation": str(tmp_path / "eval.npz")},
            "evaluation": {"chunk_samples": 1024},
            "slices": {"discover": ["input_norm"]},
        },
        "test",
    )

    @flow(persist_result=False, validate_parameters=False)
    def judged():
        asked = outputs_to_compare(rules.task, rules.outputs, rules.metrics, rules.slices)
        data, workspace = EvaluationSamples(rules.data.evaluation), Workspace.of(rules)
        reference = observe(lab.reference, data, asked, rules.evaluation, workspace)
        engine = lab.engine(lab.graph, "onnxruntime-int8")
        return tuple(
            validate(engine, reference, rules.gates, rules.engine_tables, workspace)
            for _ in range(2)
        )

    first, second = judged()

    assert first == second
    assert first.verdict.outcome is Outcome.PASSED
    assert first.verdict.finding("samples", "evaluation").value == 3000
    assert "evaluation/input_norm=lowest quarter" in {f.scope for f in first.verdict.findings}
    assert set(first.results) == {"evaluation"}
    assert list((tmp_path / "store" / "results" / "chunks").iterdir()) == []
    outputs = next((tmp_path / "store" / "results" / "reference").glob("*/outputs"))
    assert len(list(outputs.iterdir())) == 3


@pytest.mark.long
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_clusters_judge_as_threads_do(lab, tmp_path, monkeypatch, runner):
    """Two processes of a cluster give the verdict of threads to the last digit, for each chunk."""
    pytest.importorskip(f"prefect_{runner}")
    write_data(lab.data, tmp_path / "eval.npz")

    def judged_by(name):
        monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / name))
        rules = parse_policy(
            {
                **POLICY,
                "data": {"evaluation": str(tmp_path / "eval.npz")},
                "evaluation": {"chunk_samples": 1024, "runner": name, "workers": 2},
                "slices": {"discover": ["input_norm"]},
            },
            "test",
        )

        @flow(persist_result=False, validate_parameters=False)
        def judged():
            asked = outputs_to_compare(rules.task, rules.outputs, rules.metrics, rules.slices)
            data, workspace = EvaluationSamples(rules.data.evaluation), Workspace.of(rules)
            reference = observe(lab.reference, data, asked, rules.evaluation, workspace)
            engine = lab.engine(lab.graph, "onnxruntime-int8")
            return validate(engine, reference, rules.gates, rules.engine_tables, workspace)

        return judged()

    assert judged_by(runner).pretty_json() == judged_by("threads").pretty_json()


@pytest.mark.usefixtures("prefect_server")
def test_chunk_travels_without_what_its_task_was_given():
    """To another process Prefect sends the parameters of the task that submits: all the data."""
    sent = []

    @task(persist_result=False)
    def submits(data):
        for how in (Evaluation(runner="dask"), Evaluation()):
            with _sending_little(how):
                sent.append(pickle.dumps(serialize_context()["task_run_context"]))
        return len(data)

    @flow(persist_result=False, validate_parameters=False)
    def judged():
        return submits(np.zeros(1_000_000))

    assert judged() == 1_000_000
    assert [len(each) > 1_000_000 for each in sent] == [False, True]


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_cluster_says_what_it_needs(monkeypatch, runner):
    """Asking for one without its package names the package and the way back."""
    monkeypatch.setitem(sys.modules, f"prefect_{runner}.task_runners", None)

    with (
        pytest.raises(InputError, match=rf"enginegate\[{runner}\]', or set runner to threads"),
        _workers(Evaluation(runner=runner)),
    ):
        pass
