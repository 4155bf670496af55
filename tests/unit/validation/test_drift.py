"""Drift is found when it is there, and seldom when it is not."""

import numpy as np
import pytest
from scipy.stats import ks_2samp

from enginegate.data import DataSet
from enginegate.evidence import Outcome
from validation.drift import hashed_counts, judge_drift, ks_test, measure_drift, psi, repetition


def _data(**inputs):
    count = len(next(iter(inputs.values())))
    return DataSet("d", inputs, None, np.arange(count).astype(np.str_), {})


def _judged(reference, sample, max_psi=0.25, **options):
    drifts = measure_drift(reference, sample, **options)
    return judge_drift(drifts, (len(reference), len(sample)), max_psi)


def _images(source, count, *, bright=0.5):
    """Two-channel images whose brightness varies from one to the next."""
    level = source.normal(bright, 0.1, size=(count, 1, 1, 1))
    return (level + source.normal(0, 0.2, size=(count, 2, 4, 4))).astype(np.float32)


def _sentences(source, count, *, shift=0):
    """Token ids of a few frequent words, padded with 0."""
    tokens = np.minimum(source.geometric(0.05, size=(count, 16)), 100) + shift
    return np.where(np.arange(16) < source.integers(4, 17, size=(count, 1)), tokens, 0)


@pytest.mark.slow
def test_false_alarms_are_rare():
    """In 2000 trials without drift at most 2 % are called drift, the promise being 1 %."""
    source = np.random.default_rng(0)
    alarms = 0

    for seed in range(2000):
        old, new = (
            _data(a=source.normal(size=(n, 5)), b=source.normal(size=(n, 3))) for n in (80, 150)
        )
        finding = _judged(old, new, max_psi=1e-9, seed=2 * seed)
        alarms += finding.outcome is Outcome.INCONCLUSIVE

    assert alarms <= 40


@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_the_same_source_has_not_drifted(kind):
    """Two samples of one source pass, whatever the numbers that are looked at."""
    source = np.random.default_rng(1)
    make = _images if kind == "images" else _sentences

    outcomes = [
        _judged(_data(x=make(source, 128)), _data(x=make(source, 500)), seed=2 * seed).outcome
        for seed in range(50)
    ]

    assert set(outcomes) == {Outcome.PASSED}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x, _: x * 255, id="scaled-by-255"),
        pytest.param(lambda x, _: x + 0.15, id="mean-shift"),
        pytest.param(lambda x, _: x[:, ::-1] + [[[[0.3]], [[0.0]]]], id="one-channel"),
        pytest.param(lambda x, _: np.where(x > np.quantile(x, 0.97), 9, x), id="outliers"),
        pytest.param(
            lambda x, source: np.concatenate([x[:300], _images(source, 200, bright=0.9)]),
            id="mix-shift",
        ),
    ],
)
def test_drift_is_found(change):
    """Each change of recorded images is found in every one of 20 recordings."""
    source = np.random.default_rng(2)

    findings = [
        _judged(
            _data(image=_images(source, 128)),
            _data(image=change(_images(source, 500), source).astype(np.float32)),
            seed=2 * seed,
        )
        for seed in range(20)
    ]

    assert {finding.outcome for finding in findings} == {Outcome.INCONCLUSIVE}
    assert all("image" in finding.reason and finding.remedy for finding in findings)
    assert all(finding.value > 0.25 for finding in findings)


def test_other_words_are_found_by_where_they_lie():
    """Other tokens at the same lengths move the embedding."""
    source = np.random.default_rng(3)
    old, new = _data(ids=_sentences(source, 200)), _data(ids=_sentences(source, 200))
    other = _data(ids=np.where(new.inputs["ids"] > 0, (new.inputs["ids"] * 7) % 91 + 5, 0))

    moved = {d.statistic: d for d in measure_drift(old, other)}
    same = {d.statistic: d for d in measure_drift(old, new)}

    assert moved["embedding distance"].p_value < 1e-3
    assert moved["embedding distance"].psi > 1.0
    assert same["embedding distance"].p_value > 0.01
    assert moved["length"].p_value > 0.01


def test_user_embedding_replaces_token_counts():
    """A callable from token ids to vectors replaces the counts."""
    source = np.random.default_rng(4)
    old, new = _data(ids=_sentences(source, 100)), _data(ids=_sentences(source, 100, shift=40))
    seen = []

    def embed(tokens):
        seen.append(tokens.shape)
        return tokens[:, :2] / 100.0

    found = {d.statistic: d.psi for d in measure_drift(old, new, embed=embed)}

    assert seen == [(100, 16), (100, 16)]
    assert found["embedding distance"] > 1.0


def test_without_a_limit_it_is_advisory():
    """A policy that states no limit is shown drift, and is not held up by it."""
    source = np.random.default_rng(5)
    old, new = (_data(x=source.normal(at, size=(100, 3))) for at in (0, 5))

    finding = _judged(old, new, max_psi=None)

    assert finding.outcome is Outcome.INCONCLUSIVE
    assert finding.advisory
    assert not _judged(old, new).advisory


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param({"x": 100}, {"x": 49}, "50 are needed", id="few-recorded"),
        pytest.param({"x": 20}, {"x": 100}, "50 are needed", id="few-calibrated"),
        pytest.param({"x": 100}, {"y": 100}, "no input in common", id="other-inputs"),
    ],
)
def test_too_little_is_inconclusive(old, new, said):
    """What cannot be compared has not passed."""
    old, new = (
        _data(**{name: np.zeros((count, 2)) for name, count in given.items()})
        for given in (old, new)
    )

    finding = _judged(old, new)

    assert finding.outcome is Outcome.INCONCLUSIVE
    assert said in finding.reason


def test_ks_is_that_of_scipy():
    """Distance and asymptotic p value are those of an independent implementation, ties included."""
    source = np.random.default_rng(6)
    for old, new in (
        (source.normal(size=300), source.normal(0.2, size=700)),
        (source.integers(0, 5, 200).astype(float), source.integers(0, 6, 100).astype(float)),
    ):
        expected = ks_2samp(old, new, method="asymp")

        distance, p_value = ks_test(old, new)

        assert distance == pytest.approx(expected.statistic)
        assert p_value == pytest.approx(expected.pvalue, rel=0.25)


def test_repeated_requests_raise_no_alarm():
    """Clients that send the same again are no further witnesses: alarms stay as rare."""
    source = np.random.default_rng(9)
    alarms = 0

    for seed in range(400):
        old, few = source.normal(size=(100, 8)), source.normal(size=(60, 8))
        often = _data(x=few[source.integers(60, size=600)])
        finding = _judged(_data(x=old), often, max_psi=1e-9, seed=2 * seed)
        alarms += finding.outcome is Outcome.INCONCLUSIVE

    assert alarms <= 12
    assert repetition(_data(x=np.repeat(few, 5, axis=0))) == 5.0
    assert repetition(_data(x=few)) == 1.0
    assert repetition(_data(x=np.zeros((50, 1)))) == 1.0


def test_psi_of_known_shares():
    """Two bins of known shares give the textbook sum."""
    old = np.repeat([0.0, 1.0], [5000, 5000])
    new = np.repeat([0.0, 1.0], [2000, 8000])

    assert psi(old, old) == pytest.approx(0.0, abs=1e-9)
    assert psi(old, new) == pytest.approx(
        0.3 * np.log(0.8 / 0.5) - 0.3 * np.log(0.2 / 0.5), rel=1e-2
    )


def test_values_that_are_not_finite_are_drift():
    """NaN among recorded inputs is counted as extreme, never ignored."""
    source = np.random.default_rng(7)
    old = _data(x=source.normal(size=(200, 4)))
    new = source.normal(size=(200, 4))
    new[:100] = np.nan

    assert _judged(old, _data(x=new)).outcome is Outcome.INCONCLUSIVE


def test_counts_ignore_order_and_padding():
    """The same words in another order, with more padding, lie at the same place."""
    rows = hashed_counts(np.array([[5, 9, 5, 0, 0, 0], [9, 5, 0, 5, 0, 0], [0] * 6, [7] * 6]))

    np.testing.assert_allclose(rows[0], rows[1])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 1, 0, 1])


def test_blocks_do_not_change_the_answer(monkeypatch):
    """Numbers of rows are the same however many are read at a time."""
    source = np.random.default_rng(8)
    old, new = (_data(x=source.normal(size=(n, 6)).astype(np.float32)) for n in (100, 130))
    whole = {d.statistic: d for d in measure_drift(old, new)}
    monkeypatch.setattr("validation.drift._BLOCK_ROWS", 7)

    pieces = {d.statistic: d for d in measure_drift(old, new)}

    for name in set(whole) - {"values"}:
        assert pieces[name].psi == whole[name].psi
