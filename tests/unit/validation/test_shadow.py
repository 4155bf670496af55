"""When a shadow sample can be evidence."""

import numpy as np
import pytest

from enginegate.errors import DataError
from enginegate.evidence import Outcome
from validation.agreement import compare
from validation.shadow import judge_noise, judge_recording


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
        """A recording of other outputs is of another model."""
        with pytest.raises(DataError, match="another model"):
            judge_recording(recorded, outputs, data_of(50))


class TestJudgeNoise:
    def test_reproducible_reference(self, outputs, data_of, gates):
        """A reference that reproduces itself has no noise."""
        noise = compare(outputs, outputs, data_of(50), "shadow")

        finding = judge_noise(noise, gates)

        assert finding.outcome is Outcome.PASSED
        assert (finding.value, finding.limit) == (0.0, gates.max_abs_error)

    @pytest.mark.parametrize("change", [2.0, np.nan])
    def test_limit_below_the_noise(self, outputs, data_of, gates, change):
        """A limit that FP32 itself does not hold can fail no candidate."""
        again = {"logits": outputs["logits"].copy()}
        again["logits"][0, 0] += change

        finding = judge_noise(compare(outputs, again, data_of(50), "shadow"), gates)

        assert finding.outcome is Outcome.INCONCLUSIVE
        assert "max_abs_error" in finding.remedy

    def test_no_samples(self, data_of, gates):
        """Noise of nothing is unknown."""
        empty = {"y": np.zeros((0, 3), np.float32)}

        finding = judge_noise(compare(empty, empty, data_of(0), "shadow"), gates)

        assert finding.outcome is Outcome.INCONCLUSIVE
