"""What the runner adds to Triton's counters."""

import pytest

from enginegate.errors import ServerError
from enginegate.measuring import pipeline_counts
from enginegate.measuring.pipeline_counts import PipelineCounts
from enginegate.triton.metrics import Metrics
from enginegate.triton.types import Statistics

COUNTED = Statistics(
    requests=10, executions=5, compute_infer_ns=1000, success_ns=5000, queue_ns=3000
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(pipeline_counts, "_RENEWED_S", 0.0)


@pytest.fixture
def tells(monkeypatch):
    """Makes the metrics endpoint tell these requests and seconds."""

    def run(requests, pending):
        lines = [
            f'enginegate_runner{{model="m",version="{version}",counted="{name}"}} {value}\n'
            for name, values in (("requests", requests), ("pending", pending))
            for version, value in enumerate(values, 1)
        ]
        metrics = Metrics.parse("".join(lines))
        monkeypatch.setattr(pipeline_counts, "read_metrics", lambda _address: metrics)

    return run


def test_time_in_the_pipeline_is_computing(tells):
    """The mean time between handing over and answering is added to every request's computing."""
    tells([4], [1e-6])
    counts = PipelineCounts.begin("host:1", "m")
    tells([8], [3e-6])

    found = counts.complete(COUNTED)

    assert found.compute_infer_ns == 1000 + 10 * 500
    assert found.success_ns == 5000 + 10 * 500
    assert (found.requests, found.executions, found.queue_ns) == (10, 5, 3000)


def test_versions_are_told_apart(tells):
    """One version's counters are read alone where it is named."""
    tells([4, 6], [1.0, 2.0])

    assert PipelineCounts.begin("host:1", "m").before == (10, 3.0)
    assert PipelineCounts.begin("host:1", "m", "2").before == (6, 2.0)


def test_times_that_are_not_known_are_not_split(tells, monkeypatch):
    """Without the endpoint, or after the model began anew, no stages are claimed."""
    tells([8], [1.0])
    counts = PipelineCounts.begin("host:1", "m")
    tells([2], [0.1])
    began_anew = counts.complete(COUNTED)

    def silent(_address):
        raise ServerError("nobody answers")

    monkeypatch.setattr(pipeline_counts, "read_metrics", silent)

    assert (began_anew.executions, began_anew.success_ns, began_anew.requests) == (0, 0, 10)
    assert counts.complete(COUNTED).executions == 0
    assert PipelineCounts.begin(None, "m").complete(COUNTED).executions == 0
