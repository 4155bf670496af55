"""An upgrade that a live plan would not survive is said before the server is restarted."""

import pytest

from enginegate.candidate import Candidate
from enginegate.contract.server_versions import ServerVersions
from enginegate.repository import Layout
from enginegate.repository.deploy.upgrades import LiveEngine, find_upgrades, live_engines
from tests.fakes.evidence import release

ADDRESS = "127.0.0.1:8001"


def live(builder="tensorrt 10.16.1.11", **changes):
    made = release()
    changes = {
        "builder": builder,
        "backend": "tensorrt",
        "device": "gpu",
        "candidate": Candidate.parse("tensorrt-fp16"),
        **changes,
    }
    engine = made.engine.model_copy(update=changes)
    return LiveEngine(made.model_copy(update={"engines": (engine,)}), "is live")


def found(engine, **versions):
    server = ServerVersions(address=ADDRESS, **versions)
    return find_upgrades((engine,), server, policy="policies/digits.toml")


def test_installed_but_not_restarted_server_is_named_with_the_way_out():
    """Release, engine, both versions, and the one command that qualifies for the coming one."""
    engine = live()

    (said,) = found(engine, tensorrt="10.16.1", installed_tensorrt="11.0.0")

    assert said.certain
    assert (
        "tensorrt-fp16, built by tensorrt 10.16.1.11), which is live, will not load" in said.words
    )
    assert "TensorRT 11.0.0 was installed" in said.words
    assert "it still has 10.16.1" in said.words
    uri = engine.release.model_uri
    assert f"enginegate qualify policies/digits.toml --model {uri}" in said.words


@pytest.mark.parametrize(
    ("engine", "versions", "certain"),
    [
        pytest.param(live(), {"tensorrt": "10.16.1", "installed_tensorrt": "10.16.1"}, [], id="eq"),
        pytest.param(live(), {"tensorrt": "10"}, [], id="known-in-part"),
        pytest.param(live(), {"tensorrt": "8", "installed_tensorrt": "8"}, [True], id="other-runs"),
        pytest.param(live(), {"triton": "2.70.0"}, [False], id="by-its-images"),
        pytest.param(live(), {"triton": "2.69.0"}, [], id="the-same-image"),
        pytest.param(live(), {"triton": "2.99.0"}, [], id="unheard-of-image"),
        pytest.param(live(), {"triton": "2.70.0", "tensorrt": "10.16.1"}, [], id="its-own-build"),
        pytest.param(
            live(version_compatible=True), {"tensorrt": "11.0.0"}, [], id="compatible-with-later"
        ),
        pytest.param(
            live(version_compatible=True), {"tensorrt": "10.9.0"}, [True], id="not-with-earlier"
        ),
        pytest.param(live("onnxruntime 1.31.1"), {"tensorrt": "11.0.0"}, [], id="no-plan"),
        pytest.param(live(backend="python"), {"tensorrt": "11.0.0"}, [], id="its-own-library"),
        pytest.param(live(""), {"tensorrt": "11.0.0"}, [], id="not-recorded"),
    ],
)
def test_plan_is_bound_to_what_loads_it(engine, versions, certain):
    """Only what is read from the server's machine is certain; its images are a hint."""
    assert [each.certain for each in found(engine, **versions)] == certain


@pytest.mark.parametrize(
    ("installed", "gpu", "count"),
    [("580.95.05", True, 1), ("580.82.07", True, 0), ("", True, 0), ("580.95.05", False, 0)],
)
def test_driver_that_waits_for_a_restart_keeps_engines_from_loading(installed, gpu, count):
    """A new process gets the new libraries and the old kernel module, which do not fit."""
    engine = live("onnxruntime 1.31.1", device="gpu" if gpu else "cpu")

    said = found(engine, driver="580.82.07", installed_driver=installed)

    assert len(said) == count
    assert all(each.certain and "restart the machine" in each.words for each in said)


def test_release_that_a_rollback_returns_to_counts_too(repository, package):
    """Both have to load; what retention has removed cannot come back anyway."""
    layout = Layout(repository.root, "digits")
    assert live_engines(layout) == ()
    repository.publish(package(1.0, builder="tensorrt 8.6.0.12"), expected=None)
    repository.publish(package(2.0, builder="tensorrt 10.16.1.11"), expected=1)

    roles = [(each.release.version, each.role) for each in live_engines(layout)]

    assert roles == [(2, "is live"), (1, "a rollback would return to")]
    assert live_engines(layout)[1].release.engine.builder == "tensorrt 8.6.0.12"
