"""What the server's own total says about single requests."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginegate.evidence import Outcome
from enginegate.measurement import Load, StageSplit
from enginegate.measuring.server_time import decide_on_server, fewest_over
from enginegate.serving import ServingConfig

CONFIG = ServingConfig(max_batch_size=8, max_queue_delay_us=0, instances=1)


@pytest.mark.parametrize(
    ("latencies_ms", "total_ms", "limit_ms", "expected"),
    [
        pytest.param([2.0] * 4, 4.0, 1.0, 0, id="all-may-have-been-within"),
        pytest.param([2.0] * 4, 4.5, 1.0, 1, id="one-explains-it"),
        pytest.param([2.0] * 4, 8.0, 1.0, 4, id="all-of-it"),
        pytest.param([2.0, 2.0, 2.0, 100.0], 50.0, 1.0, 1, id="one-slow-request-explains-much"),
        pytest.param([0.5] * 4, 2.0, 1.0, 0, id="no-client-waited-so-long"),
        pytest.param([2.0] * 4, 99.0, 1.0, 4, id="more-than-was-waited"),
        pytest.param([], 0.0, 1.0, 0, id="nothing"),
    ],
)
def test_a_total_bounds_a_count(latencies_ms, total_ms, limit_ms, expected):
    """No request was on the server for longer than its client waited."""
    assert fewest_over(np.array(latencies_ms), total_ms, limit_ms) == expected


@given(
    times=st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), min_size=1, max_size=60),
    limit_ms=st.floats(0.01, 5.0),
)
def test_never_more_than_there_were(times, limit_ms):
    """Whatever the single times were, the bound is not above the true count."""
    server_ms = np.array([server for server, _ in times])
    latencies_ms = server_ms + np.array([client for _, client in times])

    bound = fewest_over(latencies_ms, float(server_ms.sum()) * (1.0 - 1e-9), limit_ms)

    assert bound <= int((server_ms > limit_ms).sum())


@pytest.mark.parametrize(
    ("server_ms", "limit_ms", "failing", "sure"),
    [
        pytest.param(0.3, 0.01, 0, True, id="surely-above"),
        pytest.param(0.3, 0.29, 0, False, id="above-in-the-mean-only"),
        pytest.param(0.3, 0.5, 0, False, id="below"),
        pytest.param(None, 0.01, 0, False, id="not-counted-says-nothing"),
        pytest.param(None, 0.01, 100, True, id="no-slow-sender-makes-requests-fail"),
    ],
)
def test_failed_is_sure(make_sampled, slo, server_ms, limit_ms, failing, sure):
    """A mean above the limit is not enough where few slow requests explain it."""
    latencies_ms = np.full(4000, 1.0)
    latencies_ms[::100] = 2.0
    latencies_ms[: 40 * failing : 40] = np.inf
    run = make_sampled(CONFIG, Load(rate_per_s=400, duration_s=10, seed=0), latencies_ms)
    split = StageSplit(
        queue_ms=0.0,
        compute_input_ms=0.0,
        compute_infer_ms=server_ms or 0.0,
        compute_output_ms=0.0,
        mean_batch_size=1.0,
        judged_server_ms=server_ms,
    )
    run = replace(run, measurement=run.measurement.model_copy(update={"stages": split}))

    decision = decide_on_server([run], slo.model_copy(update={"p99_ms": limit_ms}))

    assert (decision.outcome is Outcome.FAILED) is sure
