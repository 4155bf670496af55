"""What `enginegate metrics` tells of a real repository, read by Prometheus's own parser."""

import re
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginegate.cli.live.exporter import exposition, read_live_records, serve_metrics
from enginegate.errors import ServerError
from enginegate.evidence import Outcome
from enginegate.repository import AuditLog, LiveRepository
from enginegate.repository.history.broken_promises import record_broken
from tests.fakes.evidence import finding
from tests.fakes.live_triton import FakeTriton, package_in
from tests.fakes.watch_checks import watch_check

ROOT = Path(__file__).parents[4]


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A policy in whose repository release 1 is live, and broke its promise."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    root = tmp_path / "live"
    root.mkdir()
    LiveRepository(root, FakeTriton(root), load_timeout_s=1.0).publish(
        package_in(tmp_path, 1.0), expected=None
    )
    record_broken(root, watch_check(finding(Outcome.FAILED, gate="p99_ms"), version=1))
    text = (ROOT / "policies" / "digits.toml").read_text()
    path = tmp_path / "digits.toml"
    path.write_text(re.sub(r'repository = ".*"', f'repository = "{root}"', text))
    return path


def told(text):
    """Value by metric and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_what_is_live_and_what_happened_is_told(policy):
    found = told(exposition(lambda: [policy])[0])
    of_model = (("model", "digits"),)

    assert found["enginegate_live", of_model] == 1
    assert found["enginegate_promise_broken", of_model] == 1
    assert 0 <= found["enginegate_live_release_age_seconds", of_model] < timedelta(hours=1).seconds
    assert found["enginegate_promised_requests_per_second", of_model] > 0
    events = {
        dict(labels)["event"]: value
        for (name, labels), value in found.items()
        if name == "enginegate_operations_total"
    }
    assert events == {"published": 1, "promise broken": 1}
    assert found["enginegate_unreadable", ()] == 0


def test_labels_are_those_of_the_release(policy):
    info = [
        dict(labels)
        for name, labels in told(exposition(lambda: [policy])[0])
        if name == "enginegate_live_release_info"
    ]

    (label,) = info
    assert (label["model"], label["release"]) == ("digits", "1")
    assert re.fullmatch("[0-9a-f]{64}", label["scorecard"])


def test_policy_that_cannot_be_read_hides_no_other(policy, tmp_path):
    """It is counted; its words are in `enginegate status`."""
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")

    found = told(exposition(lambda: [broken, policy])[0])

    assert found["enginegate_live", (("model", "digits"),)] == 1
    assert found["enginegate_unreadable", ()] == 1
    assert read_live_records([broken]).status.errors


def test_metrics_are_served_and_nothing_else(policy):
    server = serve_metrics(lambda: [policy], "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        reply = httpx.get(f"{address}/metrics")
        assert reply.headers["Content-Type"].startswith("text/plain")
        assert ("enginegate_live", (("model", "digits"),)) in told(reply.content)
        assert httpx.get(f"{address}/policies/digits.toml").status_code == httpx.codes.NOT_FOUND
        with pytest.raises(ServerError, match="Name another port"):
            serve_metrics(lambda: [policy], "127.0.0.1", server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def test_damaged_audit_log_ends_no_scrape(policy, tmp_path):
    """Promises of other models are told of all the same."""
    log = AuditLog(tmp_path / "live").path
    log.write_text(log.read_text().replace("digits", "digitz", 1))

    found = told(exposition(lambda: [policy])[0])

    assert found["enginegate_unreadable", ()] >= 1
    assert ("enginegate_live", (("model", "digits"),)) in found
