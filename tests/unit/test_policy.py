"""Reading policies: what is refused, and where the message points."""

from pathlib import Path

import pytest

from enginegate.candidate import Candidate, Precision
from enginegate.errors import PolicyError
from enginegate.policy import read_policy

DIGITS = Path(__file__).parents[2] / "policies" / "digits.toml"


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
    default, int8 = policy.gates["default"], policy.gates_for(Precision.INT8)

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
