"""`metrics`: what is live, what it promised and what was found, for Prometheus to scrape.

Read from the same records as `status`, at each scrape: nothing is counted in this process, so it
may be restarted or run twice. Triton's own metrics say how a server is doing; these say whether
that is what was promised.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginegate.cli.live.status import status_of
from enginegate.cli.output.records import ModelStatus, StatusDocument
from enginegate.cli.policies import PolicyFiles, policies_of
from enginegate.errors import EnginegateError, ServerError
from enginegate.evidence import Scorecard
from enginegate.machine import LAST_PORT
from enginegate.policy import read_policy
from enginegate.repository import AuditLog
from enginegate.workspace import Workspace

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily, Metric

OUTCOMES = ("passed", "inconclusive", "failed", "errored")
_MS = 1e-3


def metrics_command(
    policies: PolicyFiles = None,
    *,
    port: Annotated[
        int, typer.Option(min=0, max=LAST_PORT, help="where it listens; 0: any free one")
    ] = 9464,
    address: Annotated[
        str, typer.Option(help="where it listens; 0.0.0.0 answers everybody who reaches it")
    ] = "127.0.0.1",
    once: Annotated[bool, typer.Option("--once", help="print them and end")] = False,
) -> None:
    """Tell Prometheus what is live, what it promised, and how the last check ended.

    Answers at /metrics until Ctrl-C. Records are read anew at each scrape, once a minute is often
    enough. deploy/prometheus has rules and a dashboard.
    """
    if once:
        typer.echo(exposition(lambda: policies_of(policies))[0].decode(), nl=False)
        return
    policies_of(policies)  # none at all is shown now, not at the first scrape
    server = serve_metrics(lambda: policies_of(policies), address, port)
    typer.echo(f"Metrics at http://{address}:{server.server_port}/metrics. Ctrl-C stops it.")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()


@dataclass(frozen=True, slots=True)
class LiveRecords:
    """What a scrape tells of.

    Attributes:
        status: each policy's model.
        events: counts of the audit log, by model and event.
        verdicts: candidates of each model's scorecards, by model and outcome.
        unreadable: audit logs that cannot be read, or were changed.
        seconds: that reading all of it took.
    """

    status: StatusDocument
    events: Mapping[tuple[str, str], int]
    verdicts: Mapping[tuple[str, str], int]
    unreadable: int
    seconds: float


def read_live_records(policies: Sequence[Path]) -> LiveRecords:
    """Everything that a scrape tells of; a policy that cannot be read hides no other."""
    began = time.monotonic()
    found = status_of(policies)
    events: Counter[tuple[str, str]] = Counter()
    verdicts: Counter[tuple[str, str]] = Counter()
    roots: set[Path] = set()
    workspaces: dict[Path, Workspace] = {}
    names: set[str] = set()
    for path in policies:
        try:
            policy = read_policy(path)
        except EnginegateError:
            continue  # status has its words
        names.add(policy.name)
        roots.add(policy.target.repository)
        workspaces.setdefault(policy.root or path, Workspace.of(policy))
    unreadable = 0
    for root in roots:
        try:
            events.update(AuditLog(root).tally())
        except EnginegateError:
            unreadable += 1  # enginegate audit has the words; other models are told of
    for workspace in workspaces.values():
        verdicts.update(_verdicts(workspace.scorecards(), names))
    return LiveRecords(found.document, events, verdicts, unreadable, time.monotonic() - began)


def promise_metrics(records: LiveRecords, now: datetime) -> Iterator["Metric"]:
    """The metrics of a scrape.

    Args:
        records: what there is to tell.
        now: ages are counted to it.
    """
    models = records.status.models
    for name, help_text, values in _gauges(models, now):
        gauge = _gauge(f"enginegate_{name}", help_text, labels=["model"])
        for model, value in values:
            if value is not None:
                gauge.add_metric([model], value)
        yield gauge
    yield _live_releases(models)
    yield _last_checks(models)
    yield _servers(models)
    yield _counted(
        "operations",
        "Entries of the audit log: publications, rollbacks, answers.",
        "event",
        records.events,
    )
    verdicts = _gauge(
        "enginegate_verdicts",
        "Candidates of the scorecards that are kept.",
        labels=["model", "outcome"],
    )
    for (model, outcome), count in sorted(records.verdicts.items()):
        verdicts.add_metric([model, outcome], count)
    yield verdicts
    yield _gauge(
        "enginegate_unreadable",
        "Policies, scorecards and audit logs that cannot be read; enginegate status names them.",
        value=len(records.status.errors)
        + sum(len(each.problems) for each in models)
        + records.unreadable,
    )
    yield _gauge("enginegate_scrape_seconds", "Time to read all of this.", value=records.seconds)


class LiveCollector:
    """Reads the records anew at each scrape."""

    def __init__(self, policies: Callable[[], Sequence[Path]]) -> None:
        self._policies = policies

    def collect(self) -> Iterator["Metric"]:
        """Prometheus's protocol of a collector."""
        return promise_metrics(read_live_records(self._policies()), datetime.now(UTC))


def exposition(policies: Callable[[], Sequence[Path]], accept: str = "") -> tuple[bytes, str]:
    """The text of a scrape, and its content type.

    Args:
        policies: asked at each scrape, so that a new policy needs no restart.
        accept: formats that the scraper takes.
    """
    from prometheus_client import CollectorRegistry  # noqa: PLC0415
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    registry = CollectorRegistry(auto_describe=False)
    registry.register(LiveCollector(policies))
    encode, kind = choose_encoder(accept)
    text: bytes = encode(registry)
    return text, kind


def serve_metrics(
    policies: Callable[[], Sequence[Path]], address: str, port: int
) -> ThreadingHTTPServer:
    """Answer scrapes at ``/metrics`` in threads of their own until the server is shut down.

    Scrapes wait for one another: two at once would read every record twice.

    Args:
        policies: asked at each scrape.
        address: to listen at.
        port: 0 is any free one.

    Raises:
        ServerError: the port is taken.
    """
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] not in {"/metrics", "/-/healthy"}:
                self.send_error(404, "the metrics are at /metrics")
                return
            text, kind = b"ok\n", "text/plain"
            if self.path.startswith("/metrics"):
                with one_at_a_time:
                    text, kind = exposition(policies, self.headers.get("Accept", ""))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """A scrape is no event."""

    try:
        server = ThreadingHTTPServer((address, port), Handler)
    except OSError as error:
        raise ServerError(
            f"Metrics cannot be served at {address}:{port}: {error.strerror}. Name another port "
            "with --port."
        ) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def _gauges(
    models: Sequence[ModelStatus], now: datetime
) -> Iterator[tuple[str, str, list[tuple[str, float | None]]]]:
    def each(of: Callable[[ModelStatus], float | None]) -> list[tuple[str, float | None]]:
        return [(model.model, of(model)) for model in models]

    def age(at: datetime | None) -> float | None:
        return None if at is None else (now - at).total_seconds()

    yield "live", "1 while a release is live.", each(lambda m: float(m.state == "live"))
    yield (
        "live_release_age_seconds",
        "Since the live release was published.",
        each(lambda m: age(m.live.published_at) if m.live else None),
    )
    yield (
        "promise_age_seconds",
        "Since the last thing was found out about the live promise: a check, or its publication.",
        each(lambda m: age(_last_found_out(m))),
    )
    yield (
        "promised_requests_per_second",
        "What the live release was approved for.",
        each(lambda m: m.promise.throughput_per_s if m.promise else None),
    )
    yield (
        "promised_p99_seconds",
        "p99 that the live release was approved with.",
        each(lambda m: m.promise.p99_ms * _MS if m.promise else None),
    )
    yield (
        "slo_p99_seconds",
        "p99 that the policy allows.",
        each(lambda m: m.promise.slo_p99_ms * _MS if m.promise else None),
    )
    yield (
        "live_requests_per_second",
        "Requests that came in during the last check.",
        each(lambda m: _reading(m, lambda r: r.arrived_per_s)),
    )
    yield (
        "live_server_seconds",
        "Mean time of a request on the server during the last check.",
        each(lambda m: _reading(m, lambda r: r.server_ms and r.server_ms * _MS)),
    )
    yield (
        "live_failed_share",
        "Share of requests that failed during the last check.",
        each(lambda m: _reading(m, lambda r: r.failed / max(1, r.answered + r.failed))),
    )
    yield (
        "promise_broken",
        "1 while a broken promise is not acknowledged.",
        each(lambda m: float(bool(m.broken))),
    )
    yield (
        "scorecards_waiting",
        "Scorecards that somebody has to do something about.",
        each(lambda m: len(m.waiting)),
    )


def _gauge(
    name: str, help_text: str, *, labels: Sequence[str] | None = None, value: float | None = None
) -> "GaugeMetricFamily":
    """A metric that may go down: with its only value, or with labels for values to come."""
    from prometheus_client.metrics_core import GaugeMetricFamily  # noqa: PLC0415

    return GaugeMetricFamily(name, help_text, value=value, labels=labels)


def _last_found_out(model: ModelStatus) -> datetime | None:
    if model.measured is not None:
        return model.measured.at
    return model.live.published_at if model.live else None


def _reading(model: ModelStatus, value: Callable[[Any], float | None]) -> float | None:
    reading = model.measured.reading if model.measured else None
    return None if reading is None else value(reading)


def _live_releases(models: Iterable[ModelStatus]) -> "Metric":
    info = _gauge(
        "enginegate_live_release_info",
        "1 for the release that is live, with what it is.",
        labels=["model", "release", "candidate", "scorecard"],
    )
    for model in models:
        if model.live is not None:
            labels = [str(model.live.release), model.live.candidate, model.promised_by or ""]
            info.add_metric([model.model, *labels], 1)
    return info


def _last_checks(models: Iterable[ModelStatus]) -> "Metric":
    checks = _gauge(
        "enginegate_last_check",
        "1 for the outcome of the last check of what is live.",
        labels=["model", "outcome"],
    )
    for model in models:
        if model.measured is not None:
            for outcome in OUTCOMES:
                checks.add_metric([model.model, outcome], outcome == model.measured.outcome.word)
    return checks


def _servers(models: Iterable[ModelStatus]) -> "Metric":
    servers = _gauge(
        "enginegate_server_info",
        "1 for each server of a model, with its state in words.",
        labels=["model", "server", "address", "state"],
    )
    for model in models:
        for each in model.servers:
            servers.add_metric([model.model, each.name, each.address, each.state], 1)
    return servers


def _counted(
    name: str, help_text: str, label: str, counts: Mapping[tuple[str, str], int]
) -> "Metric":
    from prometheus_client.metrics_core import CounterMetricFamily  # noqa: PLC0415

    counter = CounterMetricFamily(f"enginegate_{name}", help_text, labels=["model", label])
    for (model, value), count in sorted(counts.items()):
        counter.add_metric([model, value], count)
    return counter


def _verdicts(scorecards: Iterable[Scorecard], models: set[str]) -> Iterator[tuple[str, str]]:
    for scorecard in scorecards:
        if scorecard.model in models:
            for verdict in scorecard.verdicts:
                yield scorecard.model, verdict.outcome.word
