"""What a message says of a bad key or value."""

import tomllib
from pathlib import Path

import pytest

from enginegate.errors import PolicyError
from enginegate.policy import parse_policy

_DIGITS = Path(__file__).parents[2] / "policies" / "digits.toml"


@pytest.fixture
def said():
    """The lines about the example policy with one table changed, or with all of it replaced."""

    def lines(table, change, *, whole=False):
        raw = tomllib.loads(_DIGITS.read_text())
        raw[table] = change if whole else raw[table] | change
        with pytest.raises(PolicyError) as refused:
            parse_policy(raw, "digits.toml")
        return str(refused.value).splitlines()[1:-1]

    return lines


@pytest.mark.parametrize(
    ("table", "change", "line"),
    [
        ("slo", {"p99": 3}, "slo.p99: there is no such key; did you mean p99_ms? (given: 3)"),
        ("slo", {"colour": 3}, "slo.colour: there is no such key (given: 3)"),
        ("slo", {"p99_ms": "x"}, "slo.p99_ms: must be a number (given: 'x')"),
        ("slo", {"p99_ms": -1}, "slo.p99_ms: must be more than 0.0 (given: -1)"),
        (
            "target",
            {"endpoint": "foo"},
            "target.endpoint: must be HOST:PORT, e.g. 127.0.0.1:8001 (given: 'foo')",
        ),
        (
            "target",
            {"fleet": [{"name": "b", "endpoint": "h:1", "metric": "h:2"}]},
            "target.fleet.0.metric: there is no such key; did you mean metrics? (given: 'h:2')",
        ),
        (
            "search",
            {"objective": "throughputt"},
            "search.objective: must be 'throughput', 'cost' or 'latency'; did you mean throughput?",
        ),
    ],
)
def test_mistake_is_explained_in_plain_words(said, table, change, line):
    """Where, what it must be, what was probably meant, and what was given."""
    (found,) = said(table, change)
    assert found.startswith(f"  {line}")


def test_inherited_mistake_is_reported_once(said):
    """The tables of the precisions take it over from [gates.default]."""
    default = {"tolerances": "standard", "confidence": 0.95, "min_samples": 9}
    gates = {"default": default | {"min_slice_samples": 9, "max_acuracy_loss": 1}}

    (line,) = said("gates", gates, whole=True)
    assert line.startswith("  gates.default.max_acuracy_loss: there is no such key; did you mean ")
