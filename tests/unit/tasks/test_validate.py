"""What a verdict is kept by."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from enginegate.candidate import Precision
from enginegate.policy import gates_for, read_policy
from tasks.validate import _key
from tests.fakes.evidence import sha

POLICY = read_policy(Path(__file__).parents[3] / "policies" / "digits.toml")
ENGINE = SimpleNamespace(digest=sha("1"))
REFERENCE = SimpleNamespace(
    onnx_sha256=sha("2"),
    evaluation=SimpleNamespace(data_sha256=sha("3")),
    shadow=None,
    notes=(),
    asked=(),
)


@pytest.mark.parametrize(("table", "decides"), [("int8", True), ("tf32", False)])
def test_verdict_is_cached_until_its_own_limits_change(table, decides):
    """Another precision's limits, and every other table of the policy, say nothing about it."""

    def key(gates):
        return _key(ENGINE, REFERENCE, gates_for(gates, Precision.INT8), None)

    stricter = POLICY.gates[table].model_copy(update={"min_samples": 9_999})

    assert (key(POLICY.gates) != key({**POLICY.gates, table: stricter})) is decides
