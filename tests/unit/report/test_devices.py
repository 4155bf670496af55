"""Kinds of device side by side: in tables, in sentences and on the decision page."""

import pytest

from enginegate.candidate import Candidate
from enginegate.cli.evidence import seen_on
from enginegate.errors import InputError
from enginegate.evidence import DeviceEvidence, Outcome, contradictions
from enginegate.report import decision_page, scorecard_markdown, scorecard_text
from enginegate.report.devices import device_sentences, device_table
from tests.fakes.evidence import FP32, INT8, benchmark, finding, scorecard, verdict

# Whoever writes reasons may be another team's builder.
_HOSTILE = "slow <script>alert(1)</script>"


@pytest.fixture
def card():
    """Both candidates on an L4; int8 alone, which failed, on an H100."""
    h100 = DeviceEvidence(
        device="h100",
        environment={"gpu": "NVIDIA H100"},
        verdicts=(verdict(finding(Outcome.FAILED), candidate=INT8),),
        benchmarks=(),
        winner=None,
        reason=_HOSTILE,
    )
    verdicts = (verdict(finding(), candidate=INT8), verdict(finding(), candidate=FP32))
    return scorecard(
        device="l4", further=(h100,), verdicts=verdicts, benchmarks=(benchmark(),), winner=INT8
    )


def test_table_has_a_row_a_candidate_and_a_column_a_kind(card):
    table = device_table(card)

    assert table.columns == ("candidate", "l4", "h100")
    rows = {name: [cell.text.split(",")[0] for cell in cells] for name, cells in table.rows}
    assert rows[INT8.name] == ["passed", "failed"]
    assert rows[FP32.name][1] == "not there"
    assert dict(table.rows)[INT8.name][0].is_winner


def test_every_kind_has_the_sizes_of_its_engines(card):
    """Each kind's own, as its benchmark counted them: a plan for another GPU has other bytes."""
    measured = benchmark().model_copy(update={"engine_bytes": 3 * 2**20})
    (h100,) = card.further
    card = card.model_copy(
        update={"further": (h100.model_copy(update={"benchmarks": (measured,)}),)}
    )

    for text in (scorecard_text(card, width=200), scorecard_markdown(card)):
        assert "3.0 MiB" in text


def test_kind_without_a_winner_says_what_follows(card):
    assert "h100: no winner, so a server of that kind would be refused." in "".join(
        device_sentences(card)
    )


def test_every_form_shows_the_kinds(card):
    """What others wrote is text on each."""
    page = decision_page(card)

    assert "Kinds of device" in page
    assert "<script>alert" not in page
    assert "explain" in page
    for text in (scorecard_text(card), scorecard_markdown(card)):
        assert "h100" in text


def test_scorecard_of_one_machine_shows_none():
    card = scorecard()

    assert device_table(card).devices == ()
    assert device_sentences(card) == ()
    assert 'id="devices"' not in decision_page(card)
    assert card.by_device == (card,)


def test_evidence_of_another_kind_is_a_scorecard_of_its_own(card):
    """For what explains and shows scorecards; a kind that it has not is refused by name."""
    seen = seen_on(card, "h100")

    assert (seen.device, seen.further, seen.winner) == ("h100", (), None)
    assert seen_on(card, None) is card
    with pytest.raises(InputError, match="not about 't4'; its kinds of device: l4, h100"):
        seen_on(card, "t4")


def test_contradiction_on_any_kind_is_found(card):
    """A winner that failed, and a kind that is there twice."""
    (h100,) = card.further
    lying = h100.model_copy(update={"winner": INT8})
    nobody = h100.model_copy(update={"winner": Candidate.parse("tensorrt-fp8")})

    assert not list(contradictions(card))
    for each in (lying, nobody):
        wrong = card.model_copy(update={"further": (each,)})
        assert any(said.endswith("(on h100)") for said in contradictions(wrong))
    twice = card.model_copy(update={"further": (h100, h100)})
    assert list(contradictions(twice)) == ["a kind of device is judged twice"]
