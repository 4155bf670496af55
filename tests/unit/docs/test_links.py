"""Pages lead somewhere, and name commands that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from enginegate.cli import app as cli

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/adr").glob("*.md")]
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"(?m)(?:^ *|`)(enginegate [a-z][^`\n]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    """Every relative link and picture is there."""
    links = LINK.findall(CODE.sub("", page.read_text()))

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    """Every ``enginegate …`` names a verb of the program, with options that it has."""
    unknown = [line for line in COMMAND.findall(page.read_text()) if not known(line)]

    assert unknown == []


def test_workflow_example_runs_commands_that_exist():
    """Its steps are shell lines with a verb each, and continue on the next line."""
    workflow = yaml.safe_load((ROOT / "docs" / "github-actions.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    text = "\n".join(step.get("run", "") for step in steps).replace("\\\n", " ")
    lines = [re.split(r"\\| >|`", line)[0] for line in COMMAND.findall(text)]

    assert [line for line in lines if not known(line)] == []
    assert {"doctor", "policy", "qualify", "report", "approve"} <= {x.split()[1] for x in lines}


@pytest.mark.parametrize("line", ["enginegate prmote X", "enginegate watch X --twice"])
def test_unknown_commands_are_found(line):
    """The check above can fail."""
    assert not known(line)


def known(line):
    command = typer.main.get_command(cli.app)
    words = shlex.split(line.replace("…", ""), comments=True)[1:]
    while words and hasattr(command, "commands"):
        command = command.commands.get(words.pop(0))
        if command is None:
            return False
    options = {name for each in command.params for name in each.opts} | {"--help"}
    return all(word.split("=")[0] in options for word in words if word.startswith("--"))
