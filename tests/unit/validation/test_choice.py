"""Which candidate wins."""

import itertools

import pytest

from enginegate.evidence import Outcome
from enginegate.measurement import Percentile
from enginegate.policy.benchmarking import Search
from tests.fakes.evidence import FP32, INT8, benchmark, finding, verdict
from validation.choice import choose, choose_served

THROUGHPUT = Search(
    max_batch_sizes=(8,),
    queue_delays_us=(0,),
    instances=(1,),
    min_rate_per_s=50,
    max_rate_per_s=1000,
    at_rate_per_s=400,
    measurement_s=1,
    budget_s=10,
)


def objective(name):
    return THROUGHPUT.model_copy(update={"objective": name})


def both(**int8):
    return [verdict(candidate=FP32), verdict(finding(**int8), candidate=INT8)]


def test_the_fastest_that_passed_wins():
    """Throughput within the SLO decides, and the reason names it."""
    choice = choose(
        both(), [benchmark(300, candidate=FP32), benchmark(500, candidate=INT8)], THROUGHPUT
    )

    assert choice.winner == INT8
    assert "500 requests/s" in choice.reason
    assert "2 candidates that passed" in choice.reason


def held(candidate, p99_ms, *, rate=800.0, spread_ms=1.0, **known):
    """Confirmed at a rate with a p99 interval, at the ceiling of 800/s."""
    p99 = Percentile(
        quantile=0.99,
        value_ms=p99_ms,
        low_ms=p99_ms - spread_ms,
        high_ms=p99_ms + spread_ms,
        samples=9000,
    )
    fields = {"p99_at_slo": p99, "confirmed_rate_per_s": rate, "ceiling_per_s": 800.0}
    return benchmark(rate, candidate=candidate).model_copy(update=fields | known)


class TestTies:
    @pytest.mark.parametrize(
        ("fp32", "int8", "winner", "tied"),
        [
            pytest.param(
                held(FP32, 8.0, engine_bytes=900_000),
                held(INT8, 9.0, engine_bytes=250_000),
                INT8,
                True,
                id="smallest-engine",
            ),
            pytest.param(
                held(FP32, 9.0, engine_bytes=250_000),
                held(INT8, 8.0, engine_bytes=900_000),
                FP32,
                True,
                id="smallest-engine-whichever-it-is",
            ),
            pytest.param(
                held(FP32, 8.0, engine_bytes=900, cost_per_million=3.0),
                held(INT8, 9.0, engine_bytes=900, cost_per_million=2.0),
                INT8,
                True,
                id="then-the-lowest-cost",
            ),
            pytest.param(held(FP32, 9.0), held(INT8, 8.0), FP32, True, id="then-the-policys-order"),
            pytest.param(
                held(FP32, 9.0),
                held(INT8, 9.9, engine_bytes=900),
                INT8,
                True,
                id="a-known-size-before-an-unknown-one",
            ),
            pytest.param(
                held(FP32, 6.9, engine_bytes=900),
                held(INT8, 9.0, engine_bytes=250),
                FP32,
                False,
                id="intervals-apart",
            ),
            pytest.param(
                held(FP32, 7.0, engine_bytes=900),
                held(INT8, 9.0, engine_bytes=250),
                INT8,
                True,
                id="intervals-that-touch",
            ),
            pytest.param(
                held(FP32, 8.0, engine_bytes=900),
                held(INT8, 8.0, rate=780.0, engine_bytes=250),
                FP32,
                False,
                id="another-rate",
            ),
            pytest.param(
                held(FP32, 8.0, engine_bytes=900),
                held(INT8, 8.5, engine_bytes=250, throughput_at_slo_per_s=796.4),
                INT8,
                True,
                id="some-answers-fewer-at-the-same-rate",
            ),
        ],
    )
    def test_indistinguishable_candidates_are_tied(self, fp32, int8, winner, tied):
        """The same confirmed rate and overlapping p99: size, then cost, then order decide."""
        choice = choose(both(), [fp32, int8], THROUGHPUT)

        assert choice.winner == winner
        assert choice.tied == (() if not tied else ({FP32: INT8, INT8: FP32}[winner],))
        assert ("tied with" in choice.reason) is tied

    @pytest.mark.parametrize("name", ["throughput", "cost", "latency"])
    def test_the_same_two_with_swapped_noise_give_the_same_winner(self, name):
        """What differs from run to run (p99, the share answered) does not choose."""
        fixed = {FP32: {"engine_bytes": 900}, INT8: {"engine_bytes": 250}}
        noises = [(8.0, 799.1), (8.6, 800.0), (9.1, 797.5)]

        winners = set()
        for mine, theirs in itertools.permutations(noises, 2):
            measured = [
                held(
                    candidate,
                    p99_ms,
                    throughput_at_slo_per_s=answered,
                    cost_per_million=2.0 * 800.0 / answered,
                    **fixed[candidate],
                )
                for candidate, (p99_ms, answered) in ((FP32, mine), (INT8, theirs))
            ]
            winners.add(choose(both(), measured, objective(name)).winner)

        assert winners == {INT8}

    def test_the_reason_says_that_it_is_a_tie_and_what_broke_it(self):
        """With the ceiling as what it is: a lower bound."""
        measured = [
            held(FP32, 8.0, engine_bytes=912 * 1024),
            held(INT8, 9.0, engine_bytes=249 * 1024),
        ]

        assert choose(both(), measured, THROUGHPUT).reason == (
            "serves ≥ 800 requests/s within the SLO (p99 9.0 ms, 8.0 to 10.0); tied with "
            "onnxruntime-fp32 (the same rate, and p99 intervals that overlap); of the tied the "
            "smallest engine (249 KiB, against 912 KiB)."
        )

    def test_lower_p99_is_reported_where_certain(self):
        """At the same rate, where the intervals do not overlap."""
        measured = [held(FP32, 9.0, engine_bytes=250), held(INT8, 5.0, engine_bytes=900)]
        choice = choose(both(), measured, THROUGHPUT)

        assert choice.winner == INT8
        assert "the highest rate, and surely the lowest p99" in choice.reason

    @pytest.mark.parametrize(
        ("fp32", "int8", "winner", "tied"),
        [
            pytest.param(
                held(FP32, 8.0, engine_bytes=900),
                held(INT8, 8.0, rate=700.0, engine_bytes=250, generator_limit_per_s=750.0),
                FP32,
                True,
                id="lower-bound-below-the-best-wins-not-by-its-size",
            ),
            pytest.param(
                held(FP32, 8.0, engine_bytes=900),
                held(INT8, 8.0, engine_bytes=250, generator_limit_per_s=850.0),
                INT8,
                True,
                id="lower-bound-at-the-best-wins-by-its-size",
            ),
            pytest.param(
                held(FP32, 8.0, engine_bytes=250),
                held(INT8, 2.0, rate=700.0, engine_bytes=900, generator_limit_per_s=750.0),
                FP32,
                True,
                id="its-tail-at-a-lower-rate-decides-nothing",
            ),
            pytest.param(
                held(FP32, 8.0, rate=700.0, engine_bytes=250),
                held(INT8, 8.0, engine_bytes=900, generator_limit_per_s=850.0),
                INT8,
                False,
                id="lower-bound-above-the-others",
            ),
            pytest.param(
                held(FP32, 8.0, rate=700.0, engine_bytes=250, generator_limit_per_s=750.0),
                held(INT8, 8.0, rate=600.0, engine_bytes=900, generator_limit_per_s=650.0),
                FP32,
                True,
                id="two-lower-bounds",
            ),
        ],
    )
    def test_lower_bound_loses_against_nothing(self, fp32, int8, winner, tied):
        """Where the generator was the limit, an engine may be as fast as any other."""
        choice = choose(both(), [fp32, int8], THROUGHPUT)

        assert choice.winner == winner
        assert choice.tied == (() if not tied else ({FP32: INT8, INT8: FP32}[winner],))
        assert ("the generator, not the server, is the limit" in choice.reason) is tied

    def test_below_the_ceiling_a_rate_is_written_as_it_is(self):
        """Only what could not be tried is a lower bound."""
        choice = choose(both(), [held(FP32, 9.0, rate=700.0)], THROUGHPUT)

        assert choice.reason.startswith("serves 700 requests/s")


@pytest.mark.parametrize("outcome", [Outcome.INCONCLUSIVE, Outcome.FAILED, Outcome.ERRORED])
def test_unpassed_candidate_cannot_win(outcome):
    """Neither its verdict nor its benchmark may be anything but passed."""
    fast, slow = benchmark(900, candidate=INT8), benchmark(100, candidate=FP32)
    missed = benchmark(900, candidate=INT8, outcome=outcome)

    assert choose(both(outcome=outcome), [slow, fast], THROUGHPUT).winner == FP32
    assert choose(both(), [slow, missed], THROUGHPUT).winner == FP32


class TestFp32MayNotWin:
    def test_a_slower_candidate_wins_and_the_reason_says_what_fp32_serves(self):
        """It stays in sight: what the smaller precision gains, or loses, is read beside it."""
        slow, fast = held(INT8, 5.0, rate=300.0), held(FP32, 4.0)

        choice = choose(both(), [fast, slow], THROUGHPUT, fp32_may_win=False)

        assert choice.winner == INT8
        assert "no other candidate that may win passed" in choice.reason
        assert "onnxruntime-fp32, which may not win, serves ≥ 800 requests/s" in choice.reason

    def test_a_version_whose_other_candidates_failed_is_refused(self):
        """FP32 passed and is not measured: the reason says that it was not its own fault."""
        choice = choose(both(outcome=Outcome.FAILED), [], THROUGHPUT, fp32_may_win=False)

        assert choice.winner is None
        assert choice.reason == (
            "No candidate that may win passed every gate: onnxruntime-fp32 passed but may not win, "
            "onnxruntime-int8 failed."
        )

    def test_an_fp32_that_missed_the_slo_is_told_as_failed(self):
        """Its own failure is not hidden behind the rule."""
        missed = benchmark(10, candidate=FP32, outcome=Outcome.FAILED)

        choice = choose(both(outcome=Outcome.FAILED), [missed], THROUGHPUT, fp32_may_win=False)

        assert "onnxruntime-fp32 failed, onnxruntime-int8 failed" in choice.reason


def test_unbenchmarked_candidate_cannot_win():
    """A gate that did not run is not a gate that passed."""
    choice = choose([verdict()], [], THROUGHPUT)

    assert choice.winner is None
    assert "onnxruntime-int8 inconclusive" in choice.reason


def test_without_candidates_there_is_no_winner():
    """And the reason says so."""
    assert choose([], [], THROUGHPUT).reason == "No candidate passed every gate: there was none."


@pytest.mark.parametrize(
    ("name", "winner"),
    [
        pytest.param("throughput", FP32, id="highest-rate"),
        pytest.param("cost", INT8, id="lowest-cost"),
        pytest.param("latency", INT8, id="lowest-p99"),
    ],
)
def test_the_objective_decides(name, winner):
    """What best means is the policy's to say, and the reason says it."""
    costly = benchmark(500, candidate=FP32, p99_ms=9.0).model_copy(update={"cost_per_million": 2.0})
    cheap = benchmark(400, candidate=INT8, p99_ms=6.0).model_copy(update={"cost_per_million": 1.0})

    assert choose(both(), [costly, cheap], objective(name)).winner == winner


def test_without_a_price_the_tail_decides_on_cost():
    """Nothing is cheaper than anything, so a surely lower p99 wins; a known price beats none."""
    slow, quick = benchmark(candidate=FP32, p99_ms=9.0), benchmark(candidate=INT8, p99_ms=6.0)
    priced = slow.model_copy(update={"cost_per_million": 2.0})

    assert choose(both(), [slow, quick], objective("cost")).winner == INT8
    assert choose(both(), [priced, quick], objective("cost")).winner == FP32


def test_without_verdicts_the_best_served_is_named_with_a_warning():
    """Serving alone says nothing about right answers; nothing passed is said with each outcome."""
    choice = choose_served([benchmark(500), benchmark(300, candidate=FP32)], THROUGHPUT)
    failed = [benchmark(500, outcome=Outcome.FAILED)]

    assert choice.winner == INT8
    assert "Accuracy was not judged" in choice.reason
    assert choose_served(failed, THROUGHPUT).reason.endswith("onnxruntime-int8 failed.")
    assert choose_served([], THROUGHPUT).winner is None
