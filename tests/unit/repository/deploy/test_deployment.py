"""A release is never published beside one that its configuration cannot load."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from enginegate.errors import PublishError
from enginegate.repository import Layout, LiveRepository, verify
from enginegate.repository.promotion import Change
from enginegate.serving import BackendSettings


@pytest.fixture
def native(package):
    """Make a package of Triton's own ONNX Runtime backend; its folder holds no model.py."""

    def make(offset: float, **changes):
        made = package(offset)
        (file,) = (path for name, path in made.files.items() if name == "engine.bin")
        settings = BackendSettings(parameters={"intra_op_thread_count": "1"})
        files = {"engine.bin": file, "model.onnx": file}
        return replace(made, backend="onnxruntime", files=files, settings=settings, **changes)

    return make


def problems(repository):
    return [check.problem for check in verify(repository) if check.problem]


def live(repository):
    found = Layout(repository.root, "digits").current()
    return found.version, found.standby


def answer(server, package):
    reply = server.infer("digits", package(0.0).golden.inputs)
    return int(reply.model_version), float(reply.outputs["y"][0, 0])


def test_backends_change_places_both_ways(repository, server, package, native):
    """Native, Python, native, and back: each time the old one leaves, and the new one answers."""
    repository.publish(native(1.0), expected=None)
    repository.publish(package(2.0), expected=1)
    assert (live(repository), answer(server, package)) == ((2, None), (2, 2.0))
    repository.publish(native(3.0), expected=2)
    assert (live(repository), answer(server, package)) == ((3, None), (3, 3.0))

    assert repository.rollback("digits").version == 2
    assert (live(repository), answer(server, package)) == ((2, None), (2, 2.0))
    assert repository.rollback("digits", to=1).version == 1

    assert (server.stuck, problems(repository), answer(server, package)) == ({}, [], (1, 1.0))


def test_the_same_backend_stays_ready_to_come_back(repository, package, native):
    """Two native releases share a configuration; so do two of the Python backend."""
    repository.publish(native(1.0), expected=None)
    repository.publish(native(2.0), expected=1)
    assert live(repository) == (2, 1)

    repository.publish(package(3.0), expected=2)
    repository.publish(package(4.0), expected=3)
    assert live(repository) == (4, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": True},
        {"settings": BackendSettings(parameters={"provider": "CUDAExecutionProvider"})},
    ],
    ids=["device", "parameters"],
)
def test_backend_settings_keep_versions_apart(repository, package, changes):
    """A Python model may read its device and parameters, which both versions would share."""
    repository.publish(package(1.0), expected=None)
    repository.publish(package(2.0, **changes), expected=1)

    assert live(repository) == (2, None)


def test_failed_release_leaves_the_other_backend_live(repository, server, package, native):
    """The old release had to leave; it is loaded again with its own configuration."""
    repository.publish(native(1.0), expected=None)
    server.refuses = {2}

    with pytest.raises(PublishError, match="Release 1 is live, as before"):
        repository.publish(package(2.0), expected=1)

    assert (live(repository), answer(server, package)) == ((1, None), (1, 1.0))
    assert problems(repository) == []


def test_killed_change_of_backend_is_recovered(repository, server, package, native, monkeypatch):
    """Killed when the new one was loaded: the next start brings the old one back, or the new."""
    repository.publish(native(1.0), expected=None)
    with monkeypatch.context() as patch:
        patch.setattr(Change, "ended_on_failure", lambda *_: nullcontext())
        patch.setattr("enginegate.repository.promotion.Deployment.prove", _killed)
        with pytest.raises(_KilledError):
            repository.publish(package(2.0), expected=1)

    (said,) = repository.recover()

    assert "Release 1 is live, as before" in said
    assert (server.stuck, answer(server, package), problems(repository)) == ({}, (1, 1.0), [])


def test_version_without_its_file_is_never_loaded(repository, server, package):
    """Triton would never end that load; it is refused before the server or the folder is told."""
    repository.publish(package(1.0), expected=None)
    lacking = package(2.0)
    lacking = replace(lacking, files={"engine.bin": lacking.files["engine.bin"]})

    with pytest.raises(PublishError, match=r"(?s)digits/2/model\.py is not there.*1 is live"):
        repository.publish(lacking, expected=1)

    assert (server.stuck, answer(server, package)) == ({}, (1, 1.0))


def test_first_release_without_its_file_is_refused(repository, package, monkeypatch):
    """A server that polls would begin to load whatever appears in the folder."""
    noted = []
    monkeypatch.setattr(Change, "note", lambda _, step, **__: noted.append(step))
    lacking = package(1.0)
    lacking = replace(lacking, files={"engine.bin": lacking.files["engine.bin"]})

    with pytest.raises(PublishError, match=r"model\.py is not there"):
        repository.publish(lacking, expected=None)

    assert not (repository.root / "digits").exists()
    assert noted == []


def test_removed_file_is_a_problem_not_a_load(repository, server, package):
    """Whoever repairs is told which file is gone; the server is not asked for what it lacks."""
    repository.publish(package(1.0), expected=None)
    Path(repository.root, "digits", "1", "model.py").unlink()

    found = "".join(problems(repository))

    assert "digits/1/model.py is not there" in found
    assert server.stuck == {}


def test_endless_load_is_a_problem(server, package):
    """What serves is right, and yet nothing can be promoted: `verify` says so, in bounded time."""
    repository = LiveRepository(server.root, server, load_timeout_s=0.1)
    repository.publish(package(1.0), expected=None)
    server.stuck = {"digits": {2}}

    (problem,) = problems(repository)

    assert "Version 2 of digits is LOADING" in problem
    assert "starting the server again" in problem


def _killed(*_, **__):
    raise _KilledError


class _KilledError(BaseException):
    """Stands for a kill: nothing is cleaned up after it."""
