"""One check at a live release: numbers and policy in, findings and an action out."""

import pytest

from enginegate.decision import Promise
from enginegate.evidence import Outcome
from enginegate.policy.operating import Watch
from enginegate.watch.log import ShareCount
from enginegate.watch.probe import LiveReading, ProbeResult
from tests.fakes.evidence import release
from tests.fakes.watch_checks import watch_check
from validation.live import action_for, judge_reading, live_finding, not_measured, seen

RULES = Watch(min_requests=100, max_pending=50)
PASSED, INCONCLUSIVE, FAILED, ERRORED = Outcome
PROMISE = Promise(p99_ms=20, throughput_per_s=50, slo_p99_ms=25, p50_ms=3, server_ms=4)


def reading(*, over=0, versions=("2",), probe_failed=0, **changes):
    probe = ProbeResult(
        sent=20,
        failed=probe_failed,
        over=over,
        median_ms=3.0,
        slowest_ms=9.0,
        versions=versions,
    )
    fields = {
        "lasted_s": 10.0,
        "answered": 420,
        "failed": 0,
        "server_ms": 4.2,
        "queue_ms": 0.5,
        "pending_before": 0,
        "pending": 2,
        "probe": probe,
    }
    return LiveReading(**(fields | changes))


def judged(seen, rules=RULES, past=(), **promise):
    live = release(promise=PROMISE.model_copy(update=promise))
    findings, counts = judge_reading(seen, live, rules, past)
    return {finding.gate: finding for finding in findings}, counts


@pytest.mark.parametrize(
    ("seen", "gate", "outcome", "says"),
    [
        pytest.param(reading(), "error_share", PASSED, "0 of 420", id="no-errors"),
        pytest.param(reading(failed=80), "error_share", FAILED, "80 of 500", id="errors"),
        pytest.param(reading(failed=1), "error_share", INCONCLUSIVE, "chance", id="one-error"),
        pytest.param(
            reading(answered=60), "error_share", INCONCLUSIVE, "40 live requests", id="little"
        ),
        pytest.param(
            reading(answered=0, failed=20, probe_failed=20, over=20),
            "error_share",
            FAILED,
            "20 of 20",
            id="nothing-is-answered-even-without-traffic",
        ),
        pytest.param(reading(), "server_time", PASSED, "4.2 ms <= 6 ms", id="as-promised"),
        pytest.param(reading(server_ms=6.1), "server_time", FAILED, "6.1 ms > 6 ms", id="slower"),
        pytest.param(
            reading(server_ms=99.0, answered=900),
            "server_time",
            INCONCLUSIVE,
            "nothing was promised above 50/s",
            id="more-load-than-promised",
        ),
        pytest.param(
            reading(server_ms=99.0, answered=60),
            "server_time",
            INCONCLUSIVE,
            "100 are needed",
            id="too-little-to-tell",
        ),
        pytest.param(reading(), "pending", PASSED, "2 requests waiting <= 50", id="queue"),
        pytest.param(reading(pending=51), "pending", FAILED, "51 requests", id="queue-grows"),
        pytest.param(
            reading(pending=None), "pending", INCONCLUSIVE, "waited 0.5 ms", id="no-metrics"
        ),
        pytest.param(reading(gpu_memory_share=0.9), "gpu_memory", PASSED, "0.9 of", id="memory"),
        pytest.param(reading(gpu_memory_share=0.96), "gpu_memory", FAILED, "> 0.95", id="full"),
        pytest.param(reading(), "latency", INCONCLUSIVE, "not decided yet", id="20-say-little"),
        pytest.param(reading(over=12), "latency", FAILED, "12 of 20", id="over-the-slo"),
        pytest.param(
            reading(versions=("2", "3")), "served_version", ERRORED, "version 3", id="other-version"
        ),
    ],
)
def test_reading_is_judged_by_the_promise(seen, gate, outcome, says):
    """Each gate, at, above and without what it needs."""
    found, _ = judged(seen)

    assert found[gate].outcome is outcome
    assert says in found[gate].reason


def test_healthy_reading_passes_with_an_unknown_queue():
    """What is undecided or unknown by nature is shown as advisory."""
    assert watch_check(*judged(reading(pending=None))[0].values()).outcome is PASSED


def test_light_traffic_is_inconclusive_and_does_nothing():
    """Too little traffic is said, never fine, never an alarm."""
    seen = watch_check(*judged(reading(answered=25))[0].values())

    assert seen.outcome is INCONCLUSIVE
    assert action_for(seen, Watch(on_failure="rollback"), PROMISE, can_go_back=True) == "none"
    assert "5 live requests" in str(seen)


def test_without_a_promised_server_time_a_mean_above_the_p99_fails():
    """Releases published before means were promised are held to what they have."""
    assert judged(reading(server_ms=31.0), server_ms=None)[0]["server_time"].outcome is FAILED
    within = judged(reading(server_ms=10.0), server_ms=None)[0]["server_time"]
    assert (within.outcome, within.advisory) == (INCONCLUSIVE, True)


def test_slow_answers_add_up_over_looks_and_count_anew_after_an_alarm():
    """Two of twenty decide nothing alone; many checks of them do, and the next is judged afresh."""
    past = []
    outcomes = []
    for number in range(1, 31):
        found, counts = judged(reading(over=2), past=past)
        past.append(watch_check(*found.values(), number=number, counts=counts))
        outcomes.append(found["latency"].outcome)

    assert outcomes[0] is INCONCLUSIVE
    first = outcomes.index(FAILED)
    assert 2 < first < 25
    assert outcomes[first + 1] is INCONCLUSIVE


def test_the_slo_is_shown_to_hold_after_enough_good_answers():
    """Good checks end in a passed latency gate, which then counts."""
    past = tuple(
        watch_check(number=n, counts=(ShareCount(what="latency", samples=20, bad=0),))
        for n in range(1, 50)
    )

    latency = judged(reading(), past=past)[0]["latency"]

    assert (latency.outcome, latency.advisory, latency.samples) == (PASSED, False, 1000)


def test_check_names_its_fleet_server():
    """The first one needs no name."""
    found, _ = judge_reading(reading(over=12), release(promise=PROMISE), RULES, (), server="gpu-2")

    assert "latency on gpu-2: 12 of 20" in str(watch_check(*found))
    assert "latency: 12 of 20" in str(watch_check(*judged(reading(over=12))[0].values()))


SLOW = live_finding("server_time", FAILED, "mean 9 ms > 6 ms")
MOVED = live_finding("input_drift", FAILED, "PSI 3")
BROKEN = not_measured("the server does not answer")


@pytest.mark.parametrize(
    ("findings", "on_failure", "can_go_back", "action"),
    [
        ((SLOW,), "nothing", True, "none"),
        ((SLOW,), "alert", True, "alert"),
        ((SLOW,), "rollback", True, "rollback"),
        ((SLOW,), "rollback", False, "alert"),
        ((SLOW, MOVED), "rollback", True, "rollback"),
        ((MOVED,), "rollback", True, "alert"),
        ((BROKEN,), "rollback", True, "alert"),
        ((BROKEN,), "nothing", True, "alert"),
        ((), "rollback", True, "none"),
        ((SLOW.model_copy(update={"advisory": True}),), "rollback", True, "none"),
    ],
)
def test_action(findings, on_failure, can_go_back, action):
    """The policy decides; what broke alerts always, and never rolls back."""
    rules = Watch(on_failure=on_failure)

    assert action_for(watch_check(*findings), rules, PROMISE, can_go_back=can_go_back) == action


ROLLBACK = Watch(on_failure="rollback")


@pytest.mark.parametrize(
    ("changes", "gate"),
    [({"over": 12}, "latency"), ({"failed": 80}, "error_share"), ({"pending": 51}, "pending")],
)
def test_more_load_than_was_promised_alerts_only(changes, gate):
    """It is said, nothing is rolled back, and no later check counts it."""
    seen = reading(**({"answered": 900} | changes))
    found, counts = judged(seen)
    above = watch_check(*found.values(), counts=counts, reading=seen)

    assert found[gate].outcome is FAILED
    assert counts == ()
    assert action_for(above, ROLLBACK, PROMISE, can_go_back=True) == "alert"


def test_each_server_is_excused_by_its_own_load():
    """A busy lead does not excuse a member that is slow without cause."""
    slow = SLOW.model_copy(update={"scope": "live/b"})
    calm, busy = reading(), reading(answered=900)

    excused = watch_check(slow, reading=calm, others={"b": busy})
    not_excused = watch_check(slow, reading=busy, others={"b": calm})

    assert action_for(excused, ROLLBACK, PROMISE, can_go_back=True) == "alert"
    assert action_for(not_excused, ROLLBACK, PROMISE, can_go_back=True) == "rollback"


def test_failure_on_one_server_is_kept_for_that_server():
    """Each server's share counts from its own last failed check; slices share one finding."""
    ours, others = (
        ShareCount(what="latency", samples=20, bad=1),
        ShareCount(what="latency/b", samples=9, bad=0),
    )
    part = ShareCount(what="slice_agreement/digit=3", samples=5, bad=0)
    slow = live_finding("latency", FAILED, "slow").model_copy(update={"scope": "live/b"})
    fine = live_finding("latency", PASSED, "fine")
    apart = live_finding("slice_agreement", FAILED, "digit=4 differs")
    past = [watch_check(fine, slow, apart, number=1, counts=(ours, others, part))]

    assert [s.number for s in seen(ours, past)] == [1, 2]
    assert [s.number for s in seen(others, past)] == [1]
    assert [s.number for s in seen(part, past)] == [1]


@pytest.mark.parametrize("changes", [{"pending": 51}, {"gpu_memory_share": 0.96}])
def test_single_gauge_reading_never_rolls_back(changes):
    """A queue or a GPU that is full for a moment alerts, whatever the policy says of failures."""
    seen = reading(**changes)
    full = watch_check(*judged(seen)[0].values(), reading=seen)

    assert full.outcome is FAILED
    assert action_for(full, ROLLBACK, PROMISE, can_go_back=True) == "alert"


def test_metrics_that_cannot_be_read_are_errored():
    """Where nobody named them they are advisory; where somebody did, nobody watches the queue."""
    found = judged(reading(pending=None, unread="nothing answers"))[0]

    assert (found["metrics"].outcome, found["metrics"].advisory) == (ERRORED, False)
    assert "metrics" not in judged(reading(pending=None))[0]


def test_looks_keep_their_numbers_when_older_ones_are_forgotten():
    """Else a pruned past would grant every check the weight of a first one, for ever."""
    count = ShareCount(what="latency", samples=20, bad=0)
    past = [watch_check(number=n, counts=(count,)) for n in range(700, 703)]
    failed = watch_check(live_finding("latency", FAILED, "slow"), number=703, counts=(count,))

    assert [s.number for s in seen(count, past)] == [700, 701, 702, 703]
    assert [s.number for s in seen(count, [*past, failed])] == [1]
    assert seen(count, []) == [(1, 20, 0)]
