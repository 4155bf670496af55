"""One look at a live release: numbers and policy in, findings and an action out."""

from datetime import UTC, datetime

import numpy as np
import pytest

from enginegate.candidate import FileDigest
from enginegate.decision import Promise, Release
from enginegate.evidence import Finding, Outcome
from enginegate.operating import Watch
from enginegate.triton.look import Probe, Reading
from enginegate.watching import Count, Look, Looks
from tests.fakes.evidence import INT8, SERVING, decision, scorecard, sha
from validation.drift import Drift
from validation.live_answers import count_agreement, judge_agreement, judge_live_drift
from validation.watch import action_for, judge_reading, live_finding, not_measured, seen

RULES = Watch(min_requests=100, max_pending=50)
PASSED, INCONCLUSIVE, FAILED, ERRORED = Outcome
PROMISE = Promise(p99_ms=20, throughput_per_s=50, slo_p99_ms=25, p50_ms=3, server_ms=4)


def release(**changes):
    card = scorecard()
    fields = {
        "model": "digits",
        "version": 2,
        "model_uri": "models:/digits/1",
        "candidate": INT8,
        "engine_sha256": sha("e"),
        "serving": SERVING,
        "backend": "python",
        "inputs": (),
        "outputs": (),
        "golden": FileDigest(sha256=sha("a"), size_bytes=1),
        "golden_max_abs_error": 0.1,
        "files": {},
        "scorecard_sha256": card.digest,
        "decision": decision(card),
        "previous_version": 1,
        "promise": PROMISE,
        "published_at": datetime(2026, 11, 20, tzinfo=UTC),
    }
    return Release(**(fields | changes))


def reading(*, over=0, versions=("2",), probe_failed=0, **changes):
    probe = Probe(
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
    return Reading(**(fields | changes))


def look(*findings, number=1, counts=(), **changes):
    fields = {
        "model": "digits",
        "version": 2,
        "release_sha256": sha("b"),
        "number": number,
        "at": datetime(2026, 11, 20, tzinfo=UTC),
        "intensive": True,
        "reading": None,
        "findings": findings,
        "counts": counts,
    }
    return Look(**(fields | changes))


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
def test_a_look_is_judged_by_the_promise(seen, gate, outcome, says):
    """Each gate, at, above and without what it needs."""
    found, _ = judged(seen)

    assert found[gate].outcome is outcome
    assert says in found[gate].reason


def test_a_healthy_look_passes_and_an_unknown_queue_does_not_keep_it_from_it():
    """What is undecided or unknown by nature is shown as advisory."""
    assert look(*judged(reading(pending=None))[0].values()).outcome is PASSED


def test_light_traffic_is_inconclusive_and_does_nothing():
    """Too little traffic is said, never fine, never an alarm."""
    seen = look(*judged(reading(answered=25))[0].values())

    assert seen.outcome is INCONCLUSIVE
    assert action_for(seen, Watch(on_failure="rollback"), PROMISE, can_go_back=True) == "none"
    assert "5 live requests" in str(seen)


def test_without_a_promised_server_time_a_mean_above_the_p99_fails():
    """Releases published before means were promised are held to what they have."""
    assert judged(reading(server_ms=31.0), server_ms=None)[0]["server_time"].outcome is FAILED
    within = judged(reading(server_ms=10.0), server_ms=None)[0]["server_time"]
    assert (within.outcome, within.advisory) == (INCONCLUSIVE, True)


def test_slow_answers_add_up_over_looks_and_count_anew_after_an_alarm():
    """Two of twenty decide nothing alone; many looks of them do, and the next is judged afresh."""
    past = []
    outcomes = []
    for number in range(1, 31):
        found, counts = judged(reading(over=2), past=past)
        past.append(look(*found.values(), number=number, counts=counts))
        outcomes.append(found["latency"].outcome)

    assert outcomes[0] is INCONCLUSIVE
    first = outcomes.index(FAILED)
    assert 2 < first < 25
    assert outcomes[first + 1] is INCONCLUSIVE


def test_the_slo_is_shown_to_hold_after_enough_good_answers():
    """Good looks end in a passed latency gate, which then counts."""
    past = tuple(
        look(number=n, counts=(Count(what="latency", samples=20, bad=0),)) for n in range(1, 50)
    )

    latency = judged(reading(), past=past)[0]["latency"]

    assert (latency.outcome, latency.advisory, latency.samples) == (PASSED, False, 1000)


def test_a_look_says_on_which_server_of_a_fleet():
    """The first one needs no name."""
    found, _ = judge_reading(reading(over=12), release(), RULES, (), server="gpu-2")

    assert "latency on gpu-2: 12 of 20" in str(look(*found))
    assert "latency: 12 of 20" in str(look(*judged(reading(over=12))[0].values()))


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

    assert action_for(look(*findings), rules, PROMISE, can_go_back=can_go_back) == action


ROLLBACK = Watch(on_failure="rollback")


@pytest.mark.parametrize(
    ("changes", "gate"),
    [({"over": 12}, "latency"), ({"failed": 80}, "error_share"), ({"pending": 51}, "pending")],
)
def test_more_load_than_was_promised_alerts_only(changes, gate):
    """It is said, nothing is rolled back, and no later look counts it."""
    seen = reading(**({"answered": 900} | changes))
    found, counts = judged(seen)
    above = look(*found.values(), counts=counts, reading=seen)

    assert found[gate].outcome is FAILED
    assert counts == ()
    assert action_for(above, ROLLBACK, PROMISE, can_go_back=True) == "alert"


def test_each_server_is_excused_by_its_own_load():
    """A busy lead does not excuse a member that is slow without cause."""
    slow = SLOW.model_copy(update={"scope": "live/b"})
    calm, busy = reading(), reading(answered=900)

    excused = look(slow, reading=calm, others={"b": busy})
    not_excused = look(slow, reading=busy, others={"b": calm})

    assert action_for(excused, ROLLBACK, PROMISE, can_go_back=True) == "alert"
    assert action_for(not_excused, ROLLBACK, PROMISE, can_go_back=True) == "rollback"


def test_what_failed_on_one_server_is_not_forgotten_on_another():
    """Each server's share counts from its own last failed look; slices share one finding."""
    ours, others = (
        Count(what="latency", samples=20, bad=1),
        Count(what="latency/b", samples=9, bad=0),
    )
    part = Count(what="agreement_of_slices/digit=3", samples=5, bad=0)
    slow = live_finding("latency", FAILED, "slow").model_copy(update={"scope": "live/b"})
    fine = live_finding("latency", PASSED, "fine")
    apart = live_finding("agreement_of_slices", FAILED, "digit=4 differs")
    past = [look(fine, slow, apart, number=1, counts=(ours, others, part))]

    assert [s.number for s in seen(ours, past)] == [1, 2]
    assert [s.number for s in seen(others, past)] == [1]
    assert [s.number for s in seen(part, past)] == [1]


@pytest.mark.parametrize("changes", [{"pending": 51}, {"gpu_memory_share": 0.96}])
def test_one_reading_of_a_gauge_never_rolls_back(changes):
    """A queue or a GPU that is full for a moment alerts, whatever the policy says of failures."""
    seen = reading(**changes)
    full = look(*judged(seen)[0].values(), reading=seen)

    assert full.outcome is FAILED
    assert action_for(full, ROLLBACK, PROMISE, can_go_back=True) == "alert"


def test_metrics_that_cannot_be_read_are_errored():
    """Where nobody named them they are advisory; where somebody did, nobody watches the queue."""
    found = judged(reading(pending=None, unread="nothing answers"))[0]

    assert (found["metrics"].outcome, found["metrics"].advisory) == (ERRORED, False)
    assert "metrics" not in judged(reading(pending=None))[0]


def test_looks_keep_their_numbers_when_older_ones_are_forgotten():
    """Else a pruned past would grant every look the weight of a first one, for ever."""
    count = Count(what="latency", samples=20, bad=0)
    past = [look(number=n, counts=(count,)) for n in range(700, 703)]
    failed = look(live_finding("latency", FAILED, "slow"), number=703, counts=(count,))

    assert [s.number for s in seen(count, past)] == [700, 701, 702, 703]
    assert [s.number for s in seen(count, [*past, failed])] == [1]
    assert seen(count, []) == [(1, 20, 0)]


def agreement(bad_by_slice, samples=100, past=()):
    agrees = np.ones(samples * len(bad_by_slice), np.bool_)
    names = np.repeat(sorted(bad_by_slice), samples)
    for place, name in enumerate(sorted(bad_by_slice)):
        agrees[place * samples : place * samples + bad_by_slice[name]] = False
    counts = count_agreement(agrees, {"light": names}, 200)
    return {f.gate: f for f in judge_agreement(counts, RULES, past)}, counts


@pytest.mark.parametrize(
    ("bad", "overall", "slices"),
    [
        ({"day": 0, "night": 0}, PASSED, PASSED),
        ({"day": 2, "night": 3}, INCONCLUSIVE, PASSED),
        ({"day": 40, "night": 40}, FAILED, FAILED),
        ({f"s{n:02d}": 0 for n in range(30)} | {"night": 25}, PASSED, FAILED),
    ],
)
def test_agreement_in_all_and_by_slice(bad, overall, slices):
    """A slice that surely disagrees fails though the whole is well above the limit."""
    found, _ = agreement(bad)

    assert (found["agreement"].outcome, found["slice_agreement"].outcome) == (overall, slices)
    if slices is FAILED and overall is PASSED:
        assert "light=night" in found["slice_agreement"].reason


def test_slice_columns_with_too_many_values_are_not_cut():
    """A column of user names is no slice."""
    names = np.array([f"user-{n}" for n in range(50)])

    counts = count_agreement(np.ones(50, np.bool_), {"user": names}, 10)

    assert [count.what for count in counts] == ["agreement"]


@pytest.mark.parametrize(
    ("psi", "p_value", "max_drift", "tests", "outcome", "advisory"),
    [
        (3.0, 1e-9, 0.25, 0, FAILED, False),
        (3.0, 1e-9, None, 0, INCONCLUSIVE, True),
        (0.1, 1e-9, 0.25, 0, PASSED, False),
        (3.0, 0.2, 0.25, 0, PASSED, False),
        (3.0, 1e-3, 0.25, 0, FAILED, False),
        (3.0, 1e-3, 0.25, 9, PASSED, False),
    ],
)
def test_drift_fails_at_a_stated_limit_only(psi, p_value, max_drift, tests, outcome, advisory):
    """And the same evidence weighs less at the tenth sample than at the first."""
    drifts = (Drift("x", "mean", psi, 0.5, p_value),)
    rules = Watch(max_drift=max_drift)
    past = [look(number=n, sample=sha("c")) for n in range(1, tests + 1)]

    found = judge_live_drift(drifts, (100, 100), rules, past)

    assert (found.outcome, found.advisory) == (outcome, advisory)


def test_looks_are_kept_in_number_and_their_numbers_never_come_back(tmp_path, monkeypatch):
    """The oldest are forgotten; a damaged one is left out, and its number stays taken."""
    monkeypatch.setattr("enginegate.watching._KEPT", 3)
    looks = Looks(tmp_path)
    for number in range(1, 6):
        looks.add(look(number=number))
    (tmp_path / "00000005.json").write_text("{")

    assert [seen.number for seen in looks.read()] == [3, 4]
    assert looks.next_number() == 6


def test_looks_of_watches_that_overlap_are_all_kept(tmp_path):
    """Both took the next number when they began; the one that ends later gets another."""
    looks = Looks(tmp_path)

    kept = [looks.add(look(number=1, at=datetime(2026, 11, day, tzinfo=UTC))) for day in (20, 21)]

    assert [seen.number for seen in kept] == [1, 2]
    assert looks.read() == tuple(kept)


def test_a_release_is_rolled_back_by_a_watch_once(tmp_path):
    """The claim is taken once, and can be returned when the rollback was refused."""
    looks = Looks(tmp_path)

    assert not looks.rolled_back
    assert looks.claim_rollback()
    assert not looks.claim_rollback()
    assert looks.rolled_back
    looks.return_claim()
    assert looks.claim_rollback()


def test_a_look_says_what_it_found():
    """One sentence, worst first, for logs, alerts and the audit log."""
    found = Finding(gate="pending", scope="live", outcome=INCONCLUSIVE, reason="unknown")

    assert str(look(found, SLOW)) == (
        "look 1 at release 2 of digits: failed (server_time: mean 9 ms > 6 ms; pending: unknown)"
    )
