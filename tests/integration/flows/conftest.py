"""One Prefect server and one qualified model family for every flow test."""

import pytest

from enginegate.triton.endpoint import live_server
from tasks.run_page import _Reach
from tests.fakes.family import classifier, make_family, register


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    from prefect.settings import (
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        PREFECT_LOCAL_STORAGE_PATH,
        PREFECT_LOGGING_TO_API_ENABLED,
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED,
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL,
        PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

    quick = {
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        PREFECT_LOGGING_TO_API_ENABLED: False,
        PREFECT_LOCAL_STORAGE_PATH: tmp_path_factory.mktemp("results"),
    }
    # Tests say themselves when a suspended run's time is found to be over.
    on_the_server = {
        PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED: False,
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED: True,
        PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL: 0.5,
    }
    with (
        temporary_settings(on_the_server),
        prefect_test_harness(server_startup_timeout=180),
        temporary_settings(quick),
    ):
        yield


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server on a busy machine answers late, which is not what these tests are about."""
    monkeypatch.setattr("tasks.prefect_server._ANSWER_S", 60.0)
    monkeypatch.setattr("tasks.run_page._PROGRESS_ANSWER_S", 60.0)
    monkeypatch.setattr("tasks.run_page._reach", _Reach())


@pytest.fixture(scope="session")
def family(prefect_server, tmp_path_factory):
    """Registered, with data and a policy; its workspace is the current one."""
    del prefect_server  # it only has to run
    root = tmp_path_factory.mktemp("family")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINEGATE_HOME", str(root / "workspace"))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield make_family(root)


@pytest.fixture(scope="session")
def qualified(family):
    """The family's scorecard, made once by the real flow."""
    from flows.qualify import qualify

    return qualify(family.policy)


@pytest.fixture(scope="session")
def second_uri(qualified, family):
    """A second version, qualified once, so that qualifying it again finds everything."""
    from flows.qualify import qualify

    del qualified
    uri = register(family.workspace, classifier(seed=5))
    qualify(family.policy, uri)
    return uri


@pytest.fixture
def live(family, qualified, tmp_path):
    """The family's policy for a live repository of its own, with a server on it."""
    del qualified
    policy = family.edited(tmp_path / "policy.toml", (f"{family.root}/live", f"{tmp_path}/live"))
    with live_server(tmp_path / "live", family.workspace):
        yield policy


@pytest.fixture
def card(live):
    """The scorecard for that repository; everything it holds was found out before."""
    from flows.qualify import qualify

    return qualify(live)
