"""Functions beside a policy are found; folders that hold no Python hide no package."""

import importlib.util
import sys

import pytest

from enginegate.policy.hooks import importable_from, why_missing


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    importable_from(tmp_path)
    yield tmp_path
    del sys.path_importer_cache[str(tmp_path)]


def test_model_repository_is_no_package(project):
    """A library that looks whether such a package is installed is told that it is not."""
    version = project / "enginegate_no_such" / "model" / "1"
    version.mkdir(parents=True)
    (version / "model.py").touch()

    assert importlib.util.find_spec("enginegate_no_such") is None


@pytest.mark.parametrize(
    "place", ["enginegate_own.py", "enginegate_own/hooks.py", "enginegate_own/part/__init__.py"]
)
def test_python_beside_a_policy_is_found(project, place):
    """A module, and a folder of modules, with or without ``__init__.py``."""
    (project / place).parent.mkdir(exist_ok=True, parents=True)
    (project / place).touch()

    assert importlib.util.find_spec("enginegate_own") is not None


def test_function_in_a_package_named_like_the_flows_is_refused(project):
    """It would be looked for in Enginegate's own package of that name."""
    (project / "tasks.py").write_text("def make_model(): ...\n")
    (project / "own_tasks.py").write_text("def make_model(): ...\n")

    assert "rename yours" in why_missing("tasks:make_model", project)
    assert why_missing("own_tasks:make_model", project) == ""
