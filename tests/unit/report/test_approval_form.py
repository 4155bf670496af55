"""The text above the approval form: what it asks, what it compares, and that it fits."""

import re

import pytest

from enginegate.candidate import Candidate
from enginegate.evidence import DeviceEvidence, Outcome
from enginegate.report import ApprovalQuestion, approval_form_text
from enginegate.report.approval_form import _CODE_WIDTH, _code_height, _height
from tests.fakes.decision_cases import clear_win, decision_cases, tie
from tests.fakes.evidence import INT8, WHEN, benchmark, finding, scorecard, verdict

PAGE = "http://127.0.0.1:5000/#/page"
# What Prefect 3.8.8 shows beside three fields at 1440 x 900 without scrolling.
ROOM_PX = 430


def question(**changes):
    return ApprovalQuestion(**({"missing": 1, "until": WHEN, "page_url": PAGE} | changes))


def height_px(text):
    """Of the parts as Prefect's page lays them out."""
    total = 0
    for part in text.split("\n\n"):
        if part.startswith("```"):
            total += _code_height(part.removeprefix("```\n").removesuffix("\n```"))
        else:
            total += sum(_height(line, 54, 4) for line in part.splitlines()) + 8
    return total - 12


@pytest.mark.parametrize("case", decision_cases(), ids=lambda case: case.name)
def test_text_fits_one_screen(case):
    """Whatever the evidence: nothing is cut at the right, and nobody has to scroll."""
    card = case.scorecard
    text = approval_form_text(card, question())

    assert height_px(text) <= ROOM_PX
    code = re.findall(r"```\n(.*?)\n```", text, re.DOTALL)
    assert all(len(line) <= _CODE_WIDTH for block in code for line in block.splitlines())
    assert text.endswith(
        f"[Decision page]({PAGE}) · scorecard {card.digest[:12]} · no answer by 2026-11-20 12:00 "
        "UTC means no"
    )


def test_columns_compare_live_with_proposed():
    """Both sides of every number; the proposed one with its interval."""
    text = approval_form_text(tie().scorecard, question())

    assert text.startswith(
        "**Replace release 1 (digits v2 as onnxruntime-fp32) with digits v2 as onnxruntime-int8?**"
    )
    lines = {line.split("  ")[0]: line for line in text.splitlines() if "  " in line}
    assert re.fullmatch(r" +now: release 1 +proposed", lines[""])
    assert re.fullmatch(r"rate +≥ 800/s +≥ 800/s", lines["rate"])
    assert re.fullmatch(r"p99 +[\d.]+ ms +[\d.]+ \([\d.]+ to [\d.]+\) ms", lines["p99"])
    assert re.fullmatch(r"size +889 KiB +233 KiB", lines["size"])
    assert {"accuracy", "rate", "p99", "size"} <= set(lines)


def test_warnings_come_before_what_is_fine():
    """Worse numbers, then what was not judged; what has no room is counted."""
    text = approval_form_text(clear_win().scorecard, question())

    bullets = [line for line in text.splitlines() if line.startswith("- ")]
    assert bullets[0].startswith("- **Worse than now:** size")
    assert bullets[1] == "- **Not judged:** 7 of 13 traffic slices, too small"
    assert re.fullmatch(r"- and \d more on the decision page", bullets[-1])


def test_page_that_needs_a_command_says_so():
    """A link that nobody serves is worth nothing without what serves it."""
    text = approval_form_text(tie().scorecard, question(start_command="enginegate ui"))

    assert f"[Decision page]({PAGE}) (while `enginegate ui` runs) · scorecard" in text
    assert height_px(text) <= ROOM_PX


def test_first_release_replaces_nothing():
    """One column, and the question says that nothing is live."""
    text = approval_form_text(scorecard(), question())

    assert text.startswith("**Make digits v1 live as onnxruntime-int8? Nothing is live now.**")
    assert "now:" not in text
    assert "- **Not judged:** recorded traffic, as there is none" in text


def test_inconclusive_candidates_are_named_with_what_is_open():
    """Where nothing passed, the form is about what a person may accept."""
    card = scorecard(
        verdicts=(verdict(finding(Outcome.INCONCLUSIVE, gate="accuracy_loss")),),
        benchmarks=(benchmark(),),
        winner=None,
        reason="nothing passed",
    )

    text = approval_form_text(
        card, question(open_candidates=(Candidate.parse("onnxruntime-int8"),))
    )

    assert text.startswith("**Publish an inconclusive candidate of digits v1? None passed")
    assert "- **onnxruntime-int8:** accuracy_loss on evaluation: 900 >= 200" in text


def test_every_kind_of_device_is_in_the_question():
    """The approval is for all of their winners; the question names the first kind's alone."""
    further = (
        DeviceEvidence(
            device="h100",
            environment={},
            verdicts=(verdict(finding()),),
            benchmarks=(benchmark(800.0, p99_ms=4.0),),
            winner=INT8,
            reason="fast",
        ),
        DeviceEvidence(
            device="a10", environment={}, verdicts=(), benchmarks=(), winner=None, reason="slow"
        ),
    )
    text = approval_form_text(scorecard(device="l4", further=further), question())

    assert "- **Also on h100:** onnxruntime-int8, 800/s, p99 4 ms" in text.replace("\\", "")
    assert "- **On a10:** no winner, so its servers would be refused" in text


def test_words_of_others_are_escaped():
    """A comment cannot add a link or a picture to what people decide on."""
    text = approval_form_text(
        scorecard(),
        question(
            missing=1,
            approved_by=("[ada](http://x)",),
            objections=("The approval by <img src=x>: ![it](http://x) is *late*",),
        ),
    )

    assert r"\[ada\](http://x), 1 more approval needed" in text
    assert r"\<img src=x>: !\[it\](http://x) is \*late\*" in text
