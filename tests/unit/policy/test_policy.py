"""Reading policies: what is refused, and where the message points."""

import copy
import os
import pickle
from pathlib import Path

import pytest

from enginegate.candidate import Candidate, Precision
from enginegate.errors import PolicyError
from enginegate.policy import gates_for, read_policy
from enginegate.policy.paths import project_of
from enginegate.workspace import Workspace

DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.fixture
def edited(tmp_path):
    """Write the example policy with one replacement, and return its path."""

    def edit(old: str, new: str) -> Path:
        text = DIGITS.read_text()
        assert old in text
        path = tmp_path / "policy.toml"
        path.write_text(text.replace(old, new, 1))
        return path

    return edit


def test_the_example_policy_is_valid():
    """It names every candidate once, in the order of the file."""
    names = [candidate.name for candidate in read_policy(DIGITS).candidates.all()]

    assert names[:2] == ["onnxruntime-fp32", "onnxruntime-int8"]
    assert len(set(names)) == len(names) == 8


def test_a_policy_travels_to_another_process():
    """Its class is made here, for the engine kinds there are; the other process makes its own."""
    policy = read_policy(DIGITS)

    travelled = pickle.loads(pickle.dumps(policy))  # noqa: S301 - our own bytes

    assert (travelled, travelled.root) == (policy, policy.root)


def test_an_unknown_key_is_refused_with_its_place(edited):
    """A misspelt limit cannot silently loosen a gate: both halves of the typo are named."""
    path = edited("max_accuracy_loss", "max_acuracy_loss")

    with pytest.raises(PolicyError) as caught:
        read_policy(path)

    assert str(path) in str(caught.value)
    assert (
        "gates.default.max_acuracy_loss: there is no such key; did you mean max_accuracy_loss?"
        in str(caught.value)
    )
    assert "gates.default.max_accuracy_loss: is missing" in str(caught.value)


def test_every_problem_is_listed_at_once(edited):
    """Two mistakes in different tables need one run, not two."""
    path = edited("p99_ms = 100", "p99_ms = -100")
    path.write_text(path.read_text().replace("instances = [1, 2]", "instances = []", 1))

    with pytest.raises(PolicyError, match=r"(?s)slo\.p99_ms.*instances is empty"):
        read_policy(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("[0, 1000]", "[]", "queue_delays_us is empty: nothing would", id="empty"),
        pytest.param(
            "queue_delays_us = [0, 1000]",
            f"queue_delays_us = {list(range(6000))}",
            "12000 configurations; 10000 at most: shorten a list",
            id="enormous",
        ),
        pytest.param(
            "max_rate_per_s = 800",
            "max_rate_per_s = 100",
            "max_rate_per_s is below min_rate_per_s",
            id="no-rate",
        ),
    ],
)
def test_a_search_space_nobody_can_search_is_refused(edited, old, new, message):
    """Before anything is built, with what to change."""
    with pytest.raises(PolicyError, match=message):
        read_policy(edited(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema_version = 1", "schema_version = 2", "schema_version"),
        ("schema_version = 1", "schema_version = = 1", "is not TOML"),
        ('"models:/digits/1"', '"runs:/abc"', "model.uri"),
        ('"models:/digits/1"', '"models:/digits/latest"', "model.uri"),
        ('".enginegate/live/digits"', '"../../etc"', "may not contain '..'"),
        ('name = "digits"', 'name = "../digits"', "name"),
        ('name = "digits"', 'name = "a\\"b\\nc"', "name"),
    ],
)
def test_what_a_policy_may_not_say(edited, old, new, message):
    """Wrong versions, sources, paths and names are refused by key."""
    with pytest.raises(PolicyError, match=message):
        read_policy(edited(old, new))


def test_a_missing_policy_says_so(tmp_path):
    """The message names the file."""
    with pytest.raises(PolicyError, match=r"nothing\.toml: No such file"):
        read_policy(tmp_path / "nothing.toml")


def test_a_precision_overrides_only_what_it_states():
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
    with pytest.raises(PolicyError, match="nonsense"):
        policy.with_model("nonsense")


def test_a_candidate_is_read_back_from_its_name():
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
    assert policy.data.evaluation == root / ".enginegate/data/digits/evaluation.npz"
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


def test_a_project_is_the_nearest_folder_that_says_so(tmp_path):
    """A workspace or a project file; where there is none, the policy's own folder."""
    deep = tmp_path / "outer" / "inner" / "policies"
    deep.mkdir(parents=True)

    assert project_of(deep) == deep
    (tmp_path / "outer" / "pyproject.toml").touch()
    assert project_of(deep) == tmp_path / "outer"
    (tmp_path / "outer" / "inner" / ".enginegate").mkdir()
    assert project_of(deep) == tmp_path / "outer" / "inner"


def test_a_policys_digest_does_not_depend_on_where_it_lies(project):
    """An approval binds to it, and workers have the checkout in other places."""
    here, there = read_policy(project("here")), read_policy(project("there"))

    assert here.target.repository != there.target.repository
    assert here.digest == there.digest == read_policy(DIGITS).digest
    assert here.data.digest == there.data.digest
    assert here.with_model("models:/digits/2").digest == there.with_model("models:/digits/2").digest


def test_numbers_that_cannot_be_meant_hide_no_other_mistake(edited):
    """Five mistakes of three kinds need one run; a number that is refused is not missing too."""
    path = edited("p99_ms = 100", "p99_ms = inf")
    for old, new in (
        ('name = "digits"', 'name = "Dig its!"'),
        ("instances = [1, 2]", "instances = [1_000_000]"),
        ("approvers = []", "approvers = ['ada', 'bo']\nrequired = 3"),
        ("[retention]", "[retentoin]"),
    ):
        path.write_text(path.read_text().replace(old, new, 1))

    with pytest.raises(PolicyError) as caught:
        read_policy(path)

    keys = [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:-1]]
    assert keys == ["slo.p99_ms", "search.instances", "name", "approval", "retentoin"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param("p99_ms = 100", "p99_ms = true", "p99_ms: must be a number", id="true"),
        pytest.param("p99_ms = 100", "p99_ms = '99'", "p99_ms: must be a number", id="text"),
        pytest.param("instances = [1, 2]", "instances = [true]", "instances: must be", id="list"),
        pytest.param("seed = 0", "seed = '0'", "search.seed: must be a number", id="int"),
        pytest.param(
            "[target]", "[target]\nendpoint = 'host:99999'", "port from 1 to 65,535", id="port"
        ),
        pytest.param("[gates.tf32]", "[gates.tf33]", r"gates\.tf33: must be", id="table"),
    ],
)
def test_what_is_of_another_type_is_refused(edited, old, new, message):
    """Texts and truths are no numbers, also where pydantic would make one of them."""
    with pytest.raises(PolicyError, match=message):
        read_policy(edited(old, new))


def test_a_named_pipe_is_not_waited_for(tmp_path):
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
    ("old", "new", "message"),
    [
        pytest.param("p99_ms = 100", "p99_ms = inf", "slo.p99_ms: inf cannot be meant", id="inf"),
        pytest.param(
            "max_accuracy_loss = ", "max_accuracy_loss = nan #", "max_accuracy_loss: nan", id="nan"
        ),
        pytest.param(
            "expires_hours = ",
            "expires_hours = 1e18 #",
            r"expires_hours: 1e\+18 .*at most 8,784",
            id="expiry",
        ),
        pytest.param(
            "expires_hours = ",
            f"expires_hours = 1{'0' * 400} #",
            "expires_hours: 1.79769",
            id="huge",
        ),
        pytest.param(
            "instances = [1, 2]",
            "instances = [1, 1_000_000]",
            "search.instances: 1000000 cannot be meant; allowed is at most 256",
            id="instances",
        ),
        pytest.param(
            "approvers = []",
            "required = 3\napprovers = ['ada', 'bo']",
            "required is 3, and approvers names 2",
            id="required",
        ),
        pytest.param(
            "approvers = []",
            "approvers = ['ada', 'Ada@x']",
            "'ada' and 'Ada@x' are one person",
            id="twice",
        ),
        pytest.param("approvers = []", "approvers = [' @x']", "' @x' names nobody", id="nobody"),
        pytest.param(
            'repository = ".enginegate/live/digits"', 'repository = "//"', "'//?' cannot", id="root"
        ),
        pytest.param(
            'repository = ".enginegate/live/digits"', 'repository = "./"', "cannot be", id="here"
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(edited, old, new, message):
    """The key, its value and what is allowed are named; nothing is run with it first."""
    with pytest.raises(PolicyError, match=message):
        read_policy(edited(old, new))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a = " + "[" * 5000 + "]" * 5000, id="brackets"),
        pytest.param("a" + ".a" * 5000 + " = 1", id="dots"),
    ],
)
def test_one_nested_too_deep_is_refused(tmp_path, text):
    """Nobody has to read a traceback of a thousand lines."""
    (tmp_path / "deep.toml").write_text(text)

    with pytest.raises(PolicyError, match="nested too deep"):
        read_policy(tmp_path / "deep.toml")


def test_one_that_is_no_policy_is_not_read_to_its_end():
    """A device or a data file that was named by mistake fills no memory."""
    with pytest.raises(PolicyError, match="larger than 1,048,576 bytes"):
        read_policy(Path("/dev/zero"))
