"""Which candidates need no benchmark."""

import pytest

from enginegate.evidence import Outcome
from tests.fakes.evidence import FP32, INT8, finding, verdict
from validation.choice import not_benchmarked


def skipped(fp32, int8, *, also_inconclusive=False, baselines=False, fp32_may_win=True, **changes):
    judged = [
        verdict(finding(outcome=fp32), candidate=FP32),
        verdict(finding(outcome=int8, **changes), candidate=INT8),
    ]
    found = not_benchmarked(
        judged,
        also_inconclusive=also_inconclusive,
        baselines=baselines,
        fp32_may_win=fp32_may_win,
    )
    return {candidate.name: why for candidate, why in found.items()}


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.INCONCLUSIVE, Outcome.ERRORED])
def test_candidate_that_cannot_win_is_not_benchmarked(outcome):
    """The reason names the outcome and the gate."""
    found = skipped(Outcome.PASSED, outcome, gate="accuracy_loss")

    assert found == {"onnxruntime-int8": f"verdict {outcome.word} (accuracy_loss)"}


def test_candidate_that_may_win_is_benchmarked():
    """Passed, or inconclusive where a person may accept that; never one that failed."""
    assert skipped(Outcome.PASSED, Outcome.PASSED) == {}
    assert skipped(Outcome.PASSED, Outcome.INCONCLUSIVE, also_inconclusive=True) == {}
    assert skipped(Outcome.PASSED, Outcome.FAILED, also_inconclusive=True)


def test_the_baseline_is_measured_whatever_its_verdict():
    """Speedup is over FP32's throughput; without anybody to compare there is no need for it."""
    assert skipped(Outcome.FAILED, Outcome.PASSED, baselines=True) == {}
    assert set(skipped(Outcome.FAILED, Outcome.PASSED)) == {"onnxruntime-fp32"}
    both = skipped(Outcome.FAILED, Outcome.FAILED, baselines=True)
    assert set(both) == {"onnxruntime-fp32", "onnxruntime-int8"}


def test_fp32_that_may_not_win_is_measured_for_the_others_alone():
    """Its minutes are spent while another candidate of its kind can still win."""
    assert skipped(Outcome.PASSED, Outcome.PASSED, fp32_may_win=False) == {}

    found = skipped(Outcome.PASSED, Outcome.FAILED, fp32_may_win=False)

    assert set(found) == {"onnxruntime-fp32", "onnxruntime-int8"}
    assert found["onnxruntime-fp32"] == "may not win, and nothing is left to compare with it"


def test_unrunnable_candidate_is_reported_by_its_verdict():
    """It was not left out for what it is: nothing could have measured it."""
    missing = finding(Outcome.INCONCLUSIVE, gate="runnable").model_copy(update={"scope": "engine"})
    broken = finding(Outcome.FAILED, gate="build")
    unrunnable = verdict(missing)
    unbuilt = verdict(broken).model_copy(update={"engine_sha256": None})

    assert not not_benchmarked([unrunnable, unbuilt], also_inconclusive=False, baselines=False)


def test_unrunnable_candidates_need_no_baseline():
    """Nobody is compared with FP32 then, so its minutes would be for nothing."""
    missing = finding(Outcome.INCONCLUSIVE, gate="runnable").model_copy(update={"scope": "engine"})
    fp32 = verdict(finding(Outcome.INCONCLUSIVE, gate="accuracy_loss"), candidate=FP32)

    found = not_benchmarked([fp32, verdict(missing)], also_inconclusive=False, baselines=True)

    assert found == {FP32: "verdict inconclusive (accuracy_loss)"}
