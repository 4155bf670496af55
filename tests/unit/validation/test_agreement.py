"""Arrays in, numbers out."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.stats import entropy

from enginegate.errors import DataError
from validation.agreement import (
    NO_CLASS,
    OutputComparison,
    compare,
    concatenate_comparisons,
    kl_divergence,
)
from validation.outputs import OutputSpec

SHAPE = array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=5)
LOGITS = arrays(np.float32, SHAPE, elements=st.floats(-(2.0**99), 2.0**99, width=32))


def _random(samples, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    reference = rng.normal(size=(samples, 4)).astype(np.float32)
    return reference, reference + rng.normal(scale=noise, size=(samples, 4)).astype(np.float32)


class TestKlDivergence:
    @given(reference=LOGITS, seed=st.integers(0, 9))
    def test_never_negative(self, reference, seed):
        """Gibbs' inequality holds for every pair of logit arrays, and no pair gives NaN."""
        candidate = np.random.default_rng(seed).permuted(reference, axis=1)

        kl = kl_divergence(reference, candidate)

        assert (kl >= 0.0).all()

    @given(logits=LOGITS)
    def test_zero_for_itself(self, logits):
        """An array does not diverge from itself, whatever its range."""
        assert (kl_divergence(logits, logits) == 0.0).all()

    def test_equals_scipy(self):
        """The value is that of SciPy's relative entropy of the two distributions, in nats."""
        reference, candidate = _random(50)
        p, q = (np.exp(x.astype(float)) for x in (reference, candidate))

        kl = kl_divergence(reference, candidate)

        assert kl == pytest.approx(entropy(p, q, axis=1), rel=1e-6)

    def test_shift_invariant(self):
        """Adding a constant to a row of logits changes no probability."""
        reference, candidate = _random(20)

        kl = kl_divergence(reference, candidate.astype(np.float64) + 1e4)

        assert kl == pytest.approx(kl_divergence(reference, candidate), abs=1e-9)

    def test_fp16_logits_do_not_overflow(self):
        """Logits near FP16's end are compared in float64."""
        logits = np.array([[65504.0, 0.0]], np.float16)

        assert kl_divergence(logits, logits[:, ::-1]) == pytest.approx([65504.0])


class TestCompare:
    def test_known_example(self, data_of):
        """Each column holds what its name says."""
        reference = np.array([[2, 1, 0], [0, 2, 1], [1, 0, 2]], np.float32)
        candidate = np.array([[2, 1, 0], [0, 1, 2], [1, 0, 2.5]], np.float32)
        data = data_of(3, labels=[0, 1, 0], kind=["a", "a", "b"])

        found = compare({"logits": reference}, {"logits": candidate}, data, "evaluation")

        assert len(found) == 3
        assert found.top1_reference.tolist() == [0, 1, 2]
        assert found.top1_candidate.tolist() == [0, 2, 2]
        assert found.top1_match.tolist() == [True, False, True]
        assert found.correct_reference.tolist() == [True, True, False]
        assert found.correct_candidate.tolist() == [True, False, False]
        assert found.accuracy_delta.tolist() == [0, -1, 0]
        assert found.max_abs_error.tolist() == [0.0, 1.0, 0.5]
        assert found.kl_nats[0] == 0.0
        assert (found.kl_nats[1:] > 0.0).all()
        assert not found.nonfinite.any()

    def test_without_labels(self, data_of):
        """Agreement needs no labels; correctness is absent rather than invented."""
        reference, candidate = _random(5)

        found = compare({"logits": reference}, {"logits": candidate}, data_of(5), "shadow")

        assert found.correct_candidate is None
        assert found.accuracy_delta is None
        assert "accuracy_delta" not in found.frame()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("output", ["logits", "features"])
    def test_nonfinite_row_is_the_worst(self, data_of, bad, output):
        """NaN or Inf in any output makes its sample as bad as can be, and no other sample."""
        logits, features = _random(3)[0], np.zeros((3, 2, 2), np.float32)
        reference = {"logits": logits, "features": features}
        candidate = {name: array.copy() for name, array in reference.items()}
        candidate[output][1].flat[0] = bad
        data = data_of(3, labels=logits.argmax(axis=1))

        found = compare(reference, candidate, data, "evaluation")

        assert found.nonfinite.tolist() == [False, True, False]
        assert found.top1_candidate[1] == NO_CLASS
        assert found.correct_candidate.tolist() == [True, False, True]
        assert found.kl_nats.tolist() == [0.0, np.inf, 0.0]
        assert found.max_abs_error.tolist() == [0.0, np.inf, 0.0]

    def test_other_outputs_count_in_the_error(self, data_of):
        """The largest error is taken over all outputs, whole numbers included."""
        logits, _ = _random(2)
        reference = {"logits": logits, "length": np.array([3, 4], np.int32)}
        candidate = {"logits": logits, "length": np.array([3, 9], np.int32)}

        found = compare(reference, candidate, data_of(2), "shadow")

        assert found.max_abs_error.tolist() == [0.0, 5.0]

    def test_logits_by_name(self, data_of):
        """The output that holds the logits can be named; else it is the first."""
        first, second = _random(4)
        outputs = {"first": first, "second": second}

        found = compare(outputs, outputs, data_of(4), "shadow", asked=OutputSpec(output="second"))

        assert found.top1_reference.tolist() == second.argmax(axis=1).tolist()

    def test_swapped_outputs_disagree(self, data_of):
        """Two heads of one shape in the wrong order show in agreement and error."""
        left, right = _random(200, noise=3.0)
        reference, candidate = {"a": left, "b": right}, {"a": right, "b": left}

        found = compare(reference, candidate, data_of(200), "shadow")

        assert found.top1_match.mean() < 0.6
        assert found.max_abs_error.min() > 0.5

    def test_constant_candidate(self, data_of):
        """A candidate that always gives the same logits is right only by chance."""
        logits, _ = _random(400)
        data = data_of(400, labels=logits.argmax(axis=1))

        found = compare({"y": logits}, {"y": np.zeros_like(logits)}, data, "evaluation")

        assert 0.1 < found.correct_candidate.mean() < 0.4
        assert not found.nonfinite.any()

    def test_no_samples(self, data_of):
        """No samples give an empty comparison, not an error."""
        empty = {"logits": np.zeros((0, 4), np.float32)}

        found = compare(empty, empty, data_of(0, labels=[]), "evaluation")

        assert len(found) == 0
        assert found.kl_nats.shape == (0,)

    @pytest.mark.parametrize(
        ("candidate", "message"),
        [
            pytest.param({"probs": np.zeros((3, 4), np.float32)}, "outputs", id="other-name"),
            pytest.param({"logits": np.zeros((3, 5), np.float32)}, r"\[3, 5\]", id="class-count"),
            pytest.param({"logits": np.zeros((3, 4), np.float16)}, "float16", id="dtype"),
            pytest.param({"logits": np.zeros((2, 4), np.float32)}, r"\[2, 4\]", id="batch"),
            pytest.param({}, "outputs", id="nothing"),
        ],
    )
    def test_form_must_match(self, data_of, candidate, message):
        """Outputs of another name, type or shape cannot be compared, and the message says which."""
        reference = {"logits": np.ones((3, 4), np.float32)}

        with pytest.raises(DataError, match=message):
            compare(reference, candidate, data_of(3), "evaluation")

    @pytest.mark.parametrize(
        ("outputs", "labels", "message"),
        [
            pytest.param(np.ones((2, 4), np.float32), None, "3 samples", id="not-one-row-a-sample"),
            pytest.param(np.ones((3, 1), np.float32), None, "logits", id="one-class"),
            pytest.param(np.ones(3, np.float32), None, "logits", id="no-class-axis"),
            pytest.param(np.ones((3, 4), np.int64), None, "logits", id="integer-logits"),
            pytest.param(np.array([["a"]] * 3), None, "only numbers", id="text"),
            pytest.param(np.ones((3, 4), np.float32), [0, 1, 4], "labels run", id="label-too-high"),
            pytest.param(np.ones((3, 4), np.float32), [0, -1, 3], "labels run", id="label-too-low"),
            pytest.param(
                np.array([[1, 2], [np.nan, 1], [1, 1]], np.float32), None, "s1", id="nan-reference"
            ),
        ],
    )
    def test_bad_reference_or_data(self, data_of, outputs, labels, message):
        """A reference or data that nothing can be compared with is refused with the evidence."""
        with pytest.raises(DataError, match=message):
            compare({"y": outputs}, {"y": outputs}, data_of(3, labels=labels), "evaluation")

    def test_slice_names_are_checked(self, data_of):
        """A slice column whose name could not be used in a row condition is refused."""
        logits, _ = _random(2)
        data = data_of(2, **{"a`b": ["x", "y"]})

        with pytest.raises(DataError, match="a`b"):
            compare({"y": logits}, {"y": logits}, data, "evaluation")


class TestConcatenate:
    @pytest.mark.parametrize("labelled", [True, False])
    def test_pieces_equal_the_whole(self, data_of, labelled):
        """Comparing in pieces and joining gives what comparing at once gives."""
        reference, candidate = _random(10)
        data = data_of(10, labels=[0] * 10 if labelled else None, kind=list("aabbccddee"))
        whole = compare({"y": reference}, {"y": candidate}, data, "evaluation")

        joined = concatenate_comparisons(
            [_rows(whole, 0, 3), _rows(whole, 3, 4), _rows(whole, 4, 10)]
        )

        assert joined.frame().equals(whole.frame())
        assert (joined.accuracy_delta is None) is (whole.accuracy_delta is None)

    def test_unlike_pieces(self, comparison_of):
        """Pieces of different scopes, slices or labelling do not make one comparison."""
        one = comparison_of([False, True])
        others = [
            replace(one, scope="shadow"),
            comparison_of([False, True], kind=["a", "b"]),
            comparison_of([False, True], labelled=False),
        ]

        for other in others:
            with pytest.raises(DataError, match="one scope"):
                concatenate_comparisons([one, other])

    def test_nothing(self):
        """No pieces make no comparison."""
        with pytest.raises(DataError, match="0 were given"):
            concatenate_comparisons([])


def test_frame_has_one_row_a_sample(comparison_of):
    """The table has the measurements, and slice columns under names of their own."""
    frame = comparison_of([False, True], kl_nats=["low", "high"]).frame()

    assert frame["sample_id"].tolist() == ["s0", "s1"]
    assert frame["accuracy_delta"].tolist() == [0, -1]
    assert frame["slice.kl_nats"].tolist() == ["low", "high"]
    assert frame["kl_nats"].tolist() == [1e-4, 1.0]


def _rows(whole: OutputComparison, start: int, stop: int) -> OutputComparison:
    columns = {}
    for field in fields(OutputComparison):
        value = getattr(whole, field.name)
        if isinstance(value, dict):
            value = {name: column[start:stop] for name, column in value.items()}
        elif isinstance(value, np.ndarray):
            value = value[start:stop]
        columns[field.name] = value
    return OutputComparison(**columns)
