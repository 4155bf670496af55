import numpy as np
import pytest

from enginegate.measurement import Load, Measurement, StageSplit
from enginegate.measuring.bottleneck import explain_p99, largest_stage, latency_breakdown
from enginegate.measuring.p99 import percentiles
from enginegate.serving import ServingConfig

LIMIT_MS = 50.0


def _measurement(stages, latencies_ms=(), batch=8, **fields):
    latencies_ms = np.array(latencies_ms or [10.0] * 950 + [40.0] * 50)
    failed = int(np.isinf(latencies_ms).sum())
    return Measurement(
        config=ServingConfig(max_batch_size=batch, max_queue_delay_us=0, instances=1),
        load=Load(rate_per_s=100, duration_s=10, seed=0),
        invalid=(),
        sent=len(latencies_ms),
        completed=len(latencies_ms) - failed,
        failed=failed,
        throughput_per_s=100,
        percentiles=percentiles(latencies_ms),
        late_p99_ms=0.1,
        stages=stages,
        latencies_sha256="0" * 64,
        **fields,
    )


def _split(queue, infer, client=None, batches=None, **fields):
    batches = batches or {4: 10}
    total = sum(batches.values())
    return StageSplit(
        queue_ms=queue,
        compute_infer_ms=infer,
        mean_batch_size=sum(size * count for size, count in batches.items()) / total,
        batches=batches,
        client_ms=client,
        **{"compute_input_ms": 0.0, "compute_output_ms": 0.0, **fields},
    )


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        pytest.param(
            _split(6.1, 3.9),
            "61% of the mean server time is queueing (6.1 ms): add instances",
            id="queueing",
        ),
        pytest.param(
            _split(1.0, 8.0, client=1.0),
            "80% of the mean time of a request is computing (8 ms): use a faster precision",
            id="computing",
        ),
        pytest.param(
            _split(1.0, 2.0, client=7.0),
            "70% of the mean time of a request is client and network (7 ms): send over gRPC",
            id="client",
        ),
        pytest.param(
            _split(1.0, 2.0, compute_input_ms=3.0),
            "50% of the mean server time is preparing inputs (3 ms)",
            id="inputs",
        ),
    ],
)
def test_largest_bucket_is_named(stages, said):
    """What is named is a share of the mean, because means are all that the server counts."""
    explained = explain_p99(_measurement(stages), LIMIT_MS)

    assert explained.startswith("p99 is 40 ms, within the limit of 50 ms. ")
    assert said in explained


def test_shares_add_up():
    """Buckets are ordered, and their shares are of the whole."""
    found = latency_breakdown(_split(6.0, 3.0, client=1.0))

    assert [bucket.name for bucket in found][:3] == ["queueing", "computing", "client and network"]
    assert sum(bucket.share for bucket in found) == pytest.approx(1.0)


def test_tail_beyond_the_mean_is_called_waiting():
    """What p99 is beyond a mean execution is called waiting, and said not to be measured."""
    explained = explain_p99(_measurement(_split(6.0, 4.0)), LIMIT_MS)

    assert "p99 is 4 times the mean" in explained
    assert "if the slowest requests were executed as fast as the mean (4 ms), 90%" in explained
    assert "not measured" in explained


def test_tail_below_the_mean_is_not_explained():
    """Nothing is said of a tail when counters and latencies do not fit together."""
    assert "times the mean" not in explain_p99(_measurement(_split(60.0, 4.0)), LIMIT_MS)


@pytest.mark.parametrize(
    ("batches", "batch", "queue", "said"),
    [
        pytest.param({8: 70, 3: 30}, 8, 6.0, "70% of the executions were as large as allowed (8)"),
        pytest.param({1: 90, 2: 10}, 8, 2.0, "Batches had 1.1 of at most 8"),
        pytest.param({1: 90, 2: 10}, 8, 6.0, ""),
        pytest.param({1: 100}, 1, 6.0, "Every request runs alone: allow batches."),
        pytest.param({1: 100}, 1, 2.0, ""),
        pytest.param({4: 100}, 8, 6.0, ""),
    ],
    ids=["full", "nearly-empty", "empty-but-waiting", "alone", "alone-and-fast", "in-between"],
)
def test_batches_give_a_hint(batches, batch, queue, said):
    """Full batches are pointed out, and nearly empty ones where requests do not wait already."""
    explained = explain_p99(
        _measurement(_split(queue, 4.0, batches=batches), batch=batch), LIMIT_MS
    )

    assert said in explained
    if not said:
        assert explained.partition("not measured).")[2] == ""


def test_failures_are_named_before_latency():
    """Where p99 falls on failures they are counted by kind, and no stage is blamed."""
    latencies_ms = [10.0] * 900 + [np.inf] * 100
    errors = {"UNAVAILABLE": 60, "DEADLINE_EXCEEDED": 40}

    explained = explain_p99(_measurement(_split(6.0, 4.0), latencies_ms, errors=errors), LIMIT_MS)

    assert "100 of 1000 failed (40 DEADLINE_EXCEEDED, 60 UNAVAILABLE)" in explained
    assert "queueing" not in explained


def test_no_stage_is_named_without_counters():
    """A server whose counters are not known has no largest stage."""
    assert explain_p99(_measurement(None), LIMIT_MS).endswith("meanwhile was not counted.")
    assert largest_stage(_measurement(None)) == ""
    assert largest_stage(_measurement(_split(0.0, 0.0))) == ""
    assert largest_stage(_measurement(_split(6.1, 3.9))).startswith(
        "queueing is 61% of the mean server time: "
    )
