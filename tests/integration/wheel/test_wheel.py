"""The wheel: what it holds, and what can be done with it where there is no checkout."""

import importlib.metadata
import os
import subprocess
import zipfile
from pathlib import Path

import enginegate

ROOT = Path(__file__).parents[3]
_PACKAGES = "enginegate/pipeline/packages"
# As a person's own pipeline would: the library first, then the flows, in a folder with a namesake.
# Importing every flow takes seconds; the demo's test runs them from the wheel.
_PROGRAM = """
import enginegate, importlib.util, sys
from enginegate.pipeline import open_pipeline
open_pipeline()
import validation.verdict
print(enginegate.__version__)
for name in ("flows", "tasks", "examples"):
    print(importlib.util.find_spec(name).origin)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in {"enginegate", "validation"}:
        print(getattr(module, "__file__", None) or module.__path__[0])
"""


def run(installed, folder, *command):
    """What a command prints, from the environment that has the wheel."""
    environment = {
        "PATH": os.pathsep.join([str(installed), os.environ["PATH"]]),
        "HOME": str(folder),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_the_flows_and_no_other_top_level_name(wheel):
    """A package `tasks` of its own would overwrite another distribution's, file by file."""
    names = set(zipfile.ZipFile(wheel).namelist())
    carried = [
        path.relative_to(ROOT)
        for folder in ("flows", "tasks", "validation", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]

    assert {name.partition("/")[0] for name in names} == {
        "enginegate",
        f"enginegate-{enginegate.__version__}.dist-info",
    }
    assert len(carried) > 40
    assert [path for path in carried if f"{_PACKAGES}/{path}" not in names] == []
    assert f"{_PACKAGES}/policies/digits.toml" in names
    assert f"{_PACKAGES}/automations/watch-silent.yaml" in names
    assert not [name for name in names if "__pycache__" in name]


def test_version_is_said_once():
    """The package's own, which its metadata, `--version` and evidence repeat."""
    assert importlib.metadata.version("enginegate") == enginegate.__version__


def test_library_and_flows_come_from_the_wheel(installed, tmp_path):
    """Not from this checkout, nor from a project's own folders of those names."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("raise ImportError('the project's own')")

    version, *places = run(installed, tmp_path, "python", "-c", _PROGRAM).splitlines()

    assert version == enginegate.__version__
    assert len(places) > 20
    assert [place for place in places if not place.startswith(str(installed.parent))] == []


def test_verbs_start_in_an_empty_folder(installed, tmp_path):
    """And write nothing into it before they have something to keep."""
    assert enginegate.__version__ in run(installed, tmp_path, "enginegate", "--version")
    assert "enginegate deploy" in run(installed, tmp_path, "enginegate", "deploy", "--help")
    assert list(tmp_path.iterdir()) == []
