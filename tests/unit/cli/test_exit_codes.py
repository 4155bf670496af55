"""The exit status by which a CI system or a scheduler decides."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from junitparser import JUnitXml
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import ServerError
from enginegate.evidence import Outcome
from enginegate.watch.log import PromiseBrokenError, WatchResult
from tests.fakes.evidence import FP32, INT8, finding, scorecard, verdict
from tests.fakes.watch_checks import watch_check

_DIGITS = str(Path(__file__).parents[3] / "policies" / "digits.toml")
PASSED, FAILED = Outcome.PASSED, Outcome.FAILED
INCONCLUSIVE, ERRORED = Outcome.INCONCLUSIVE, Outcome.ERRORED


@pytest.fixture
def flows(monkeypatch, tmp_path):
    """Flows that end as a test says, without Prefect."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path))
    here = SimpleNamespace()
    for module in ("app", "live.watch"):
        monkeypatch.setattr(f"enginegate.cli.{module}.pipeline_module", lambda _: here)
    return here


@pytest.mark.parametrize(
    ("won", "other", "options", "code"),
    [
        (True, PASSED, [], 0),
        (True, FAILED, [], 0),
        (True, FAILED, ["--strict"], 3),
        (True, PASSED, ["--strict"], 0),
        (True, INCONCLUSIVE, ["--strict"], 0),
        (False, FAILED, [], 3),
        (False, INCONCLUSIVE, [], 4),
        (False, ERRORED, [], 5),
        (False, FAILED, ["--strict"], 3),
    ],
)
def test_qualify_ends_with_the_winner_or_the_worst_candidate(flows, won, other, options, code):
    """``--strict`` alone minds a failed candidate beside a winner."""
    verdicts = (verdict(candidate=FP32), verdict(finding(other), candidate=INT8))
    card = scorecard(verdicts=verdicts, winner=FP32 if won else None, benchmarks=())
    flows.qualify = lambda *_: card

    done = CliRunner().invoke(app, ["qualify", _DIGITS, *options])

    assert done.exit_code == code, done.output


@pytest.mark.parametrize(
    ("outcomes", "options", "code"),
    [
        ([PASSED], ["--once"], 0),
        ([INCONCLUSIVE], ["--once"], 4),
        ([], ["--once"], 4),
        ([INCONCLUSIVE], [], 0),
    ],
)
def test_one_check_decides_how_the_watch_ends(flows, outcomes, options, code):
    """No evidence is inconclusive; a watch that goes on has more checks to come."""
    checks = tuple(watch_check(finding(outcome)) for outcome in outcomes)
    flows.watch = lambda *_: WatchResult((), checks)

    done = CliRunner().invoke(app, ["watch", _DIGITS, *options])

    assert done.exit_code == code, done.output


@pytest.mark.parametrize(
    ("error", "code", "counted"),
    [
        (PromiseBrokenError("p99 broke", WatchResult((), (watch_check(finding(FAILED)),))), 3, 2),
        (ServerError("no answer"), 5, 1),
    ],
)
def test_red_watch_is_red_in_its_junit_file_too(flows, tmp_path, error, code, counted):
    """A broken promise is a failure, and what could not be measured an error."""

    def watch(*_):
        raise error

    flows.watch = watch

    done = CliRunner().invoke(app, ["watch", _DIGITS, "--once", "--junit", str(tmp_path / "w.xml")])

    assert done.exception.exit_code == code
    found = JUnitXml.fromfile(str(tmp_path / "w.xml"))
    assert found.failures + found.errors == counted
