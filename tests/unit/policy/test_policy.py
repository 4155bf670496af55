"""Reading policies: what is refused, and where the message points."""

import copy
import math
import os
import pickle
import tomllib
from pathlib import Path

import pytest

from enginegate.candidate import Candidate, Precision
from enginegate.errors import PolicyError
from enginegate.policy import gates_for, parse_policy, read_policy
from enginegate.policy.paths import project_of
from enginegate.workspace import Workspace

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


def parse(changes):
    """The example policy with keys, by their dotted names, given other values."""
    raw = tomllib.loads(DIGITS.read_text())
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = raw
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return parse_policy(raw, "policy.toml")


def refusal(changes):
    with pytest.raises(PolicyError) as caught:
        parse(changes)
    return str(caught.value)


def test_the_example_policy_is_valid():
    """It names every candidate once, in the order of the file."""
    names = [candidate.name for candidate in read_policy(DIGITS).candidates.all()]

    assert names[:2] == ["onnxruntime-fp32", "onnxruntime-int8"]
    assert len(set(names)) == len(names) == 3


def test_policy_pickles():
    """Its class is made here, for the engine kinds there are; the other process makes its own."""
    policy = read_policy(DIGITS)

    travelled = pickle.loads(pickle.dumps(policy))  # noqa: S301 - our own bytes

    assert (travelled, travelled.root) == (policy, policy.root)


def test_unknown_key_is_refused_with_its_place(tmp_path):
    """A misspelt limit cannot silently loosen a gate: both halves of the typo are named."""
    path = tmp_path / "policy.toml"
    path.write_text(DIGITS.read_text().replace("max_accuracy_loss", "max_acuracy_loss", 1))

    with pytest.raises(PolicyError) as caught:
        read_policy(path)

    assert str(path) in str(caught.value)
    assert (
        "gates.default.max_acuracy_loss: there is no such key; did you mean max_accuracy_loss?"
        in str(caught.value)
    )
    assert "gates.default.max_accuracy_loss: is missing" in str(caught.value)


def test_non_toml_file_is_refused(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("schema_version = = 1")

    with pytest.raises(PolicyError, match="is not TOML"):
        read_policy(path)


def test_every_problem_is_listed_at_once():
    """Two mistakes in different tables need one run, not two."""
    message = refusal({"slo.p99_ms": -100, "search.instances": []})

    assert "slo.p99_ms" in message
    assert "instances is empty" in message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema_version", 2, "schema_version"),
        ("model.uri", "runs:/abc", "model.uri"),
        ("model.uri", "models:/digits/latest", "model.uri"),
        ("target.repository", "../../etc", "may not contain '..'"),
        ("name", "../digits", "name"),
        ("name", 'a"b\nc', "name"),
        ("slo.p99_ms", True, "p99_ms: must be a number"),
        ("slo.p99_ms", "99", "p99_ms: must be a number"),
        ("slo.p99_ms", math.inf, "slo.p99_ms: inf cannot be meant"),
        ("search.instances", [True], "instances: must be"),
        ("search.instances", [1, 1_000_000], "instances: 1000000 cannot be meant; allowed is at"),
        ("search.seed", "0", "search.seed: must be a number"),
        ("gates.tf33", {}, "gates.tf33: must be"),
        ("gates.default.max_accuracy_loss", math.nan, "max_accuracy_loss: nan"),
        ("approval.expires_hours", 1e18, "at most 8,784"),
        ("approval.expires_hours", 10**400, "expires_hours: 1.79769"),
    ],
)
def test_impossible_value_is_refused_by_key(key, value, message):
    """The key, its value and what is allowed are named; nothing is run with it first."""
    assert message in refusal({key: value})


def test_missing_policy_names_the_file(tmp_path):
    """The message names the file."""
    with pytest.raises(PolicyError, match=r"nothing\.toml: No such file"):
        read_policy(tmp_path / "nothing.toml")


def test_precision_table_overrides_only_stated_keys():
    """The rest comes from [gates.default]."""
    policy = read_policy(DIGITS)
    default, int8 = policy.gates["default"], gates_for(policy.gates, Precision.INT8)

    assert int8.min_samples == default.min_samples
    assert int8.max_abs_error != default.max_abs_error


def test_another_version_keeps_the_rules():
    """Only the model's address changes, so its digest of rules changes with it."""
    policy = read_policy(DIGITS)

    other = policy.with_model("models:/digits/2")

    assert other.model.uri == "models:/digits/2"
    assert other.gates == policy.gates
    assert policy.digest_for("models:/digits/2") == other.digest != policy.digest
    assert policy.digest_for(policy.model.uri) == policy.digest
    with pytest.raises(PolicyError, match="nonsense"):
        policy.with_model("nonsense")


def test_candidate_round_trips_through_its_name():
    """Names and candidates are the same thing in two forms."""
    for candidate in read_policy(DIGITS).candidates.all():
        assert Candidate.parse(candidate.name) == candidate


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write the example policy into a project, run in another folder, and return the policy."""

    def make(name: str = "project") -> Path:
        policies = tmp_path / name / "policies"
        policies.mkdir(parents=True)
        (tmp_path / name / "pyproject.toml").touch()
        (policies / "digits.toml").write_text(DIGITS.read_text())
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        monkeypatch.chdir(elsewhere)
        return policies / "digits.toml"

    return make


def test_relative_paths_start_from_the_policys_project(project, tmp_path):
    """Not from the current folder; absolute ones stay as they are."""
    path = project()
    path.write_text(
        path.read_text()
        .replace('uri = "models:/digits/1"', 'uri = "file:models/net.onnx"')
        .replace("[target]", '[signing]\npublic_key = "/etc/key.pem"\n\n[target]')
    )
    root = tmp_path / "project"

    policy = read_policy(Path("..") / "project" / "policies" / "digits.toml")

    assert policy.root == root
    assert policy.target.repository == root / ".enginegate/live/digits"
    assert policy.data.evaluation.path == root / ".enginegate/data/digits/evaluation.npz"
    assert policy.model.path == root / "models/net.onnx"
    assert policy.signing.public_key == Path("/etc/key.pem")
    assert policy.with_model("models:/digits/2").target == policy.target
    assert copy.deepcopy(policy).digest == policy.digest


def test_the_workspace_is_that_of_the_policys_project(project, tmp_path, monkeypatch):
    """ENGINEGATE_HOME, where it is set, is the workspace of everything."""
    policy = read_policy(project())

    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    assert Workspace.of(policy).root == tmp_path / "project" / ".enginegate"
    monkeypatch.setenv("ENGINEGATE_HOME", "home")
    assert Workspace.of(policy).root == tmp_path / "elsewhere" / "home"


def test_project_is_the_nearest_marked_folder(tmp_path):
    """A workspace or a project file; where there is none, the folder that has ``policies/``."""
    deep = tmp_path / "outer" / "inner" / "policies"
    deep.mkdir(parents=True)

    assert project_of(deep) == tmp_path / "outer" / "inner"
    assert project_of(deep.parent) == deep.parent
    (tmp_path / "outer" / "pyproject.toml").touch()
    assert project_of(deep) == tmp_path / "outer"
    (tmp_path / "outer" / "inner" / ".enginegate").mkdir()
    assert project_of(deep) == tmp_path / "outer" / "inner"


def test_policy_digest_is_independent_of_location(project):
    """An approval binds to it, and workers have the checkout in other places."""
    here, there = read_policy(project("here")), read_policy(project("there"))

    assert here.target.repository != there.target.repository
    assert here.digest == there.digest == read_policy(DIGITS).digest
    assert here.data.digest == there.data.digest
    assert here.with_model("models:/digits/2").digest == there.with_model("models:/digits/2").digest


def test_numbers_that_cannot_be_meant_hide_no_other_mistake():
    """Five mistakes of three kinds need one run; a number that is refused is not missing too."""
    message = refusal(
        {
            "slo.p99_ms": math.inf,
            "name": "Dig its!",
            "search.instances": [1_000_000],
            "approval.approvers": ["ada", "bo"],
            "approval.required": 3,
            "retentoin": {"releases": 5},
        }
    )

    keys = [line.split(":")[0].strip() for line in message.splitlines()[1:-1]]
    assert keys == ["slo.p99_ms", "search.instances", "name", "approval", "retentoin"]


def test_named_pipe_is_not_waited_for(tmp_path):
    """Nobody may ever write into it; process substitution, which is another kind, is read."""
    os.mkfifo(tmp_path / "pipe.toml")
    reading, writing = os.pipe()
    os.write(writing, DIGITS.read_bytes())
    os.close(writing)

    with pytest.raises(PolicyError, match="named pipe"):
        read_policy(tmp_path / "pipe.toml")
    assert read_policy(Path(f"/dev/fd/{reading}")).name == "digits"
    os.close(reading)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a = " + "[" * 5000 + "]" * 5000, id="brackets"),
        pytest.param("a" + ".a" * 5000 + " = 1", id="dots"),
    ],
)
def test_deeply_nested_policy_is_refused(tmp_path, text):
    """Nobody has to read a traceback of a thousand lines."""
    (tmp_path / "deep.toml").write_text(text)

    with pytest.raises(PolicyError, match="nested too deep"):
        read_policy(tmp_path / "deep.toml")


def test_non_policy_file_is_not_read_whole():
    """A device or a data file that was named by mistake fills no memory."""
    with pytest.raises(PolicyError, match="larger than 1,048,576 bytes"):
        read_policy(Path("/dev/zero"))


def test_tables_are_checked_together():
    """What one table says must fit the others; the message names the place."""
    confident = {
        "task": "regression",
        "slices.discover": ["confidence"],
        "gates": {"default": {"confidence": 0.95, "min_samples": 9, "min_slice_samples": 9}},
    }

    assert "max_abs_error: is missing" in refusal(confident)
    confident["gates"]["default"]["max_abs_error"] = 0.1
    assert "needs an output of classes" in refusal(confident)
    assert "max_metric_loss" in refusal({"metrics": {"f1": {"kind": "macro_f1"}}})
    assert "slices.discover" in refusal({"slices.discover": ["size"]})
    assert "F1!" in refusal({"metrics": {"F1!": {"kind": "macro_f1"}}})
    assert "shapes.batch.max is 4, and search.max_batch_sizes tries 8" in refusal(
        {"shapes.batch": {"min": 1, "best": 2, "max": 4}}
    )
    assert "load.rows sends requests of 8 rows, and search.max_batch_sizes tries 4" in refusal(
        {"load.rows": [1, 8], "search.max_batch_sizes": [4, 8]}
    )


def test_key_of_several_types_is_named_as_it_stands_in_the_file():
    """Without what Pydantic calls each type; and a fault of the whole shows none of the file."""
    assert "  load.rows: must be more than 0 (given: 0)" in refusal({"load.rows": 0})
    whole = refusal({"load.rows": 8, "search.max_batch_sizes": [4]})
    assert "(top level): load.rows sends requests of 8 rows" in whole
    assert "given:" not in whole
