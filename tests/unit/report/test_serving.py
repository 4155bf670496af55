"""Benchmarks as people see them: table, sentences, page and JSON."""

import json
import re
from html.parser import HTMLParser
from types import MappingProxyType

import pytest

from enginegate.candidate import Candidate
from enginegate.evidence import Outcome, Pattern, Point, Rival, Roofline
from enginegate.measurement import Generator, Percentile
from enginegate.policy.benchmarking import Slo
from enginegate.report import (
    ServingReport,
    accuracies,
    explain,
    serving_figures,
    serving_page,
    serving_report,
    serving_text,
)
from enginegate.report.content import percentile_text
from enginegate.report.serving import (
    generator_sentence,
    serving_rows,
    serving_sentences,
)
from tests.fakes.evidence import INT8, benchmark, finding, scorecard
from tests.fakes.qualification import DIRECT, WAITING, plan, qualification

CARD = qualification()
SLO = Slo(p99_ms=25, min_throughput_per_s=100, confidence=0.99)
REPORT = serving_report(CARD, SLO)


def percentile(quantile, value_ms):
    return Percentile(quantile=quantile, value_ms=value_ms, low_ms=None, high_ms=None, samples=3000)


def rich(**changes):
    """The INT8 benchmark with everything that can be known."""
    fields = {
        "rejected_rate_per_s": 430.0,
        "cut_short": "the budget ended the search: raise [search] budget_s",
        "generator_per_s": 390.0,
        "cost_per_million": 0.1389,
        "currency": "USD",
        "cold_start_s": 1.25,
        "roofline": Roofline(
            batch_size=2, flops=4e6, bytes_moved=1e6, bound="memory", reached=0.31
        ),
        "rival": Rival(
            release=7,
            rate_per_s=400,
            candidate_p99_ms=(6.0, 7.0),
            champion_p99_ms=(9.0, 9.5),
            noise_ms=0.5,
            champion_throughput_per_s=300,
        ),
        "patterns": (
            Pattern(
                name="recorded",
                rate_per_s=400,
                percentiles=(percentile(0.5, 2.0), percentile(0.99, 6.0), percentile(0.999, 8.0)),
                failed_share=0.0,
            ),
            Pattern(
                name="bursts",
                rate_per_s=400,
                percentiles=(percentile(0.5, 3.0), percentile(0.99, 12.0)),
                failed_share=0.0125,
            ),
        ),
        "pareto": (
            Point(
                config=WAITING,
                rate_per_s=400,
                p99=percentile(0.99, 6.25),
                cost_per_million=0.1389,
                confirmed=True,
            ),
        ),
    }
    return CARD.benchmark(INT8).model_copy(update=fields | changes)


def test_terminal(is_golden):
    """Validity first, each configuration's best, the winner, and who sent."""
    assert is_golden(serving_text(REPORT), "report_serving.txt")


def test_lower_bound_says_that_the_generator_is_the_limit():
    """Wherever the rate stands it is marked, and the sentences say who was the limit, and where."""
    limited = rich(generator_limit_per_s=460.0)
    said = " ".join(serving_sentences(limited, SLO))

    assert limited.throughput_text == "≥ 400"
    assert "It serves ≥ 400/s; the generator, not the server, is the limit: 460/s" in said
    assert "the generator, not the server" not in " ".join(serving_sentences(rich(), SLO))


def test_rates_of_larger_requests_are_said_in_rows_too():
    """Requests of one row need no second number."""
    assert rich(rows_per_request=8.0).rows_text == " (3,200 rows/s, 8 a request)"
    assert "≥ 400" not in rich().throughput_text
    assert "400 requests/s (3,200 rows/s, 8 a request)" in " ".join(
        serving_sentences(rich(rows_per_request=8.0), SLO)
    )
    assert rich().rows_text == ""


def test_narrow_terminal_loses_nothing():
    """In 80 columns nothing is cut off."""
    text = serving_text(REPORT, width=80)

    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_chosen_configuration_comes_first():
    """Then those that met the SLO, by rate; without a valid measurement there is no number."""
    first, second = serving_rows(CARD.benchmark(INT8), 25.0)

    assert first.configuration == f"{WAITING} (chosen)"
    assert (first.valid, first.held) == ("3 of 3", "400")
    assert (second.configuration, second.valid) == (str(DIRECT), "0 of 1")
    assert (second.held, second.p99) == ("none", "n/a")


def test_unmet_slo_shows_the_nearest_point():
    """The lowest p99 and its rate, so that people see how far away it is."""
    (row,) = serving_rows(CARD.benchmark(plan("bf16")), 25.0)

    assert row.held == "none"
    assert row.p99 == "31.00 (27.90 to 37.20) at 100/s"


@pytest.mark.parametrize(
    "said",
    [
        "3 of 4 measurements are valid, on Triton 2.51.0, CPU.",
        "The last invalid one: the generator was late.",
        "430/s was not seen to meet the SLO.",
        "A million requests cost 0.139 USD there.",
        "From the load call to the first answer: 1.25 s.",
        "it is memory-bound: 4 operations for each byte",
        "of which it reaches 31%.",
        "In turns with live release 7 at 400/s: p99 6.5 ms against 9.25 ms",
        "which differs from itself by 0.5 ms.",
        "Under a heavier mix (bursts, 400/s): p50 3 ms (+50%) of 3,000, p99 12 ms (+100%)",
        "p99.9 falls on failed requests; 1.25% failed. Shown only, decides nothing.",
        "It may sustain more: the budget ended the search: raise [search] budget_s.",
        "the sender was shown to keep up with 390/s only",
    ],
)
def test_sentences(said):
    """Everything that is known of a candidate is said, each number with its unit."""
    assert said in " ".join(serving_sentences(rich(), SLO))


def test_confirmed_rate_within_the_baseline_has_no_note():
    """Only a confirmed rate above what it was shown to make needs one."""
    said = " ".join(serving_sentences(rich(generator_per_s=1000.0), SLO))

    assert "Against a do-nothing model" not in said


def test_failed_candidate_shows_reason_and_remedy():
    """The findings that are in the way stand where the result would be."""
    failed = rich(
        chosen=None,
        findings=(finding(Outcome.FAILED, gate="p99_ms", remedy="add instances"),),
    )

    assert "p99_ms: failed: 900 >= 200 -> add instances" in serving_sentences(failed, SLO)


def test_the_generators_own_cost_is_told():
    """What a do-nothing model takes, and up to which rate the sender was shown to keep up."""
    measured = CARD.benchmark(INT8).measurements[0]
    known = Generator(
        processes=2, cpu_share=0.4, null_p50_ms=0.8, null_p99_ms=2, trusted_per_s=2500
    )

    said = generator_sentence(measured.model_copy(update={"generator": known}))

    assert "python (2 processes, the busiest 40% of a processor)" in said
    assert "does nothing answers it in 0.8 ms (p50) and 2 ms (p99)" in said
    assert "keep up with 2,500/s" in said


def test_explain_tells_of_roofline_and_patterns():
    """A release manager reads them too."""
    text = explain(scorecard(benchmarks=(rich(),)))

    assert "it is memory-bound" in text
    assert "Under a heavier mix (bursts" in text


def test_json_has_a_schema_version_and_reads_back():
    """Other programs can rely on it."""
    text = REPORT.pretty_json()

    assert json.loads(text)["schema_version"] == 1
    assert ServingReport.model_validate_json(text) == REPORT


def page_of(report, accuracy=MappingProxyType({})):
    return serving_page(report, serving_figures(report, accuracy))


class Page(HTMLParser):
    """Collects what a browser would load or run, and whether tags close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.marks, self.titles = [], 0, {}, 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert not {"src", "href", "onload", "onclick", "onerror"} & set(given)
        self.scripts += tag == "script"
        if "data-m" in given:
            self.marks.setdefault(given["data-m"], []).append(tag)
        if tag not in {"meta", "input"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        given = dict(attrs)
        if "data-m" in given:
            self.marks.setdefault(given["data-m"], []).append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_one_file_that_loads_nothing():
    """No source, no link, one script; a policy forbids the network as well."""
    text = page_of(REPORT)
    page = Page(text)

    assert page.open == []
    assert page.scripts == 1
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)


def test_every_measurement_is_drawn_and_listed():
    """Its points and its line in the table carry the same name, which links them."""
    page = Page(page_of(REPORT))

    expected = {
        f"{b}-{m}"
        for b, found in enumerate(REPORT.candidates)
        for m in range(len(found.measurements))
    }
    assert set(page.marks) == expected
    assert all(sorted(tags) == ["g", "g", "tr"] for tags in page.marks.values())


def test_the_table_has_every_percentile_with_its_count():
    """From how many requests they are stands before them."""
    text = page_of(REPORT)
    (first,) = re.findall(r'<tr class="s0" data-m="0-0">(.*?)</tr>', text)
    columns = re.findall(r"<th>(.*?)</th>", text)
    cells = dict(zip(columns, re.findall(r"<td>(.*?)</td>", first), strict=True))
    measured = REPORT.candidates[0].measurements[0]

    assert int(cells["requests"].replace(",", "")) == measured.percentiles[0].samples
    for quantile in (0.5, 0.9, 0.95, 0.99, 0.999):
        assert cells[f"p{100 * quantile:g}, ms"] == percentile_text(measured.percentile(quantile))


def test_page_keeps_hostile_text_as_text():
    """A server's or a model's words cannot become markup or end the script."""
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    measured = CARD.benchmark(INT8).measurements[0].model_copy(update={"invalid": (hostile,)})
    report = REPORT.model_copy(
        update={
            "model": hostile,
            "reason": hostile,
            "candidates": (rich(server=hostile, currency="<b>$", measurements=(measured,)),),
        }
    )

    page = Page(page_of(report, {INT8: hostile}))

    assert page.scripts == 1


def test_empty_page_renders():
    """No candidate, or none that was measured."""
    empty = REPORT.model_copy(update={"candidates": (), "winner": None})
    unmeasured = REPORT.model_copy(update={"candidates": (benchmark(),)})

    assert Page(page_of(empty)).marks == {}
    assert Page(page_of(unmeasured)).marks == {}


def test_accuracy_stands_beside_a_confirmed_point():
    """Cost and p99 are worth nothing without it; what was not judged is not claimed."""
    known = accuracies(CARD)

    text = page_of(REPORT.model_copy(update={"candidates": (rich(),)}), known)

    assert known[INT8] == "accuracy -0.22 (-0.72 to +0.18) pp"
    assert Candidate.parse("tensorrt-fp16") not in known
    assert f">{known[INT8]}</text>" in text


def test_gpu_memory_is_said_with_what_a_short_target_does():
    """People who approve learn that a promotion may be refused, or cost downtime."""
    plain = rich()
    measured = plain.at_slo
    taking = measured.resources.model_copy(update={"gpu_model_bytes": 2 << 30})
    weighed = measured.model_copy(update={"resources": taking})
    measurements = tuple(weighed if m == measured else m for m in plain.measurements)

    said = " ".join(serving_sentences(rich(measurements=measurements), SLO))

    assert "It takes 2,048 MiB of each GPU" in said
    assert "when_memory_is_short" in said
    assert "MiB of each GPU" not in " ".join(serving_sentences(plain, SLO))
