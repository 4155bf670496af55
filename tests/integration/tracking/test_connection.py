"""An MLflow server that accepts connections and never answers."""

import logging
import time
from pathlib import Path

import pytest

from enginegate.errors import TrackingError
from enginegate.sources.mlflow_server import resolve
from enginegate.tracking import Tracker
from tests.fakes.silent import silent_server

_QUICK_S = 15.0


@pytest.fixture
def silent(monkeypatch):
    """Its address, with a password and a token, and limits short enough for a test."""
    import mlflow.utils.rest_utils  # noqa: F401 - importing takes seconds, which are not waited

    monkeypatch.setattr("enginegate.sources.mlflow_server.ANSWER_S", 1.0)
    monkeypatch.setattr("enginegate.sources.mlflow_server._LOGGED_AFTER_S", 0.2)
    with silent_server() as address:
        yield f"http://ada:secret@{address}?token=t0ken"


@pytest.mark.parametrize(
    "ask",
    [
        lambda uri: Tracker(uri, Path("unused")).resolve("models:/digits/1"),
        lambda uri: Tracker(uri, Path("unused")).tag_run("run", {"decision": "approve"}),
        lambda uri: resolve("models:/digits/1", tracking_uri=uri),
    ],
    ids=["qualify", "approve", "export"],
)
def test_it_is_given_up_within_the_limit_and_named(silent, ask, caplog):
    """What is waited for is said while it is; nothing says how one signs in there."""
    caplog.set_level(logging.INFO, logger="enginegate")
    begun_s = time.monotonic()
    with pytest.raises(TrackingError, match=r"gave no answer in 1 s") as refused:
        ask(silent)

    assert time.monotonic() - begun_s < _QUICK_S
    assert "MLFLOW_TRACKING_URI" in str(refused.value)
    assert "waiting for MLflow at http://***@127.0.0.1:" in caplog.text
    said = f"{caplog.text}{refused.value!r}{refused.value.__cause__!r}"
    assert "secret" not in said
    assert "t0ken" not in said


def test_server_that_stops_answering_is_reported(silent, monkeypatch):
    """A server that answered a moment ago is asked directly, and its silence is said too."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr("enginegate.sources.mlflow_server._answered", {silent: time.monotonic()})
    with pytest.raises(TrackingError, match="MLFLOW_HTTP_REQUEST_TIMEOUT") as refused:
        Tracker(silent, Path("unused")).tag_run("run", {"decision": "approve"})

    said = f"{refused.value!r}{refused.value.__cause__!r}"
    assert "Timeout" in said or "timed out" in said
    assert "secret" not in said
    assert "t0ken" not in said
