"""A real Prometheus scrapes a real Triton and `enginegate metrics`: rules fire, queries answer."""

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from enginegate.cli.live.exporter import serve_metrics
from enginegate.evidence import Outcome
from enginegate.loadgen.traffic import run_load
from enginegate.measurement import ClosedLoad
from enginegate.repository import LiveRepository
from enginegate.repository.history.broken_promises import record_broken
from tests.fakes.evidence import finding
from tests.fakes.live_triton import FakeTriton, package_in
from tests.fakes.watch_checks import watch_check

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "enginegate.json").read_text())
PATIENCE_S = 40.0
pytestmark = [pytest.mark.triton, pytest.mark.long]


@pytest.fixture(scope="module")
def tools():
    found = {name: shutil.which(name) for name in ("prometheus", "promtool")}
    if not all(found.values()):
        pytest.skip("Prometheus is not installed (Debian's package prometheus)")
    return found


@pytest.fixture(scope="module")
def exporter(tmp_path_factory):
    """Metrics of a repository whose release broke its promise."""
    folder = tmp_path_factory.mktemp("promise")
    root = folder / "live"
    root.mkdir()
    LiveRepository(root, FakeTriton(root), load_timeout_s=1.0).publish(
        package_in(folder, 1.0), expected=None
    )
    record_broken(root, watch_check(finding(Outcome.FAILED, gate="p99_ms"), version=1))
    text = (DEPLOY.parent / "policies" / "digits.toml").read_text()
    policy = folder / "digits.toml"
    policy.write_text(
        text.replace('repository = ".enginegate/live/digits"', f'repository = "{root}"')
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINEGATE_HOME", str(folder / "workspace"))
        server = serve_metrics(lambda: [policy], "127.0.0.1", 0)
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def prometheus(tools, exporter, server, tmp_path_factory):
    """Asks an API of a Prometheus that has our rules and scrapes every few seconds."""
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copy(DEPLOY / "prometheus" / "rules.yaml", folder)
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        target = {"enginegate": exporter, "triton": server.metrics}[job["job_name"]]
        # The first reading of a policy imports much.
        job |= {
            "scrape_interval": "5s",
            "scrape_timeout": "5s",
            "static_configs": [{"targets": [target]}],
        }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = (folder / "log").open("wb")
    running = subprocess.Popen(
        [
            tools["prometheus"],
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ],
        stdout=log,
        stderr=log,
    )

    def ask(path, **parameters):
        reply = httpx.get(f"http://{address}/api/v1/{path}", params=parameters, timeout=10)
        return reply.raise_for_status().json()["data"]

    until(lambda: ask("status/runtimeinfo"), httpx.HTTPError)
    yield ask
    running.terminate()
    running.wait(timeout=20)
    log.close()


def until(asked, *errors):
    """What ``asked`` gives once it gives something."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = asked()
        except errors:
            found = None
        if found or time.monotonic() > ends:
            return found
        time.sleep(0.2)


def values(prometheus, query):
    return prometheus("query", query=query)["result"]


def test_promtool_accepts_the_rules(tools):
    done = subprocess.run(
        [tools["promtool"], "check", "rules", str(DEPLOY / "prometheus" / "rules.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_failures_alone_page_somebody(tools, tmp_path):
    """Also where no request succeeds; and nothing does where nobody asks."""
    shutil.copy(DEPLOY / "prometheus" / "rules.yaml", tmp_path)
    series = [
        {"series": f'nv_inference_request_{what}{{model="digits"}}', "values": values}
        for what, values in (("success", "5x40"), ("failure", "0+600x40"))
    ]
    alert = {
        "exp_labels": {"severity": "page", "model": "digits"},
        "exp_annotations": {
            "summary": "digits: 100% of its requests fail",
            "description": "Triton's log and its index (enginegate verify) say why.",
        },
    }
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [
                    {"eval_time": "20m", "alertname": "EnginegateFailures", "exp_alerts": [alert]}
                ],
            },
            {
                "interval": "1m",
                "input_series": [{**each, "values": "5x40"} for each in series],
                "alert_rule_test": [{"eval_time": "20m", "alertname": "EnginegateFailures"}],
            },
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [tools["promtool"], "test", "rules", str(tmp_path / "test.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_both_are_scraped(prometheus):
    def scraped():
        up = values(prometheus, "up == 1")
        return up if len(up) > 1 else None

    found = until(scraped)

    assert found, [target["lastError"] for target in prometheus("targets")["activeTargets"]]
    assert {each["metric"]["job"] for each in found} == {"enginegate", "triton"}


def test_broken_promise_fires(prometheus):
    def firing():
        return [
            alert["labels"]
            for alert in prometheus("alerts")["alerts"]
            if alert["state"] == "firing"
            and alert["labels"]["alertname"] == "EnginegatePromiseBroken"
        ]

    (labels,) = until(firing)

    assert labels["model"] == "digits"
    assert labels["severity"] == "page"


def test_rules_evaluate(prometheus):
    """None ends in an error, and the recorded rate is that of requests that were really sent."""
    groups = until(
        lambda: [
            group
            for group in prometheus("rules")["groups"]
            if all(rule["health"] != "unknown" for rule in group["rules"])
        ]
    )

    assert groups
    for group in groups:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule


def test_every_query_of_the_dashboard_is_answered(prometheus, server, scale, traffic):  # noqa: ARG001
    """Those of Triton's counters too, while requests come."""
    queries = {
        target["expr"].replace("$model", ".*")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
    scaled = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "scaling.yaml").read_text())
    queries |= {trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]}

    answered = {query: values(prometheus, query) for query in queries}

    known = [query for query, found in answered.items() if found]
    assert any("enginegate_live_release_info" in query for query in known)

    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
    recorded = {rule["record"]: rule["expr"] for rule in rules}

    def served():
        run_load(server.grpc, traffic, ClosedLoad(clients=2, duration_s=0.5, seed=0))
        return values(prometheus, f"({recorded['model:triton_requests:rate5m']}) > 0")

    assert until(served)
