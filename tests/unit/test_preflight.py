"""A policy is checked against what is here before anything is built."""

import hashlib
import importlib.util
import io
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from enginegate.errors import PolicyError
from enginegate.policy import parse_policy, read_policy
from enginegate.policy.recording import Shadow
from enginegate.preflight import check_policy
from enginegate.shadow import import_sample

DIGITS = Path(__file__).parents[2] / "policies" / "digits.toml"
DATA = ".enginegate/data/digits"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with the example policy, and data for it."""
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "digits.toml").write_text(DIGITS.read_text())
    for name in ("evaluation", "calibration", "traffic"):
        write(tmp_path / DATA / f"{name}.npz")
    return tmp_path


def write(path, dtype=np.float32, rows=2000, **arrays):
    """A data set of images, whatever they show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = np.zeros((rows, 1, 8, 8), dtype)
    named = {"input.image": images, "label": np.zeros(rows, np.int64)} | arrays
    np.savez(path, **{name: array for name, array in named.items() if array is not None})


def checked(project, **tables):
    """What is found with some tables of the policy changed; None takes a key out."""
    raw = tomllib.loads((project / "digits.toml").read_text())
    for table, changes in tables.items():
        new = {**raw.get(table, {}), **changes}
        raw[table] = {key: value for key, value in new.items() if value is not None}
    if "metrics" in tables:
        raw["gates"]["default"]["max_metric_loss"] = dict.fromkeys(tables["metrics"], 0.1)
    return check_policy(parse_policy(raw, "a test", project))


def problem(project, **tables):
    (found,) = checked(project, **tables).problems
    return found


def test_complete_policy_has_no_problem(project):
    """What this machine cannot decide is listed with its reason."""
    found = checked(project)

    assert found.problems == ()
    assert {str(c) for c in found.undecidable} >= {"tensorrt-fp16"}
    assert found.notes == ()


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("data.evaluation", {"data": {"evaluation": "nothing.npz"}}),
        ("data.calibration", {"data": {"calibration": "nothing.npz"}}),
        ("data.shadow", {"data": {"shadow": "nothing.npz"}}),
        ("shadow.traffic", {"shadow": {"traffic": "nothing.npz"}}),
    ],
)
def test_missing_file_is_named_with_its_key(project, key, tables):
    """And with where it was looked for."""
    said = problem(project, **tables)

    assert said.startswith(f'{key} = "nothing.npz": ')
    assert str(project / "nothing.npz") in said


def test_candidates_made_elsewhere_must_be_there_and_allowed(project):
    """Code is refused before it is opened; data needs no permission."""
    for name in ("qat.onnx", "fast.pt2"):
        (project / name).touch()

    def made(**table):
        return {"candidates": {"made": [{"precision": "fp32"} | table]}}

    assert "there is no file" in problem(project, **made(file="gone.onnx"))
    assert "is native code" in problem(project, **made(file="fast.pt2"))
    assert checked(project, **made(file="fast.pt2", allow_code=True)).problems == ()
    assert checked(project, **made(file="qat.onnx")).problems == ()


def test_candidate_made_elsewhere_is_pinned_where_evidence_travels(project):
    """Parts of kinds of device are found by the policy's digest, which holds only its path."""
    (project / "qat.onnx").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    table = {"file": "qat.onnx", "precision": "fp32", "name": "qat"}

    def asked(**more):
        return {"candidates": {"made": [table | more]}, "devices": {"l4": {"pool": "gpu-l4"}}}

    said = problem(project, **asked())
    assert f'set beside it: sha256 = "{digest}"' in said
    assert checked(project, **asked(sha256=digest)).problems == ()


def test_every_problem_is_told_at_once(project):
    """As one bad policy, with its file."""
    path = project / "digits.toml"
    path.write_text(
        path.read_text().replace("evaluation.npz", "no.npz").replace("traffic.npz", "n")
    )

    with pytest.raises(PolicyError, match=r"(?s)digits\.toml .*data\.evaluation.*shadow\.traffic"):
        check_policy(read_policy(path)).refuse(path)


def test_damaged_file_is_refused_by_its_header(project):
    """Corrupt, pickled, uneven and empty sets, without reading their values."""
    place = project / DATA / "evaluation.npz"
    place.write_bytes(place.read_bytes()[:100])
    assert "cannot be read" in problem(project)
    write(place, label=np.zeros(3, np.int64))
    assert "differ in length" in problem(project)
    write(place, note=np.array([{}] * 2000, object))
    assert "pickled" in problem(project)


def test_data_of_another_form_is_looked_at(project):
    """Its columns must become the inputs of the other sets; nothing is converted for that."""
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((2000, 1, 8, 8), np.float32))
    rows = {"pixels": images, "digit": np.zeros(2000, np.int64)}
    pq.write_table(pa.table(rows), project / "e.parquet")
    data = {"evaluation": "e.parquet", "columns": {"inputs": {"image": "pixels"}}}

    assert checked(project, data={**data, "calibration": "e.parquet"}).problems == ()
    assert "has no column that is called input.NAME" in problem(
        project, data={"evaluation": "e.parquet"}
    )
    assert not (project / ".enginegate/store/data").exists()


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"data": {"evaluation": "python:mine.scores:score"}}, "allow_code is false"),
        (
            {"data": {"evaluation": "python:mine.scores:absent", "allow_code": True}},
            "defines no absent",
        ),
        (
            {"metrics": {"own": {"kind": "mine.scores:absent", "allow_code": True}}},
            "metrics.own.kind",
        ),
        (
            {"metrics": {"own": {"kind": "nowhere:f", "allow_code": True}}},
            "there is no module nowhere",
        ),
        ({"shadow": {"redactor": "mine.scores:absent"}}, "shadow.redactor"),
        ({"shadow": {"slicer": "mine.scores:absent"}}, "shadow.slicer"),
        ({"shadow": {"embedder": "mine.scores:absent"}}, "shadow.embedder"),
        ({"model": {"uri": "python:mine.scores:absent", "allow_code": True}}, "defines no absent"),
        ({"model": {"uri": "python:mine.scores:score"}}, "allow_code is false"),
        ({"model": {"uri": "file:net.onnx"}}, "there is no file"),
        ({"model": {"uri": "hf:bert"}}, "config.json"),
    ],
)
def test_missing_function_or_model_is_named(project, tables, said):
    """The key is named; the module is not imported to find out."""
    (project / "mine").mkdir()
    (project / "mine" / "scores.py").write_text("raise SystemExit\ndef score(o, l): ...\n")

    assert said in problem(project, **tables)


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_missing_package_of_a_cluster_is_named(project, monkeypatch, runner):
    """Before anything is exported, with what to install."""
    found = importlib.util.find_spec
    absent = f"prefect_{runner}"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == absent else found(name, *a)
    )

    assert f"prefect-{runner} is not installed" in problem(project, evaluation={"runner": runner})


@pytest.mark.parametrize(
    "text",
    [
        "def score(o, l): ...",
        "try:\n    from fast import score\nexcept ImportError:\n    score = None",
        "if True:\n    class score: ...",
        "from other import *",
        "def __getattr__(name): ...",
        "import other as score",
        "globals()['sco' + 're'] = 1",
    ],
)
def test_defined_function_is_accepted(project, text):
    """Whatever may define the name is taken for it."""
    (project / "mine.py").write_text(text)

    assert (
        checked(project, metrics={"own": {"kind": "mine:score", "allow_code": True}}).problems == ()
    )


def test_dtype_unknown_to_triton_is_named(project):
    """It could be validated for minutes, and never served."""
    for name in ("evaluation", "calibration", "traffic"):
        write(project / DATA / f"{name}.npz", np.complex64)

    assert "input.image is complex64" in problem(project)


def test_sets_that_do_not_fit_together(project):
    """Types and names are compared before anything is built."""
    write(project / DATA / "calibration.npz", np.float64)
    assert "data.calibration: it holds image: float64" in problem(project)
    write(project / DATA / "calibration.npz", **{"input.mask": np.zeros((2000, 2), np.float32)})
    assert "only one of it and data.evaluation has input.mask" in problem(project)


LIVE = {"shadow": {"traffic": None, "rate_per_s": None}}


def test_live_requests_must_have_been_recorded(project):
    """A qualification that counts on them would end after it has built everything."""
    assert "holds no sample of digits" in problem(project, **LIVE)

    sample(project, np.float32)

    assert checked(project, **LIVE).problems == ()


def test_live_requests_that_cannot_be_traced(project):
    """Triton's traces cannot hold bytes; requests that this program sends need no trace."""
    for name in ("evaluation", "calibration", "traffic"):
        write(project / DATA / f"{name}.npz", np.uint8)

    assert checked(project).problems == ()
    assert "cannot hold image: uint8" in problem(project, **LIVE)

    sample(project, np.uint8)
    found = checked(project, **LIVE)

    assert found.problems == ()
    assert "cannot hold image: uint8" in found.notes[0]


def sample(project, dtype):
    """A sample that something else recorded."""
    write(project / "theirs.npz", dtype, rows=8, label=None)
    home = project / ".enginegate" / "shadow"
    return import_sample(project / "theirs.npz", "digits", Shadow(), home=home)


def test_expected_inconclusive_gates_are_listed(project):
    """Too few samples, no labels: the policy is good, the evidence will not be."""
    write(project / DATA / "evaluation.npz", rows=10, label=None)

    found = checked(project, data={"calibration": None})

    assert found.problems == ()
    assert "onnxruntime-int8" in {str(candidate) for candidate in found.undecidable}
    assert any("holds 10 samples" in note for note in found.notes)
    assert any("no labels" in note for note in found.notes)


@pytest.mark.parametrize(("rows", "noted"), [(764, True), (765, False)])
def test_margin_that_no_result_could_settle_is_noted(project, rows, noted):
    """Before anything is built: 765 samples without a difference settle half a point."""
    write(project / DATA / "evaluation.npz", rows=rows)
    stated = tomllib.loads((project / "digits.toml").read_text())["gates"]["default"]

    found = checked(project, gates={"default": stated | {"max_accuracy_loss": 0.005}})

    assert any("0.005 is settled by 765 at the least" in note for note in found.notes) is noted


def test_memory_of_a_gpu_that_is_not_here(project, monkeypatch):
    """It is said beforehand: nothing could be benchmarked."""
    monkeypatch.setattr("enginegate.preflight.cuda.gpu", lambda: None)

    found = checked(project, load={"shared_memory": "cuda"})

    assert found.problems == ()
    assert 'load.shared_memory = "cuda": this machine has no NVIDIA GPU' in found.notes[-1]
    assert not checked(project, load={"shared_memory": "system"}).notes


def test_missing_signing_key_is_no_problem_here(project):
    """Only who promotes needs it."""
    found = checked(project, signing={"private_key": "/nowhere/release.pem"})

    assert found.problems == ()
    assert "signing.private_key" in found.notes[0]


def test_archive_bomb_is_a_problem(project):
    """What reading refuses after the first build is refused before it, by the headers alone."""
    header = io.BytesIO()
    said = {"descr": "<f4", "fortran_order": False, "shape": (10**9, 1, 8, 8)}
    np.lib.format.write_array_header_1_0(header, said)
    with zipfile.ZipFile(project / DATA / "calibration.npz", "w") as archive:
        archive.writestr("input.image.npy", header.getvalue() + bytes(64))

    found = problem(project)

    assert found.startswith("data.calibration = ")
    assert "it has 64. Write it again with numpy.savez" in found
