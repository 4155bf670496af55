"""The Python API: what a program of somebody else's may rely on."""

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import enginegate
from enginegate.policy import read_policy
from enginegate.repository import LiveRepository
from tests.fakes.live_triton import FakeTriton, package_in

ROOT = Path(__file__).parents[3]
# Every name is promised: a change here is a new minor version, and one that breaks a caller a new
# major version (docs/python.md).
PUBLIC = {
    "ApprovalError",
    "EnginegateError",
    "InputError",
    "PolicyError",
    "ReleaseDocument",
    "RepositoryError",
    "ScorecardDocument",
    "ServerError",
    "StatusDocument",
    "__version__",
    "promote",
    "qualify",
    "rollback",
    "status",
}
SIGNATURES = {
    "qualify": (
        "(policy=None, *, model=None, data=None, p99_ms=None, min_throughput_per_s=None, "
        "task=None, name=None, calibration=None, allow_pickle=False, allow_code=False)"
    ),
    "promote": "(policy, scorecard)",
    "rollback": "(policy, *, to=None, reason='')",
    "status": "(*policies)",
}


def bare(function):
    """A signature without its types."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def test_names_and_signatures_are_the_promised_ones():
    assert set(enginegate.__all__) == PUBLIC
    assert {name: bare(getattr(enginegate, name)) for name in SIGNATURES} == SIGNATURES


def test_every_public_name_is_documented():
    page = (ROOT / "docs" / "python.md").read_text()

    assert [name for name in PUBLIC if f"{name}" not in page] == []


def test_import_loads_nothing_else():
    """Who only asks for the version waits for nothing."""
    program = (
        "import sys, enginegate; enginegate.__version__\n"
        "print(*(m for m in sys.modules if m.partition('.')[0] in "
        "{'enginegate', 'pydantic', 'numpy', 'rich', 'typer'}))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["enginegate"]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'qualfy'"):
        _ = enginegate.qualfy


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A policy in whose repository release 2 is live after release 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    policy = Path(shutil.copy(ROOT / "policies" / "digits.toml", tmp_path))
    root = read_policy(policy).target.repository
    root.mkdir(parents=True)
    repository = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    for before in (None, 1):
        repository.publish(package_in(tmp_path, float(before or 0)), expected=before)
    monkeypatch.setattr("enginegate.cli.live.release.open_target", lambda *_, **__: repository)
    monkeypatch.setattr("enginegate.cli.live.release.try_deliver", lambda *_, **__: "")
    return policy


def test_status_and_rollback_return_what_the_verbs_print(live, capsys):
    """Typed, and nothing is printed: the caller's output is the caller's."""
    before = enginegate.status(live)
    done = enginegate.rollback(str(live), reason="complaints")
    after = enginegate.status(live)

    assert [m.models[0].live.release for m in (before, after)] == [2, 1]
    assert (done.action, done.release.version, done.live) == ("rolled back", 1, True)
    assert capsys.readouterr().out == ""


def test_policy_that_cannot_be_read_is_listed_by_status_and_raised_by_the_rest(live, tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("schema_version = ")

    found = enginegate.status(live, broken)

    assert [model.model for model in found.models] == ["digits"]
    assert "broken.toml is not TOML" in found.errors[0]
    for call in (enginegate.qualify, lambda p: enginegate.promote(p, "d3e7"), enginegate.rollback):
        with pytest.raises(enginegate.PolicyError, match="is not TOML"):
            call(broken)
