"""Scores against labels: known answers, and what a broken sample gets."""

import sys
from types import ModuleType

import numpy as np
import pytest
from sklearn.metrics import top_k_accuracy_score

from enginegate.data import DataSet
from enginegate.errors import DataError, PolicyError
from enginegate.policy.gates import Metric
from validation.agreement import compare
from validation.outputs import OutputSpec
from validation.score import BITS, GALLERY, NONE, score

FINE = np.zeros(3, dtype=bool)


def _score(kind, reference, candidate, labels, nonfinite=FINE, **more):
    return score(Metric(kind=kind, **more), reference, candidate, labels, nonfinite)


class TestClasses:
    def test_top_k_equals_scikit_learn(self):
        """The share of samples within the best three is scikit-learn's."""
        rng = np.random.default_rng(0)
        logits, labels = rng.normal(size=(500, 6)), rng.integers(0, 6, 500)
        wrong = np.full((500, 6), -1.0)
        wrong[np.arange(500), (labels + 1) % 6] = 1.0
        wrong[np.arange(500), labels] = -2.0

        deltas = _score("topk", wrong, logits, labels, np.zeros(500, dtype=bool), k=3)

        assert deltas.mean() == top_k_accuracy_score(labels, logits, k=3)

    def test_ties_go_to_the_lower_index(self):
        """As argmax does: of equal logits only the first is the top class."""
        tied = np.zeros((3, 4))

        deltas = _score("top1", tied, tied + np.array([[0, 0, 1, 0]]), np.array([0, 1, 2]))

        assert deltas.tolist() == [-1, 0, 1]

    def test_macro_f1_is_packed(self):
        """Label and both classes lie in one number; a broken sample has no class."""
        reference, candidate = np.eye(3), np.eye(3)[[1, 1, 1]]
        broken = np.array([False, False, True])

        codes = _score("macro_f1", reference, candidate, np.array([0, 1, 2]), broken)

        assert (codes >> 2 * BITS).tolist() == [0, 1, 2]
        assert ((codes >> BITS) & NONE).tolist() == [0, 1, 2]
        assert (codes & NONE).tolist() == [1, 1, NONE]


class TestNumbers:
    def test_errors(self):
        """Absolute and squared errors are means over the values of a sample."""
        labels = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
        candidate = labels + np.array([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0]])

        assert _score("mae", labels, candidate, labels).imag.tolist() == [2.0, 0.0, 2.0]
        assert _score("rmse", labels, candidate, labels).imag.tolist() == [5.0, 0.0, 4.0]
        assert _score("mae", labels, candidate, labels).real.tolist() == [0.0, 0.0, 0.0]

    def test_single_column_labels_fit(self):
        """Labels of shape (N,) fit an output of shape (N, 1); other shapes are refused."""
        output = np.ones((3, 1))

        assert _score("mae", output, output, np.zeros(3)).real.tolist() == [1.0] * 3
        with pytest.raises(DataError, match="shape"):
            _score("mae", np.ones((3, 2)), np.ones((3, 2)), np.zeros(3))

    def test_broken_samples_are_the_worst(self):
        """An infinite error, or a score below all others."""
        output, broken = np.ones((3, 2)), np.array([True, False, False])

        assert _score("rmse", output, output, output, broken).imag[0] == np.inf
        assert _score("cosine", output, output, output, broken).imag[0] == -np.inf

    def test_cosine(self):
        """Between the output and the vector it should be; a vector of zeros is like none."""
        reference = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
        found = _score("cosine", reference, reference, np.array([[2.0, 0.0], [0.0, 1.0], [1, 1]]))

        assert found.real == pytest.approx([1.0, np.sqrt(0.5), 0.0])


class TestRecall:
    def test_neighbours_of_the_same_label(self):
        """A sample is found when one of its nearest others has its label."""
        paired = np.array([[1, 0], [1, 0.1], [0, 1], [0.1, 1]])
        labels, fine = np.array([7, 7, 3, 3]), np.zeros(4, dtype=bool)
        parted = paired[[0, 2, 1, 3]]

        assert _score("recall", paired, parted, labels, fine, k=1).tolist() == [-1] * 4
        assert _score("recall", parted, paired, labels, fine, k=1).tolist() == [1] * 4
        assert _score("recall", paired, parted, labels, fine, k=3).tolist() == [0] * 4

    def test_shuffled_vectors_lose(self):
        """Embeddings that no longer group by label lose recall."""
        rng = np.random.default_rng(1)
        labels = rng.integers(0, 10, GALLERY + 100)
        vectors = np.eye(10)[labels] + rng.normal(scale=0.05, size=(len(labels), 10))
        fine = np.zeros(len(labels), dtype=bool)

        deltas = _score("recall", vectors, rng.permutation(vectors), labels, fine, k=1)

        assert deltas.mean() == pytest.approx(-0.9, abs=0.06)


class TestOwn:
    @pytest.fixture
    def module(self, monkeypatch):
        found = ModuleType("house_scores")
        found.margin = lambda output, labels: output[:, 0] - labels
        found.short = lambda output, _: output[:1, 0]
        monkeypatch.setitem(sys.modules, "house_scores", found)

    @pytest.mark.usefixtures("module")
    def test_is_called(self):
        """MODULE:CALLABLE gives one score a sample."""
        found = _score("house_scores:margin", np.ones((3, 1)), np.ones((3, 1)), np.zeros(3))

        assert found.tolist() == [1.0 + 1.0j] * 3

    @pytest.mark.usefixtures("module")
    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            ("house_scores:absent", "cannot be loaded"),
            ("no_such_house:f", "cannot be loaded"),
            ("house_scores:short", "one finite score a sample"),
        ],
    )
    def test_must_do_what_it_should(self, kind, message):
        """A metric that cannot be loaded, or gives something else, is named."""
        with pytest.raises(PolicyError, match=message):
            _score(kind, np.ones((3, 1)), np.ones((3, 1)), np.zeros(3))


class TestCompared:
    def _data(self, **fields):
        base = {"origin": "e", "inputs": {}, "labels": None, "ids": np.array(["a", "b", "c"])}
        return DataSet(**(base | {"slices": {}} | fields))

    def test_regression(self):
        """An output of numbers has errors and scores, and nothing about classes."""
        asked = OutputSpec(task="regression", metrics={"price": Metric(kind="mae")})
        outputs = {"y": np.array([1.0, 2.0, 3.0], np.float32)}
        data = self._data(targets={"y": np.array([1.0, 2.0, 4.0])})

        found = compare(outputs, {"y": outputs["y"] + 1}, data, "evaluation", asked=asked)

        assert found.top1_reference is None
        assert found.kl_nats is None
        assert found.scores["price"].tolist() == [0 + 1j, 0 + 1j, 1 + 0j]
        assert "top1_match" not in found.frame()
        assert found.max_abs_error.tolist() == [1.0] * 3

    def test_distances(self):
        """Relative error, power and cosine of known vectors."""
        reference = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
        candidate = np.array([[3.0, 5.0], [0.0, 0.0], [0.0, 1.0]], np.float32)

        found = compare({"y": reference}, {"y": candidate}, self._data(), "shadow")

        assert found.rel_error.tolist() == [0.25, 0.0, np.inf]
        assert found.power.tolist() == [25 + 1j, 0j, 1j]
        assert found.cosine == pytest.approx([29 / np.sqrt(25 * 34), 1.0, 0.0])

    @pytest.mark.parametrize(
        ("asked", "outputs", "labels", "message"),
        [
            pytest.param(
                OutputSpec(output="z"),
                {"y": np.ones((3, 4), np.float32)},
                None,
                "not 'z'",
                id="output",
            ),
            pytest.param(
                OutputSpec(task="embedding"),
                {"y": np.ones(3, np.float32)},
                None,
                "embed",
                id="vector",
            ),
            pytest.param(
                OutputSpec(),
                {"y": np.ones((3, 4), np.float32)},
                {"y": np.ones(3)},
                "whole",
                id="float",
            ),
            pytest.param(
                OutputSpec(),
                {"y": np.ones((3, 4), np.float32)},
                {"y": np.full(3, 9)},
                "0 to 3",
                id="9",
            ),
        ],
    )
    def test_outputs_must_be_of_their_task(self, asked, outputs, labels, message):
        """An output that is missing, of another form, or with labels of another set is refused."""
        data = self._data(targets=labels or {})

        with pytest.raises(DataError, match=message):
            compare(outputs, outputs, data, "evaluation", asked=asked)
