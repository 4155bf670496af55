"""What `--help` teaches: the order, one line a verb; the version; what a shell completes."""

import re

import pytest
from typer.testing import CliRunner

from enginegate import __version__
from enginegate.cli.app import app
from enginegate.cli.help import STORY

RUNNER = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})


@pytest.fixture(scope="module")
def shown():
    return RUNNER.invoke(app, ["--help"]).stdout


def test_verbs_come_in_the_order_of_a_promotion(shown):
    """Grouped; nobody reads an alphabet."""
    listed = re.findall(r"^│ ([a-z]+)  ", shown, re.MULTILINE)
    story = [verb for verbs in STORY.values() for verb in verbs]

    assert [verb for verb in story if verb in listed] == listed
    assert {"doctor", "qualify", "approve", "promote", "watch", "audit"} <= set(listed)
    assert all(f"─ {panel} ─" in shown for panel in STORY)


def test_no_verb_is_left_without_a_group(shown):
    """One that is added needs a place in the story."""
    assert "─ Commands ─" not in shown


def test_every_verb_takes_one_line_of_80_columns(shown):
    """So that the whole list fits a screen."""
    panels = shown.partition("─ Begin ")[2].partition("Exit codes")[0]

    assert not re.findall(r"^│ {6,}", panels, re.MULTILINE)


def test_version():
    """Alone on its line, for scripts."""
    assert RUNNER.invoke(app, ["--version"]).stdout == f"enginegate {__version__}\n"


def test_shells_can_complete():
    """For the shell that is named or running."""
    assert "--install-completion" in RUNNER.invoke(app, ["--help"]).stdout


def test_scorecards_are_completed(tmp_path):
    """By the beginning of their digest, the newest first."""
    folder = tmp_path / "scorecards"
    folder.mkdir()
    for digest in ("ab" * 32, "ac" * 32, "ff" * 32):
        (folder / f"{digest}.json").write_text("{}")
    environment = {
        "ENGINEGATE_HOME": str(tmp_path),
        "_ENGINEGATE_COMPLETE": "complete_bash",
        "COMP_WORDS": "enginegate explain a",
        "COMP_CWORD": "2",
    }

    found = RUNNER.invoke(app, [], prog_name="enginegate", env=environment).stdout

    assert sorted(found.split()) == ["abababababab", "acacacacacac"]
