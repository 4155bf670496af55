import numpy as np
import pytest

from enginegate.loadgen.grpc_message import Response
from enginegate.loadgen.transcript import MaturedCounts, Transcript

OK = Response("", "1", None)
LIMIT_S = 0.1


def _play(took_s, *, until_s, matured, naive=None):
    """A request each millisecond, answered in time order; looked at every 10 ms until a time."""
    transcript = Transcript()
    waiting = [(0.001 * row + took, row) for row, took in enumerate(took_s)]
    waiting.sort()
    now_s, opened = 0.0, 0
    while now_s < until_s:
        now_s += 0.01
        while opened < len(took_s) and 0.001 * opened <= now_s:
            transcript.add_request(0.001 * opened, 0, 0.001 * opened)
            opened += 1
        while waiting and waiting[0][0] <= now_s:
            done_s, row = waiting.pop(0)
            transcript.add_answer(row, OK, done_s)
        matured.update(transcript, now_s)
        if naive is not None:
            answered = np.isfinite(transcript.latency_s)
            late = np.array(transcript.latency_s)[answered] > LIMIT_S
            naive.append((answered.sum(), late.sum()))
    return transcript


def test_matured_requests_are_counted_without_bias():
    """The share over the limit is right at every moment, also while slow answers are under way."""
    source = np.random.default_rng(4)
    slow = source.random(3000) < 0.2
    took_s = np.where(slow, 0.9, 0.005)
    matured, naive = MaturedCounts(LIMIT_S, skip_s=0.0), []

    _play(took_s, until_s=0.6, matured=matured, naive=naive)

    assert matured.count == pytest.approx(500, abs=2)
    assert matured.over == slow[: matured.count].sum() > 70
    # Counting what has been answered would have seen none of the slow ones by then.
    assert naive[-1][0] > 400
    assert naive[-1][1] == 0


def test_warm_up_and_failures():
    """Requests due in the warm-up are not counted; one that failed counts as over."""
    transcript, matured = Transcript(), MaturedCounts(LIMIT_S, skip_s=1.0)
    for row, due_s in enumerate((0.5, 0.999, 1.0, 1.1, 1.2)):
        transcript.add_request(due_s, row, due_s)
    transcript.add_answer(0, OK, 9.0)
    transcript.add_answer(2, OK, 1.05)
    transcript.add_answer(3, Response("UNAVAILABLE", "", None), 1.1)
    transcript.add_answer(4, OK, 1.25)

    matured.update(transcript, 1.25)
    assert (matured.count, matured.over) == (2, 1)
    matured.update(transcript, 1.31)
    assert (matured.count, matured.over) == (3, 1)
    assert transcript.errors == {"UNAVAILABLE": 1}
