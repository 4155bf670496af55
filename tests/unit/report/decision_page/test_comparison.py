"""Now against proposed: only what intervals and bounds tell apart is called a change."""

import pytest

from enginegate.decision import replaced_release
from enginegate.evidence import Outcome, Rival, Scorecard
from enginegate.report.decision_page.comparison import comparison_section
from tests.fakes.evidence import FP32, INT8, benchmark, finding, release, scorecard, sha, verdict

_LOSS = {"gate": "accuracy_loss", "unit": "fraction", "limit": 0.01, "relation": "<="}
_FP32 = {"gate": "accuracy_fp32", "unit": "fraction", "limit": 0.1, "relation": ">="}


def judged(candidate, loss: float, half: float = 0.002):
    return verdict(
        finding(value=loss, low=loss - half, high=loss + half, samples=900, **_LOSS),
        finding(value=0.98, low=0.97, high=0.99, samples=900, advisory=True, **_FP32),
        candidate=candidate,
    )


def qualified(loss: float = 0.0, **measured) -> Scorecard:
    """A scorecard whose winner has this loss and this benchmark."""
    found = benchmark().model_copy(update={"engine_bytes": 1 << 20, **measured})
    return scorecard(verdicts=(judged(INT8, loss),), benchmarks=(found,))


def compared(now: Scorecard, proposed: Scorecard, engine: str = "d"):
    """The lines by name, where ``now`` is live with another engine than is proposed."""
    live = release(engine_sha256=sha(engine))
    made = {"replaces": 2, "replaced": replaced_release(live, now)}
    shown = comparison_section(proposed.model_copy(update=made))
    assert shown is not None
    return {line.name: line for line in shown.lines}


def test_intervals_that_overlap_show_no_difference():
    """A loss of 0.1 points within 0.2 either way is no worse than none."""
    line = compared(qualified(0.0), qualified(0.001))["Accuracy"]

    assert line.now == "98.00 % (97.80 to 98.20)"
    assert line.proposed == "97.90 % (97.70 to 98.10)"
    assert (line.effect, line.change) == ("same", "intervals overlap: no difference shown")


def test_a_loss_beyond_the_intervals_is_worse():
    """What is shown is called by its name."""
    line = compared(qualified(0.0), qualified(0.008))["Accuracy"]

    assert line.effect == "worse"
    assert "less" in line.change


def test_another_model_is_compared_with_what_is_not_known_of_its_fp32_too():
    """The interval around FP32 says nothing of how two versions' FP32 differ."""
    live = qualified(0.0).model_copy(update={"model_uri": "models:/digits/9"})
    made = {
        "replaces": 2,
        "replaced": replaced_release(release(model_uri="models:/digits/9"), live),
    }

    def line(loss: float):
        shown = comparison_section(qualified(loss).model_copy(update=made))
        assert shown is not None
        return next(line for line in shown.lines if line.name == "Accuracy")

    assert line(0.008).effect == "same"
    assert line(0.03).effect == "worse"


@pytest.mark.parametrize(
    ("now", "proposed", "effect", "change"),
    [
        pytest.param((400, None), (800, None), "better", "2 times as much", id="known"),
        pytest.param((400, None), (300, None), "worse", "25 % less", id="slower"),
        pytest.param((400, None), (500, 500), "better", "at least 25 % more", id="bound-above"),
        pytest.param((500, 500), (400, None), "worse", "at least 20 % less", id="bound-below"),
        pytest.param((400, 400), (500, None), "unknown", "not told apart", id="live-may-be-more"),
        pytest.param((500, 500), (500, 500), "unknown", "both at the search's", id="both"),
    ],
)
def test_a_rate_at_the_ceiling_is_only_a_bound(now, proposed, effect, change):
    """Nothing is faster or slower than a rate that may be more."""
    cards = [
        qualified(throughput_at_slo_per_s=rate, ceiling_per_s=ceiling)
        for rate, ceiling in (now, proposed)
    ]

    line = compared(*cards)["Rate within the SLO"]

    assert line.effect == effect
    assert line.change.startswith(change)
    assert line.proposed.startswith("≥") is (proposed[1] is not None)


def test_p99_at_another_rate_is_not_compared():
    """A p99 under twice the load says nothing of a p99 under half of it."""
    lines = compared(
        qualified(throughput_at_slo_per_s=400.0), qualified(throughput_at_slo_per_s=800.0)
    )

    assert lines["p99 at that rate"].change == "at another rate"


def test_p99_in_turns_is_compared_beyond_the_noise():
    """Both at one rate, in turns: the difference must exceed what the live one differs by."""

    def with_rival(noise_ms: float):
        rival = Rival(
            release=2,
            rate_per_s=300.0,
            candidate_p99_ms=(6.2, 6.4),
            champion_p99_ms=(9.0, 9.6),
            noise_ms=noise_ms,
            champion_throughput_per_s=400.0,
        )
        return compared(qualified(), qualified(rival=rival))["p99 at 300/s, in turns"]

    assert with_rival(0.5).effect == "better"
    assert with_rival(5.0).effect == "same"


def test_the_very_engine_that_is_live_is_the_same_bytes():
    """By its sha256, whatever version of the model it was made of."""
    lines = compared(qualified(), qualified(), engine="e")

    assert lines["Engine"].change == "same bytes"
    assert lines["Engine size"].change == "the same"


def test_nothing_live_leaves_one_side_empty():
    """A first release is compared with nothing, and the page says so."""
    shown = comparison_section(qualified())

    assert shown is not None
    assert shown.now_title == ""
    assert {line.now for line in shown.lines} == {""}
    assert shown.notes == ("Nothing was live when this was qualified.",)


def test_a_live_release_without_evidence_here_shows_its_promise():
    """Its scorecard may be on another machine: then the manifest speaks."""
    live = replaced_release(release(), None)
    shown = comparison_section(qualified().model_copy(update={"replaces": 2, "replaced": live}))

    assert shown is not None
    assert "p99 20 ms at 50 requests/s" in shown.notes[0]
    assert {line.name: line.now for line in shown.lines}["Accuracy"] == "n/a"


def test_a_scorecard_of_an_earlier_version_says_that_it_lacks_the_numbers():
    """It names the release that it would replace, and holds nothing else of it."""
    shown = comparison_section(qualified().model_copy(update={"replaces": 2}))

    assert shown is not None
    assert "holds no numbers" in shown.notes[0]


def test_without_a_winner_nothing_is_compared():
    card = scorecard(
        winner=None, verdicts=(verdict(finding(Outcome.FAILED), candidate=FP32),), benchmarks=()
    )

    assert comparison_section(card) is None
