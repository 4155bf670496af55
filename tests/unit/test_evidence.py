"""How outcomes combine."""

import itertools
import re

import pytest
from pydantic import ValidationError

from enginegate.errors import InputError
from enginegate.evidence import Finding, Outcome, Scorecard, contradictions, worst
from tests.fakes.evidence import FP32, INT8, finding, scorecard, verdict


def test_no_evidence_is_inconclusive():
    """A verdict without findings has not passed."""
    assert worst(()) is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("pair", list(itertools.combinations(Outcome, 2)))
def test_the_worst_outcome_wins(pair):
    """passed < inconclusive < failed < errored."""
    better, worse = pair

    assert worst((finding(better), finding(worse), finding(better))) is worse


def test_advisory_finding_cannot_change_the_outcome():
    """A gate on trial is shown and counts for nothing, also when it is all there is."""
    failed = finding(Outcome.FAILED, advisory=True)

    assert worst((finding(), failed)) is Outcome.PASSED
    assert worst((failed,)) is Outcome.INCONCLUSIVE


def test_blocking_findings_come_worst_first():
    """Passed and advisory findings are left out."""
    errored, failed = finding(Outcome.ERRORED), finding(Outcome.FAILED)
    judged = verdict(finding(), failed, finding(Outcome.FAILED, advisory=True), errored)

    assert judged.blocking == (errored, failed)


def test_unbenchmarked_candidate_never_passes():
    """A gate that did not run is not a gate that passed."""
    card = scorecard(benchmarks=())

    assert card.verdict(INT8).outcome is Outcome.PASSED
    assert card.outcome(INT8) is Outcome.INCONCLUSIVE
    assert card.outcome(FP32) is Outcome.INCONCLUSIVE


def test_finding_refuses_nan():
    """A number that is not one never enters the evidence."""
    with pytest.raises(ValidationError, match="finite"):
        Finding(gate="g", scope="s", outcome=Outcome.PASSED, reason="r", value=float("nan"))


def test_scorecard_round_trips(tmp_path):
    """Written and read again, it has the same content and digest."""
    card, path = scorecard(), tmp_path / "card.json"
    path.write_bytes(card.pretty_json())

    read = Scorecard.read(path)

    assert read == card
    assert read.digest == card.digest


def test_damaged_scorecard_names_file_and_field(tmp_path):
    """An unknown outcome word is refused with its place."""
    path = tmp_path / "card.json"
    path.write_bytes(scorecard().pretty_json().replace(b'"passed"', b'"fine"'))

    with pytest.raises(InputError, match=r"card.json.*\n.*outcome"):
        Scorecard.read(path)


def judged(**fields):
    """A scorecard whose only finding has these numbers."""
    return scorecard(verdicts=(verdict(finding(**fields)),))


@pytest.mark.parametrize(
    ("card", "said"),
    [
        pytest.param(scorecard(), "", id="as-made"),
        pytest.param(judged(value=3.0, limit=3.0, relation="<="), "", id="at-the-limit"),
        pytest.param(judged(value=3.1, limit=3.0, relation="<="), "not <= 3", id="above"),
        pytest.param(judged(value=2.9, limit=3.0, relation=">="), "not >= 3", id="below"),
        pytest.param(judged(value=2.0, limit=3.0, relation="=="), "not == 3", id="unequal"),
        pytest.param(
            judged(value=3.1, low=2.9, high=3.3, limit=3.0, relation="<="), "", id="may-be-within"
        ),
        pytest.param(
            judged(value=3.1, limit=3.0, relation="<=", gate="input_drift"), "", id="drift"
        ),
        pytest.param(
            scorecard(verdicts=(verdict(finding(Outcome.FAILED)),)),
            "its winner onnxruntime-int8 failed",
            id="winner-failed",
        ),
        pytest.param(scorecard(benchmarks=()), "winner .* inconclusive", id="winner-unmeasured"),
        pytest.param(scorecard(verdicts=(verdict(), verdict())), "judged twice", id="twice"),
        pytest.param(
            scorecard(verdicts=(verdict(engine="f"),)), "with another engine", id="other-engine"
        ),
    ],
)
def test_contradictions_are_listed(card, said):
    """Only what surely does: a gate may decide on an interval's better end."""
    assert re.search(said, "; ".join(contradictions(card)))
    assert bool(said) == bool(tuple(contradictions(card)))
