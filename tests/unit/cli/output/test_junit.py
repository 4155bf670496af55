"""Findings as a CI system reads them."""

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.cli.output.junit import write_scorecard_junit, write_watch_junit
from enginegate.errors import InputError
from enginegate.evidence import Outcome
from enginegate.workspace import Workspace
from tests.fakes.evidence import FP32, INT8, finding, scorecard, verdict
from tests.fakes.qualification import qualification
from tests.fakes.watch_checks import watch_check

WORDS = {Failure: "failed", Error: "errored", Skipped: "skipped"}


def read(path):
    """Each suite's cases by name, with how they ended; and the file itself."""
    found = JUnitXml.fromfile(str(path))
    suites = {
        suite.name: {
            case.name: WORDS[type(case.result[0])] if case.result else "passed" for case in suite
        }
        for suite in found
    }
    return found, suites


def test_each_candidate_is_a_suite_of_its_findings(tmp_path):
    """Counts, and the verdict of the whole beside them."""
    card = qualification()

    write_scorecard_junit(card, tmp_path / "findings.xml")

    found, suites = read(tmp_path / "findings.xml")
    assert list(suites) == ["scorecard", *(v.candidate.name for v in card.verdicts)]
    assert suites["scorecard"] == {"winner (scorecard)": "passed"}
    assert suites["tensorrt-int8"]["accuracy_loss (evaluation)"] == "failed"
    assert suites["tensorrt-fp16"] == {"runnable (engine)": "skipped"}
    assert found.tests == sum(map(len, suites.values()))
    assert found.failures == sum(c == "failed" for s in suites.values() for c in s.values())
    assert found.skipped == sum(c == "skipped" for s in suites.values() for c in s.values())


def test_without_a_winner_the_build_is_red(tmp_path):
    """A failed candidate is a failure; one that could not be found out is an error."""
    wrong = verdict(finding(Outcome.FAILED, gate="accuracy_loss"), candidate=INT8)
    broke = verdict(finding(Outcome.ERRORED, gate="build"), candidate=FP32)
    card = scorecard(verdicts=(wrong, broke), benchmarks=(), winner=None, reason="nothing passed")

    write_scorecard_junit(card, tmp_path / "findings.xml")

    found, suites = read(tmp_path / "findings.xml")
    assert suites["scorecard"] == {"winner (scorecard)": "errored"}
    assert suites[INT8.name] == {"accuracy_loss (evaluation)": "failed"}
    assert suites[FP32.name] == {"build (evaluation)": "errored"}
    assert (found.failures, found.errors) == (1, 2)


def test_advisory_finding_turns_no_build_red(tmp_path):
    told = finding(Outcome.FAILED, gate="headroom", advisory=True)
    card = scorecard(verdicts=(verdict(finding(), told),), benchmarks=())

    write_scorecard_junit(card, tmp_path / "findings.xml")

    found, suites = read(tmp_path / "findings.xml")
    assert suites[INT8.name]["headroom (evaluation)"] == "skipped"
    assert found.failures == 0


def test_words_of_strangers_stay_text(tmp_path):
    """Markup and control characters in a model's words break no parser."""
    nasty = finding(Outcome.FAILED).model_copy(update={"reason": "<!--\x1b[2J\0 ]]> & \ufffe"})
    card = scorecard(verdicts=(verdict(nasty),), benchmarks=())

    write_scorecard_junit(card, tmp_path / "findings.xml")

    case = next(
        case for suite in read(tmp_path / "findings.xml")[0] for case in suite if case.result
    )
    assert case.result[0].message == "<!--�[2J� ]]> & �"


def test_check_of_what_is_live_is_a_suite(tmp_path):
    check = watch_check(finding(Outcome.INCONCLUSIVE, gate="p99"), number=7)
    broken = finding(Outcome.FAILED, gate="promise_kept")

    write_watch_junit([check], tmp_path / "watch.xml", model="digits", ended=broken)

    assert read(tmp_path / "watch.xml")[1] == {
        "watch": {"promise_kept (evaluation)": "failed"},
        "check 7 of release 2": {"p99 (evaluation)": "skipped"},
    }


def test_nothing_live_is_no_passed_test(tmp_path):
    write_watch_junit([], tmp_path / "watch.xml", model="digits")

    assert read(tmp_path / "watch.xml")[1] == {"nothing live": {"evidence": "skipped"}}


def test_explain_writes_it_again(tmp_path, monkeypatch):
    """Of a scorecard that was made elsewhere, or by a run whose file was lost."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    card = qualification()
    Workspace.here().save_scorecard(card)

    done = CliRunner().invoke(app, ["explain", card.digest, "--junit", str(tmp_path / "f.xml")])

    assert done.exit_code == 0, done.output
    assert "scorecard" in read(tmp_path / "f.xml")[1]


def test_file_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "taken").mkdir()

    with pytest.raises(InputError, match="--junit"):
        write_scorecard_junit(scorecard(), tmp_path / "taken")
