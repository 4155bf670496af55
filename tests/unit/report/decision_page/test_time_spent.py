"""Where the time of a request goes."""

import pytest

from enginegate.measurement import StageSplit
from enginegate.report.decision_page.time_spent import STAGES, stage_times, time_spent_section
from tests.fakes.evidence import INT8, benchmark, scorecard
from tests.fakes.qualification import qualification


def split(**times):
    fields = {
        "queue_ms": 1.0,
        "compute_input_ms": 0.5,
        "compute_infer_ms": 2.0,
        "compute_output_ms": 0.5,
        "mean_batch_size": 2.0,
    }
    return StageSplit(**(fields | times))


def test_stages_come_in_the_order_of_a_request():
    """Each with its time, its share of the whole and its fill."""
    found = stage_times(split(client_ms=1.0))

    assert [stage.name for stage in found] == list(STAGES)
    assert [stage.time_ms for stage in found] == [1.0, 0.5, 2.0, 0.5, 1.0]
    assert [stage.share for stage in found] == pytest.approx([0.2, 0.1, 0.4, 0.1, 0.2])
    assert [stage.number for stage in found] == [0, 1, 2, 3, 4]


def test_an_unknown_stage_is_not_nothing():
    """Where clients' own mean is not known, the column says n/a."""
    row = time_spent_section(qualification()).rows[0]

    assert row.candidate == "onnxruntime-int8"
    assert row.at == "400/s"
    assert row.total == "1.95"
    assert row.times == ("0.5 (26%)", "0.1 (5%)", "1.25 (64%)", "0.1 (5%)", "n/a")


def test_sentences_are_about_the_proposed_candidate():
    """What p99 is, against the SLO, and who sent the load."""
    measured = qualification().benchmark(INT8)
    judged = measured.findings[0].model_copy(update={"limit": 25.0})
    card = qualification(benchmarks=(measured.model_copy(update={"findings": (judged,)}),))

    first, *_, last = time_spent_section(card).sentences

    assert first.startswith("p99 is 6.25 ms, within the limit of 25 ms. 64% of the mean")
    assert last.startswith("Sent by python (1 process")


def test_nothing_counted_is_nothing_shown():
    """A benchmark without stages has no section."""
    assert time_spent_section(scorecard(benchmarks=(benchmark(),))) is None
