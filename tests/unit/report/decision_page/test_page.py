"""The page: one file, safe, the same for the same evidence."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from enginegate.evidence import Outcome
from enginegate.report import PageHistory, PageLink, TimelineEntry, decision_page, evidence_part
from tests.fakes.decision_cases import decision_cases, on_cpu, rolled_back
from tests.fakes.evidence import finding, scorecard, verdict
from tests.fakes.qualification import qualification

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("case", decision_cases(), ids=lambda case: case.name)
def test_is_one_small_file(case):
    """Nothing is loaded from anywhere, and a mail takes it."""
    page = decision_page(case.scorecard)

    assert len(page.encode()) < 150 * 1024
    assert not re.search(r"""(?:src|href)=["'](?!#)""", evidence_part(page))
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


@pytest.mark.parametrize("case", decision_cases(), ids=lambda case: case.name)
def test_every_id_is_given_once(case):
    """Links and labels mean one place."""
    ids = re.findall(r'\bid="([^"]+)"', decision_page(case.scorecard))

    assert sorted(ids) == sorted(set(ids))


def test_sections_stand_in_the_order_of_a_decision():
    """The verdict first, the data's digests last."""
    order = ("verdict", "comparison", "forest", "checks", "digests")
    page = evidence_part(decision_page(on_cpu()))

    places = [page.index(f'id="{name}"') for name in order]
    assert places == sorted(places)


def test_later_events_leave_the_evidence_as_it_was():
    """State and timeline change; the part under the digest is the same byte for byte."""
    card = rolled_back().scorecard
    later = PageHistory(
        standing="rolled back",
        sentence="Release 5 was rolled back",
        entries=(TimelineEntry(at=datetime(2030, 1, 1, tzinfo=UTC), what="rolled back"),),
    )
    before, after = decision_page(card), decision_page(card, later)

    assert before != after
    assert evidence_part(before) == evidence_part(after)
    assert len(evidence_part(after)) > 5000
    assert "2030-01-01" in after
    assert "2030" not in evidence_part(after)


def test_other_evidence_is_another_page():
    """The part that stays the same is no constant."""
    cards = (qualification(), qualification(requested_by="grace"))

    assert len({evidence_part(decision_page(card)) for card in cards}) == 2


def test_text_from_elsewhere_stays_text():
    """Names, reasons and comments of models, servers and people add no markup."""
    failed = finding(Outcome.FAILED, gate=HOSTILE, remedy=HOSTILE)
    card = scorecard(
        model_uri=HOSTILE,
        requested_by=HOSTILE,
        reason=HOSTILE,
        environment={HOSTILE: HOSTILE},
        verdicts=(verdict(failed.model_copy(update={"reason": HOSTILE, "scope": HOSTILE})),),
    )
    entry = TimelineEntry(at=card.created_at, what=HOSTILE, who=HOSTILE, why=HOSTILE)
    history = PageHistory(sentence=HOSTILE, entries=(entry,))

    page = decision_page(card, history, [PageLink(HOSTILE, "javascript:alert(1)")])

    assert "<img" not in page
    assert page.count("&lt;img") > 8
    assert 'href="javascript' not in page


def test_needs_no_script_to_show_anything():
    """The only script gives buttons a use that they do not have without it."""
    page = decision_page(on_cpu())
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)

    assert len(scripts) == 1
    assert all("hidden" in button for button in re.findall(r"<button[^>]*>", page))


def test_another_process_makes_the_same_bytes(tmp_path):
    """Neither the order of sets nor the place, the zone or the time of day is on the page."""
    card = tmp_path / "card.json"
    card.write_bytes(on_cpu().pretty_json())
    program = (
        "import sys; from pathlib import Path; from enginegate.evidence import Scorecard; "
        "from enginegate.report import decision_page; "
        "sys.stdout.write(decision_page(Scorecard.read(Path(sys.argv[1]))))"
    )

    made = subprocess.run(
        [sys.executable, "-c", program, str(card)],
        env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert made.stdout == decision_page(on_cpu())
