"""`enginegate policy show`: what a person reads of a policy."""

import io

import pytest
from rich.console import Console

from enginegate.cli.output.json_output import Printer
from enginegate.cli.policy.show import show_policy
from enginegate.errors import InputError

SMALL = """
name = "mine"
task = "regression"
model.uri = "file:model.onnx"
data.evaluation = "evaluation.npz"
candidates.onnxruntime = ["fp32", "int8"]
gates.default.tolerances = "standard"
gates.int8.min_sqnr_db = 30
slo = { p99_ms = 100, min_throughput_per_s = 50 }
"""


@pytest.fixture
def policy(tmp_path):
    (tmp_path / "mine.toml").write_text(SMALL)
    return tmp_path / "mine.toml"


def shown(path, *tables):
    written = io.StringIO()
    show_policy(path, list(tables), Printer(Console(file=written, width=160)))
    return written.getvalue()


def test_every_table_is_shown_with_values_and_origins(policy):
    text = shown(policy)

    assert "[slo] What serving must deliver." in text
    assert "[target]" in text
    assert any({"p99_ms", "100", "stated"} <= set(line.split()) for line in text.splitlines())
    assert any({"budget_s", "700", "default"} <= set(line.split()) for line in text.splitlines())


def test_standard_limits_are_shown_beside_those_that_are_stated(policy):
    """The star tells them apart, and each standard has its reason."""
    text = shown(policy, "gates")

    row = next(line for line in text.splitlines() if "min_sqnr_db" in line)
    assert {"100", "30*"} <= set(row.split())
    assert "noise of rounding once" in text
    assert "max_kl_p99_nats" not in text
    assert "[slo]" not in text


def test_tables_by_name_are_shown_together(policy):
    """The metric that the standard chose is one of [metrics]."""
    assert "[metrics.r2]" in shown(policy, "metrics")


def test_defaults_are_shown_without_a_policy():
    text = shown(None, "slo", "gates")

    assert any({"p99_ms", "required"} <= set(line.split()) for line in text.splitlines())
    assert "fp8" in text


def test_unknown_table_names_those_that_there_are(policy):
    with pytest.raises(InputError, match=r"no table gate; there are .*gates"):
        shown(policy, "gate")
