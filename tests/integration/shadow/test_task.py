"""Which sample a qualification uses, and what it is told about it."""

import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginegate.candidate import FileDigest, OnnxModel, TensorSpec
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet, write_data
from enginegate.engines import open_reference
from enginegate.errors import DataError
from enginegate.evidence import Outcome
from enginegate.policy import parse_policy
from enginegate.policy.recording import Shadow
from enginegate.shadow import import_sample, read_traffic_sample
from enginegate.workspace import Workspace
from tasks.shadow import record_shadow
from tests.fakes.family import CLASSES, FEATURES, classifier, samples

_DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def shadow_traffic(policy, source):
    workspace = Workspace.of(policy)
    return record_shadow.fn(policy.traffic_tables, policy.engine_tables, source, workspace)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The FP32 model, as the store holds it."""
    folder = tmp_path_factory.mktemp("onnx")
    path = folder / "model.onnx"
    onnx.save(classifier(), path)
    x = TensorSpec(name="x", dtype="float32", shape=(-1, FEATURES))
    value = OnnxModel(
        source="models:/tiny/1",
        source_sha256="a" * 64,
        file=FileDigest.of(path),
        inputs=(x,),
        outputs=(TensorSpec(name="logits", dtype="float32", shape=(-1, CLASSES)),),
        opset=20,
        ir_version=10,
        producer="test",
        exporter="test",
        parity_max_abs_error=None,
        parity_tolerance=None,
        parity_samples=0,
        proven_batch_sizes=(1,),
    )
    (folder / "manifest.json").write_bytes(value.pretty_json())
    return ContentFolder(value, folder, reused=False)


@pytest.fixture
def rules(tmp_path):
    """Make a policy with these tables; calibration data is clean."""
    calibration = tmp_path / "calibration.npz"
    write_data(samples(128, 2), calibration)

    def make(*, shadow=None, sample=None):
        raw = tomllib.loads(_DIGITS.read_text())
        data = {**raw["data"], "calibration": calibration, "shadow": sample}
        raw |= {"name": "tiny", "data": data}
        raw["shadow"] = shadow
        return parse_policy(raw, "a test")

    return make


@pytest.fixture
def recorded(tmp_path, source):
    """Keep rows, with what the reference answers on them, as another system's recording."""

    def keep(data, home, *, model="tiny", wanted=None, off=0.0):
        import pyarrow as pa
        import pyarrow.parquet as pq

        with open_reference(source.value, source.folder) as reference:
            logits = reference.run(dict(data.inputs))["logits"] + off
        path = tmp_path / "theirs.parquet"
        columns = {
            "input.x": list(data.inputs["x"]),
            "output.logits": list(logits),
            "model_version": np.full(len(data), 7),
        }
        pq.write_table(pa.table(columns), path)
        return import_sample(path, model, wanted or Shadow(), home=home)[0]

    return keep


def _told(traffic):
    return {note.gate: (note.outcome, note.advisory) for note in traffic.notes}


def test_without_a_sample_there_is_none(rules, source, workspace):
    """A policy that asks for no shadow traffic gets none."""
    del workspace

    assert shadow_traffic(rules(), source).data is None


@pytest.mark.triton
@pytest.mark.xdist_group("shadow")
def test_traffic_is_recorded_once(rules, source, workspace, tmp_path):
    """Inputs are sent to the reference and recorded with their slices; the next run reuses that."""
    write_data(samples(60, 3, labelled=False), tmp_path / "traffic.npz")
    policy = rules(
        shadow={
            "traffic": tmp_path / "traffic.npz",
            "rate_per_s": 100,
            "trace_rate": 2,
            "max_samples": 60,
        }
    )

    first = shadow_traffic(policy, source)
    second = shadow_traffic(policy, source)

    assert _told(first) == {
        "shadow_integrity": (Outcome.PASSED, False),
        "shadow_version": (Outcome.PASSED, False),
        "input_drift": (Outcome.PASSED, True),
    }
    assert len(first.data) == 60
    assert set(first.data.slices["light"]) == {"day", "night"}
    assert second.data.sha256 == first.data.sha256
    assert second.notes == first.notes
    assert not list((workspace / "logs" / "shadow" / "traces").iterdir())


def mixed_types(folder):
    """A model that takes bytes and half floats, answers with all of them, and data for it."""
    float_, half = TensorProto.FLOAT, TensorProto.FLOAT16
    types = {"pixels": TensorProto.UINT8, "offsets": TensorProto.INT8, "scales": half}
    nodes = [helper.make_node("Cast", [name], [f"{name}_f"], to=float_) for name in types]
    nodes += [
        helper.make_node("Sum", [f"{name}_f" for name in types], ["sum"]),
        helper.make_node("MatMul", ["sum", "weight"], ["logits"]),
        helper.make_node("Cast", ["logits"], ["halves"], to=half),
        helper.make_node("Identity", ["pixels"], ["echo"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        [helper.make_tensor_value_info(n, t, ["batch", FEATURES]) for n, t in types.items()],
        [
            helper.make_tensor_value_info("logits", float_, ["batch", CLASSES]),
            helper.make_tensor_value_info("halves", half, ["batch", CLASSES]),
            helper.make_tensor_value_info("echo", TensorProto.UINT8, ["batch", FEATURES]),
        ],
        [numpy_helper.from_array(np.eye(FEATURES, CLASSES, dtype=np.float32), "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path = folder / "model.onnx"
    onnx.save(model, path)
    random = np.random.default_rng(0)
    data = DataSet(
        "a test",
        {
            "pixels": random.integers(0, 256, (40, FEATURES), np.uint8),
            "offsets": random.integers(-128, 128, (40, FEATURES), np.int8),
            "scales": random.normal(size=(40, FEATURES)).astype(np.float16),
        },
        None,
        np.arange(40).astype(np.str_),
        {"half": np.where(np.arange(40) < 20, "first", "second")},
    )
    spec = partial(TensorSpec, shape=(-1, FEATURES))
    inputs = tuple(spec(name=n, dtype=a.dtype.name) for n, a in data.inputs.items())
    classes = partial(TensorSpec, shape=(-1, CLASSES))
    outputs = (
        classes(name="logits", dtype="float32"),
        classes(name="halves", dtype="float16"),
        spec(name="echo", dtype="uint8"),
    )
    return path, inputs, outputs, data


@pytest.mark.triton
@pytest.mark.xdist_group("shadow")
def test_types_that_a_trace_cannot_hold_are_recorded_by_the_sender(
    rules, source, workspace, tmp_path
):
    """Bytes and half floats, exactly as they were sent and answered; redacted as all are."""
    path, inputs, outputs, data = mixed_types(tmp_path)
    write_data(data, tmp_path / "traffic.npz")
    value = source.value.model_copy(
        update={"file": FileDigest.of(path), "inputs": inputs, "outputs": outputs}
    )
    (tmp_path / "manifest.json").write_bytes(value.pretty_json())
    wanted = {
        "traffic": tmp_path / "traffic.npz",
        "rate_per_s": 200,
        "trace_rate": 1,
        "max_samples": 40,
        "hash": ["request_id"],
    }
    policy = rules(shadow=wanted)

    traffic = shadow_traffic(
        policy.model_copy(update={"data": policy.data.model_copy(update={"calibration": None})}),
        ContentFolder(value, tmp_path, reused=False),
    )

    sent = {
        row.tobytes(): half
        for row, half in zip(data.inputs["pixels"], data.slices["half"], strict=True)
    }
    assert {name: array.dtype.name for name, array in traffic.data.inputs.items()} == {
        "pixels": "uint8",
        "offsets": "int8",
        "scales": "float16",
    }
    assert len(traffic.data) == 40
    pixels = traffic.data.inputs["pixels"]
    assert [sent[row.tobytes()] for row in pixels] == traffic.data.slices["half"].tolist()
    assert _told(traffic)["shadow_integrity"] == (Outcome.PASSED, False)
    (folder,) = (workspace / "shadow").iterdir()
    kept = read_traffic_sample(folder)
    assert np.array_equal(kept.outputs["echo"], pixels)
    assert set(kept.request_ids) == {""}
    assert np.all(np.diff(kept.arrivals_s) > 0)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kept.info.requests == 40


def test_newest_live_sample_is_used(rules, source, workspace, recorded):
    """Without traffic to send, what was recorded live last is the sample; else it says how."""
    policy = rules(shadow={})
    with pytest.raises(DataError, match="enginegate shadow record"):
        shadow_traffic(policy, source)
    recorded(samples(60, 4), workspace / "shadow")
    newest = recorded(samples(80, 5), workspace / "shadow", off=1.0)

    traffic = shadow_traffic(policy, source)

    assert traffic.data.sha256 == read_traffic_sample(newest).data.sha256
    assert _told(traffic) == {
        "shadow_integrity": (Outcome.INCONCLUSIVE, True),
        "shadow_version": (Outcome.PASSED, True),
        "input_drift": (Outcome.PASSED, True),
    }


def test_drift_counts_when_the_policy_limits_it(rules, source, workspace, recorded):
    """Inputs scaled by 255 make the sample inconclusive under a limit on drift."""
    plain = samples(100, 6)
    scaled = replace(plain, inputs={"x": plain.inputs["x"] * 255})
    path = recorded(scaled, workspace / "elsewhere")

    traffic = shadow_traffic(rules(shadow={"max_psi": 0.25}, sample=path), source)

    assert _told(traffic)["input_drift"] == (Outcome.INCONCLUSIVE, False)


def test_sample_of_another_model_is_no_evidence(rules, source, workspace, recorded):
    """Requests to another model make the verdict inconclusive, whatever they hold."""
    path = recorded(samples(60, 7), workspace / "elsewhere", model="other")

    traffic = shadow_traffic(rules(sample=path), source)

    assert _told(traffic)["shadow_version"] == (Outcome.INCONCLUSIVE, False)


def test_redacted_sample_cannot_be_replayed(rules, source, workspace, recorded):
    """Without its inputs there is nothing to judge candidates on, and the verdict says so."""
    path = recorded(samples(60, 8), workspace / "elsewhere", wanted=Shadow(drop=("x",)))

    traffic = shadow_traffic(rules(sample=path), source)

    assert traffic.data is None
    assert _told(traffic) == {"shadow_integrity": (Outcome.INCONCLUSIVE, False)}


def test_arrays_are_a_sample_too(rules, source, workspace, tmp_path):
    """A plain set of arrays is checked for drift; there is nothing else to check it by."""
    del workspace
    write_data(samples(60, 9, labelled=False), tmp_path / "shadow.npz")

    traffic = shadow_traffic(rules(sample=tmp_path / "shadow.npz"), source)

    assert len(traffic.data) == 60
    assert _told(traffic) == {"input_drift": (Outcome.PASSED, True)}
