"""When a shadow sample can be evidence."""

import numpy as np
import pytest

from enginegate.evidence import Outcome
from validation.agreement import compare
from validation.shadow import judge_noise, judge_recording, judge_version, not_replayable


@pytest.fixture
def outputs():
    return {"logits": np.random.default_rng(0).normal(size=(50, 10)).astype(np.float32)}


class TestJudgeRecording:
    def test_six_digits_agree(self, outputs, data_of):
        """Outputs written with six significant digits are recognised as the reference's."""
        text = [[f"{value:.6g}" for value in row] for row in outputs["logits"]]
        recorded = {"logits": np.array(text, dtype=np.float32)}

        finding = judge_recording(recorded, outputs, data_of(50))

        assert finding.outcome is Outcome.PASSED
        assert (finding.gate, finding.scope) == ("shadow_integrity", "shadow")
        assert 0.0 < finding.value < 1e-5

    @pytest.mark.parametrize("change", [0.01, np.nan, np.inf])
    def test_another_model_is_noticed(self, outputs, data_of, change):
        """One sample of another model makes the whole sample no evidence."""
        recorded = {"logits": outputs["logits"].copy()}
        recorded["logits"][7, 3] += change

        finding = judge_recording(recorded, outputs, data_of(50))

        assert finding.outcome is Outcome.INCONCLUSIVE
        assert "1 of 50 samples differ" in finding.reason
        assert "Record the sample again" in finding.remedy

    def test_outputs_of_zero(self, data_of):
        """A sample whose outputs are all zero agrees with zeros only."""
        zeros = {"y": np.zeros((2, 3), np.float32)}

        assert judge_recording(zeros, zeros, data_of(2)).outcome is Outcome.PASSED
        other = {"y": np.array([[0, 0, 0], [0, 0, 1e-9]], np.float32)}
        assert judge_recording(other, zeros, data_of(2)).outcome is Outcome.INCONCLUSIVE

    def test_no_samples(self, data_of):
        """An empty recording is no evidence."""
        empty = {"y": np.zeros((0, 3), np.float32)}

        assert judge_recording(empty, empty, data_of(0)).outcome is Outcome.INCONCLUSIVE

    @pytest.mark.parametrize(
        "recorded", [{}, {"logits": np.zeros((50, 9), np.float32)}], ids=["missing", "other-shape"]
    )
    def test_other_outputs(self, outputs, data_of, recorded):
        """A recording of other outputs is of another model: a finding, not an error."""
        finding = judge_recording(recorded, outputs, data_of(50))

        assert finding.outcome is Outcome.INCONCLUSIVE
        assert "another model" in finding.reason

    def test_live_release_may_differ_from_the_reference(self, outputs, data_of):
        """Of a live release the difference is shown, and holds nothing up."""
        other = {"logits": outputs["logits"] + 1}

        finding = judge_recording(other, outputs, data_of(50), advisory=True)

        assert finding.outcome is Outcome.INCONCLUSIVE
        assert finding.advisory


class TestJudgeVersion:
    @pytest.mark.parametrize(
        ("model", "rows", "version", "outcome", "advisory"),
        [
            pytest.param("m", {3: 50}, None, Outcome.PASSED, True, id="one-live-version"),
            pytest.param("m", {3: 40, 4: 10}, None, Outcome.INCONCLUSIVE, True, id="two-live"),
            pytest.param("m", {0: 50}, None, Outcome.PASSED, True, id="not-reported"),
            pytest.param("m", {1: 50}, 1, Outcome.PASSED, False, id="the-one-wanted"),
            pytest.param("m", {2: 50}, 1, Outcome.INCONCLUSIVE, False, id="another-version"),
            pytest.param("other", {1: 50}, None, Outcome.INCONCLUSIVE, False, id="another-model"),
            pytest.param("m", {}, None, Outcome.INCONCLUSIVE, True, id="nothing"),
        ],
    )
    def test_sample_of_another_version_is_no_evidence(
        self, model, rows, version, outcome, advisory
    ):
        """Another model or version than wanted is no evidence; several live ones are a note."""
        finding = judge_version(model, rows, wanted="m", version=version)

        assert finding.outcome is outcome
        assert finding.advisory is advisory
        assert bool(finding.remedy) is (outcome is not Outcome.PASSED)


def test_redacted_sample_is_inconclusive():
    """Without its inputs a sample cannot be replayed, and says which are missing."""
    finding = not_replayable("a recording", ("user",), 50)

    assert finding.outcome is Outcome.INCONCLUSIVE
    assert not finding.advisory
    assert "without user" in finding.reason


class TestJudgeNoise:
    def test_reproducible_reference(self, outputs, data_of, gates):
        """A reference that reproduces itself has no noise."""
        noise = compare(outputs, outputs, data_of(50), "shadow")

        finding = judge_noise(noise, gates)

        assert finding.outcome is Outcome.PASSED
        assert (finding.value, finding.limit) == (0.0, gates.max_abs_error)

    @pytest.mark.parametrize("change", [2.0, np.nan])
    def test_limit_below_the_noise(self, outputs, data_of, gates, change):
        """A limit that FP32 itself does not meet can fail no candidate."""
        again = {"logits": outputs["logits"].copy()}
        again["logits"][0, 0] += change

        finding = judge_noise(compare(outputs, again, data_of(50), "shadow"), gates)

        assert finding.outcome is Outcome.INCONCLUSIVE
        assert "max_abs_error" in finding.remedy

    def test_without_a_limit(self, outputs, data_of, gates):
        """Where no absolute error is limited, finite noise is shown and passes."""
        again = {"logits": outputs["logits"] + 0.5}
        noise = compare(outputs, again, data_of(50), "shadow")

        finding = judge_noise(noise, gates.model_copy(update={"max_abs_error": None}))

        assert finding.outcome is Outcome.PASSED
        assert "no limit" in finding.reason

    def test_no_samples(self, data_of, gates):
        """Noise of nothing is unknown."""
        empty = {"y": np.zeros((0, 3), np.float32)}

        finding = judge_noise(compare(empty, empty, data_of(0), "shadow"), gates)

        assert finding.outcome is Outcome.INCONCLUSIVE
