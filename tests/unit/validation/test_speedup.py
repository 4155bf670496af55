"""Whether a candidate is faster by the policy's margin."""

import math

import pytest

from enginegate.evidence import Outcome, PointDecision, Rival, contradictions
from enginegate.policy.benchmarking import Search, Slo
from tests.fakes.evidence import FP32, INT8, SERVING, benchmark, finding, scorecard, sha
from validation.choice import choose_served
from validation.speedup import SpeedReference, Throughput, judge_speed, with_speed

PASSED, INCONCLUSIVE, FAILED = Outcome.PASSED, Outcome.INCONCLUSIVE, Outcome.FAILED
BOUNDS = Search(
    max_batch_sizes=(8,),
    queue_delays_us=(0,),
    instances=(1,),
    min_rate_per_s=50,
    max_rate_per_s=1000,
    measurement_s=1,
    budget_s=10,
)


def slo(**changes):
    fields = {"p99_ms": 20, "min_throughput_per_s": 1, "confidence": 0.99, "min_speedup": 1.5}
    return Slo(**(fields | changes))


def found(throughput_per_s, *, candidate=INT8, engine="e", **known):
    made = benchmark(throughput_per_s, candidate=candidate)
    rejected = 1.1 * throughput_per_s
    fields = {
        "engine_sha256": sha(engine),
        "rejected_rate_per_s": rejected,
        "decisions": (decided(rejected),),
    }
    return made.model_copy(update=fields | known)


def decided(rate_per_s, outcome=FAILED, *, config=SERVING):
    """What the rule of p99_ms says of one point."""
    return PointDecision(
        config=config, rate_per_s=rate_per_s, outcome=outcome, requests=1200, over=30
    )


def rival(throughput_per_s, *, rejected=None):
    return Rival(
        release=7,
        rate_per_s=500,
        candidate_p99_ms=(9.0,),
        champion_p99_ms=(9.0,),
        noise_ms=0.5,
        champion_throughput_per_s=throughput_per_s,
        champion_rejected_per_s=rejected,
    )


def speedup(made):
    (said,) = [f for f in made.findings if f.gate == "speedup"]
    return said


@pytest.mark.parametrize(
    ("ours", "theirs", "margin", "expected"),
    [
        pytest.param(600, 400, 1.5, PASSED, id="at-the-margin"),
        pytest.param(599, 400, 1.5, FAILED, id="below"),
        pytest.param(300, 400, 0.7, PASSED, id="slower-and-allowed"),
        pytest.param(1000, 400, 1.5, PASSED, id="ours-at-the-ceiling-beyond"),
        pytest.param(1000, 800, 1.5, INCONCLUSIVE, id="ours-at-the-ceiling-could-be-more"),
        pytest.param(960, 800, 1.5, INCONCLUSIVE, id="within-the-resolution-of-the-ceiling"),
        pytest.param(500, 1000, 1.5, FAILED, id="theirs-at-the-ceiling"),
        pytest.param(900, 1000, 0.8, INCONCLUSIVE, id="theirs-at-the-ceiling-could-be-more"),
        pytest.param(1000, 1000, 1.0, PASSED, id="both-at-the-ceiling-and-equal"),
        pytest.param(960, 1000, 1.0, PASSED, id="both-at-the-ceiling-as-far-as-can-be-told"),
        pytest.param(1000, 1000, 1.1, INCONCLUSIVE, id="both-at-the-ceiling"),
        pytest.param(0, 400, 1.5, INCONCLUSIVE, id="ours-not-confirmed"),
        pytest.param(600, 0, 1.5, INCONCLUSIVE, id="theirs-not-confirmed"),
        pytest.param(600, None, 1.5, INCONCLUSIVE, id="theirs-not-measured"),
    ],
)
def test_margin(ours, theirs, margin, expected):
    """Decided only where neither search ended at its highest rate, or where the bound settles."""
    known = None if theirs is None else Throughput.exact(theirs)
    said = judge_speed(Throughput.exact(ours), SpeedReference("fp32", known), margin, BOUNDS)

    assert said.outcome is expected
    assert (said.gate, said.limit, said.relation) == ("speedup", margin, ">=")
    assert bool(said.remedy) is (expected is not PASSED)


def test_failed_gate_says_which_margin_would_pass():
    """And with how many requests a second it was found."""
    against = SpeedReference("onnxruntime-fp32", Throughput.exact(400))
    said = judge_speed(Throughput.exact(500), against, 1.5, BOUNDS)

    assert said.would_pass == 1.25
    assert said.reason == "500/s over 400/s of onnxruntime-fp32 is 1.25; 1.25 < 1.5"


@pytest.mark.parametrize(
    ("ours_bounded", "theirs_bounded", "expected"),
    [
        pytest.param(False, False, PASSED, id="both-known"),
        pytest.param(True, False, PASSED, id="ours-may-be-more"),
        pytest.param(False, True, INCONCLUSIVE, id="theirs-may-be-more"),
        pytest.param(True, True, INCONCLUSIVE, id="both-may-be-more"),
    ],
)
def test_throughput_is_a_bound_without_a_refuted_higher_rate(
    ours_bounded, theirs_bounded, expected
):
    """A generator that could send FP32 no more makes nothing else faster."""
    ours = Throughput(800, math.inf if ours_bounded else 800)
    against = SpeedReference("fp32", Throughput(400, math.inf if theirs_bounded else 400))

    assert judge_speed(ours, against, 0.9, BOUNDS).outcome is expected


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param(Throughput(800, 1080), Throughput(400, 530), PASSED, id="whatever-they-are"),
        pytest.param(Throughput(800, 1080), Throughput(400, 540), INCONCLUSIVE, id="theirs-open"),
        pytest.param(Throughput(500, 590), Throughput(400, 400), FAILED, id="ours-at-most-less"),
        pytest.param(Throughput(500, 610), Throughput(400, 400), INCONCLUSIVE, id="ours-open"),
    ],
)
def test_bounds_of_the_ratio_decide(ours, theirs, expected):
    """A rate that is shown not to be sustained bounds a throughput, and with it the ratio."""
    assert judge_speed(ours, SpeedReference("fp32", theirs), 1.5, BOUNDS).outcome is expected


def test_capped_fp32_is_read_from_its_benchmark():
    """Nothing above its rate was refuted, so its rate may be higher."""
    capped = found(400, candidate=FP32, rejected_rate_per_s=None, decisions=())

    _, int8 = with_speed([capped, found(800)], slo(), BOUNDS, live=None)

    assert speedup(int8).outcome is INCONCLUSIVE
    assert "onnxruntime-fp32 may sustain more (no rate just above it was" in speedup(int8).reason
    assert "raise [search] budget_s" in speedup(int8).remedy


def test_search_that_was_cut_short_makes_no_engine_faster():
    """The same engine with a shorter budget was found slower by 1.39, and is not."""
    why = "the budget ended the search: raise [search] budget_s"
    hurried = found(430, candidate=FP32, cut_short=why)

    _, theirs = with_speed([hurried, found(600)], slo(min_speedup=1.2), BOUNDS, live=None)
    _, ours = with_speed(
        [found(430, candidate=FP32), found(600, cut_short=why)],
        slo(min_speedup=1.5),
        BOUNDS,
        live=None,
    )

    assert (speedup(theirs).outcome, speedup(ours).outcome) == (INCONCLUSIVE, INCONCLUSIVE)
    assert speedup(theirs).remedy == f"{why}."


@pytest.mark.parametrize(
    ("ours", "expected"),
    [pytest.param(790, INCONCLUSIVE, id="not-beyond-it"), pytest.param(820, PASSED, id="beyond")],
)
def test_overload_alone_is_a_bound(ours, expected):
    """That 540/s is far too much does not say that FP32 sustains no more than 400/s."""
    fp32 = found(400, candidate=FP32, rejected_rate_per_s=540, decisions=(decided(540),))

    _, int8 = with_speed([fp32, found(ours)], slo(), BOUNDS, live=None)

    assert speedup(int8).outcome is expected


@pytest.mark.parametrize("rejected", [420, 540])
@pytest.mark.parametrize("outcome", [PASSED, INCONCLUSIVE])
def test_bound_must_be_shown(outcome, rejected):
    """By the rule of the gate p99_ms: what that leaves open refutes nothing, however near."""
    unsure = decided(rejected, outcome)
    fp32 = found(400, candidate=FP32, rejected_rate_per_s=rejected, decisions=(unsure,))

    _, int8 = with_speed([fp32, found(900)], slo(), BOUNDS, live=None)

    assert speedup(int8).outcome is INCONCLUSIVE


@pytest.mark.parametrize(
    ("ours", "expected"),
    [pytest.param(75, PASSED, id="beyond-the-margin"), pytest.param(74, INCONCLUSIVE, id="below")],
)
def test_reference_sustaining_no_rate_is_below_the_lowest(ours, expected):
    """FP32 that is too slow for the SLO at all does not stand in the way of what is not."""
    against = SpeedReference("fp32", None, refuted_per_s=50)
    said = judge_speed(Throughput.exact(ours), against, 1.5, BOUNDS)

    assert said.outcome is expected


def test_at_the_ceiling_the_remedy_names_it():
    """Raising the highest rate is what lets the faster one show itself."""
    against = SpeedReference("fp32", Throughput.exact(990))
    said = judge_speed(Throughput.exact(1000), against, 1.5, BOUNDS)

    assert "both sustain the highest rate that is tried (1,000/s)" in said.reason
    assert "nothing above 1,000/s is tried: raise [search] max_rate_per_s" in said.remedy


def test_equal_at_the_ceiling_passes_with_a_number_that_says_so():
    """A scorecard whose findings pass with a number beyond their limit is refused when it is read;
    of two that sustain the highest rate, one always answered a little less of it.
    """
    fp32, int8 = found(1000, candidate=FP32), found(999.2)
    int8 = with_speed([fp32, int8], slo(min_speedup=1.0), BOUNDS, live=None)[1]
    said = speedup(int8)

    assert (said.outcome, said.value) == (PASSED, 1.0)
    assert not tuple(contradictions(scorecard(benchmarks=(int8,), winner=None)))


def test_fp32_of_the_same_runtime_is_the_reference():
    """It has no such finding itself; its own throughput is what the others must beat."""
    fp32, int8 = with_speed(
        [found(400, candidate=FP32), found(500)], slo(min_speedup=1.2), BOUNDS, live=None
    )

    assert speedup(int8).outcome is PASSED
    assert int8.outcome is PASSED
    assert [f.gate for f in fp32.findings] == ["p99_ms"]


def test_without_a_margin_nothing_is_added():
    """Being faster is asked for by the policy or not at all; unmeasured ones stay in place."""
    given = [None, found(500)]

    assert with_speed(given, slo(min_speedup=None), BOUNDS, live=None) == tuple(given)
    assert with_speed([None], slo(), BOUNDS, live=None) == (None,)


def test_unmeasured_fp32_leaves_it_open():
    """The gate does not pass for want of something to compare with."""
    (int8,) = with_speed([found(500)], slo(), BOUNDS, live=None)

    assert speedup(int8).outcome is INCONCLUSIVE
    assert "onnxruntime-fp32" in speedup(int8).reason


OTHER = SERVING.model_copy(update={"instances": 2})


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        pytest.param((decided(50),), PASSED, id="at-the-lowest-rate"),
        pytest.param((decided(300),), INCONCLUSIVE, id="only-at-a-higher-one"),
        pytest.param((decided(50, INCONCLUSIVE),), INCONCLUSIVE, id="too-close-to-show-it"),
        pytest.param(
            (decided(50), decided(50, PASSED, config=OTHER)),
            INCONCLUSIVE,
            id="another-meets-it",
        ),
    ],
)
def test_fp32_that_was_refuted_counts_as_slower(decisions, expected):
    """Its benchmark shows that the lowest rate is not sustained, and not only that some did not."""
    refuted = found(0, candidate=FP32).model_copy(
        update={
            "chosen": None,
            "findings": (finding(FAILED, gate="p99_ms"),),
            "decisions": decisions,
        }
    )

    _, int8 = with_speed([refuted, found(500)], slo(), BOUNDS, live=None)

    assert speedup(int8).outcome is expected


def test_run_without_the_reference_does_not_judge_it():
    """One candidate alone can win; that nobody was beaten is said, and does not count."""
    (int8,) = with_speed([found(500)], slo(), BOUNDS, live=None, left_out={FP32})

    choice = choose_served([int8], BOUNDS)

    assert (int8.outcome, choice.winner) == (PASSED, INT8)
    assert "Speedup was not judged: onnxruntime-fp32 is not part of this run." in choice.reason


@pytest.mark.parametrize(
    ("measured", "live", "expected"),
    [
        pytest.param(
            found(500, rival=rival(300, rejected=310)), sha("9"), PASSED, id="faster-than-live"
        ),
        pytest.param(
            found(400, rival=rival(300, rejected=310)), sha("9"), FAILED, id="not-fast-enough"
        ),
        pytest.param(found(500, rival=rival(300)), sha("9"), INCONCLUSIVE, id="live-may-do-more"),
        pytest.param(
            found(500, rival=rival(300, rejected=400)), sha("9"), INCONCLUSIVE, id="live-is-bounded"
        ),
        pytest.param(
            found(500, rival=rival(0, rejected=200)),
            sha("9"),
            PASSED,
            id="live-sustains-no-rate",
        ),
        pytest.param(found(500), sha("9"), INCONCLUSIVE, id="live-was-not-measured"),
        pytest.param(found(500), sha("e"), None, id="it-is-what-is-live"),
        pytest.param(found(500), None, INCONCLUSIVE, id="nothing-live-so-fp32"),
    ],
)
def test_champion(measured, live, expected):
    """With faster_than = champion the live release, measured beside it, is the reference."""
    (made,) = with_speed([measured], slo(faster_than="champion"), BOUNDS, live=live)

    outcomes = [f.outcome for f in made.findings if f.gate == "speedup"]
    assert outcomes == ([] if expected is None else [expected])
