"""`enginegate report`: one file, with what the policy's repository knows of the scorecard."""

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from enginegate.cli.report import write_report
from enginegate.errors import InputError
from enginegate.policy import read_policy
from enginegate.report import evidence_part
from enginegate.repository import record_decision
from enginegate.workspace import Workspace
from tests.fakes.decision_cases import on_cpu
from tests.fakes.evidence import decision

ROOT = Path(__file__).parents[3]


@pytest.fixture
def policy(tmp_path):
    """The demo's policy in a project of its own."""
    return Path(shutil.copy(ROOT / "policies" / "digits.toml", tmp_path))


def written(policy, tmp_path) -> str:
    """The page's text, after it was written over an older file."""
    output = tmp_path / "out" / "decision.html"
    output.parent.mkdir(exist_ok=True)
    output.write_text("old")
    write_report(on_cpu(), policy, output, Workspace(tmp_path), Console(quiet=True))
    return output.read_text()


def test_state_and_evidence(policy, tmp_path):
    """An approval changes the state and its expiry, and not one byte of the evidence."""
    before = written(policy, tmp_path)
    yes = decision(on_cpu())
    record_decision(read_policy(policy).target.repository, yes, "digits")
    Workspace(tmp_path).save_decision(yes)

    after = written(policy, tmp_path)

    assert "waiting for approval" in before
    assert "approved, not yet live" in after
    assert "The approval expires" in after
    assert "margins are wide" in after
    assert evidence_part(after) == evidence_part(before)


def test_without_a_policy_the_state_is_not_known(tmp_path, monkeypatch, capsys):
    """The page never says that nobody answered where nobody was asked."""
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "decision.html"

    write_report(on_cpu(), None, output, Workspace(tmp_path), Console(width=200))

    assert "state not known here" in output.read_text()
    assert "Name one with --policy" in capsys.readouterr().out


def test_a_folder_in_its_place_is_named(policy, tmp_path):
    """The message says which file, and how to name another."""
    (tmp_path / "out").mkdir()

    with pytest.raises(InputError, match=r"(?s)out cannot be written: .* -o"):
        write_report(on_cpu(), policy, tmp_path / "out", Workspace(tmp_path), Console(quiet=True))
