"""The verdict on one candidate."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import validation
from enginegate.candidate import Unbuilt
from enginegate.evidence import Finding, Outcome
from validation.expectations import Judged
from validation.verdict import (
    for_unbuilt,
    for_undecidable,
    for_unrunnable,
    precision_proof,
    verdict_on,
)


def _judged(outcome, scope="evaluation"):
    finding = Finding(gate="accuracy_loss", scope=scope, outcome=outcome, reason="measured")
    return Judged(scope=scope, findings=(finding,), result_json="{}")


class TestVerdictOn:
    def test_passed(self, engine):
        """Proof, run and every comparison passed: so did the candidate."""
        verdict = verdict_on(engine, [_judged(Outcome.PASSED), _judged(Outcome.PASSED, "shadow")])

        assert verdict.outcome is Outcome.PASSED
        assert verdict.engine_sha256 == engine.file.sha256
        assert [finding.gate for finding in verdict.findings] == [
            "runnable",
            "precision_proof",
            "accuracy_loss",
            "accuracy_loss",
        ]

    @pytest.mark.parametrize("scope", ["evaluation", "shadow"])
    @pytest.mark.parametrize("outcome", [Outcome.INCONCLUSIVE, Outcome.FAILED, Outcome.ERRORED])
    def test_the_worst_wins(self, engine, scope, outcome):
        """One comparison that is worse decides, whichever it is."""
        other = "shadow" if scope == "evaluation" else "evaluation"

        verdict = verdict_on(engine, [_judged(outcome, scope), _judged(Outcome.PASSED, other)])

        assert verdict.outcome is outcome

    @pytest.mark.parametrize(
        "judged",
        [
            [],
            [_judged(Outcome.PASSED, "shadow")],
            [Judged(scope="evaluation", findings=(), result_json="{}")],
        ],
        ids=["nothing", "shadow-only", "no-findings"],
    )
    def test_without_evaluation_never_passed(self, engine, judged):
        """A gate that did not run is not a gate that passed."""
        verdict = verdict_on(engine, judged)

        assert verdict.outcome is Outcome.INCONCLUSIVE

    def test_notes_count(self, engine):
        """A finding about the evidence itself takes part."""
        note = Finding(
            gate="shadow_integrity", scope="shadow", outcome=Outcome.INCONCLUSIVE, reason="differs"
        )

        verdict = verdict_on(engine, [_judged(Outcome.PASSED)], note)

        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert verdict.blocking == (note,)

    def test_unproven_precision_fails(self, engine):
        """An engine that is not what its name says fails, however well it agrees."""
        proof = engine.proof.model_copy(update={"proven": False, "detail": "all layers are fp32"})
        impostor = engine.model_copy(update={"proof": proof})

        verdict = verdict_on(impostor, [_judged(Outcome.PASSED)])

        assert verdict.outcome is Outcome.FAILED
        assert precision_proof(impostor).reason == "all layers are fp32"


def test_unrunnable_is_inconclusive(engine):
    """An engine that nothing here can run is neither passed nor dropped."""
    verdict = for_unrunnable(engine, "it needs an NVIDIA GPU of sm89")

    assert verdict.outcome is Outcome.INCONCLUSIVE
    runnable = verdict.finding("runnable", "engine")
    assert runnable.reason == "no device can run it here: it needs an NVIDIA GPU of sm89"
    assert verdict.finding("precision_proof", "engine").outcome is Outcome.PASSED


def test_unbuilt_is_failed(engine):
    """A candidate that cannot be built failed, with the builder's own words."""
    verdict = for_unbuilt(engine.candidate, "operator Foo is not supported")

    assert verdict.outcome is Outcome.FAILED
    assert verdict.engine_sha256 is None
    assert "operator Foo is not supported" in verdict.findings[0].reason


def test_undecidable_here_is_inconclusive(engine):
    """Like TensorRT without a GPU: this machine or the data is at fault, not the candidate."""
    attempt = Unbuilt(
        candidate=engine.candidate, why="it needs calibration", undecidable=True, remedy="Give it."
    )

    verdict = for_undecidable(attempt)

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.engine_sha256 is None
    assert verdict.findings[0].reason == "cannot be decided here: it needs calibration"
    assert verdict.findings[0].remedy == "Give it."


def test_unbuilt_because_a_tool_broke_is_errored(engine):
    """Whether it can be built was not found out."""
    verdict = for_unbuilt(engine.candidate, "Exception: incomplete", broke=True)

    assert verdict.outcome is Outcome.ERRORED


def test_imports_without_great_expectations():
    """Every module can be imported without Great Expectations and pandas, which are slow."""
    names = sorted(module.name for module in pkgutil.iter_modules(validation.__path__))
    program = (
        "import importlib, sys\n"
        "sys.modules['great_expectations'] = sys.modules['pandas'] = None\n"
        f"for name in {names}: importlib.import_module('validation.' + name)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(validation.__path__[0]).parent,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "expectations" in names
