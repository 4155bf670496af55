"""Whether recorded inputs still look like the calibration data that int8 and fp8 scales come from.

Each input is described by numbers of which every sample gives one, so that samples are independent:
its mean, norm, smallest and largest value, one value drawn at random (the pooled values), the mean
of each channel, and for tokens the length and where an embedding lies. Per number:

- how far apart: the population stability index, PSI = sum (q - p) ln(q / p) over ten bins that hold
  equal shares of the calibration data (Siddiqi 2006, Credit Risk Scorecards; above 0.25 is held to
  be a shift). It is larger than 0 also by chance, about (bins - 1) (1/N + 1/M) (Yurdakul 2018,
  Statistical Properties of Population Stability Index), hence
- how surely: the two-sample Kolmogorov-Smirnov test, Holm's correction over all numbers of all
  inputs. With equal values it errs on the safe side. Requests that repeat each other are fewer
  witnesses: a set counts for its effective size, n^2 over the sum of squared multiplicities (Kish
  1965, Survey Sampling, section 11.7).

An input drifted when a number is beyond the limit and the test says surely. What only few samples
do (one outlier in a hundred) moves neither; agreement with FP32 on the sample judges those.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kstwobign  # type: ignore[import-untyped]

from enginegate.data import Array, DataSet
from enginegate.evidence import Finding, Outcome
from validation.statistics import holm

Floats = NDArray[np.float64]
Embed = Callable[[Array], Array]

USUAL_MAX_PSI = 0.25
CONFIDENCE = 0.99
MIN_SAMPLES = 50
_BINS = 10
_BLOCK_ROWS = 1024
_MOST_CHANNELS = 64
_CHANNEL_AXES = 3
_TOKEN_AXES = 2
_FEW_VALUES = 4
_BUCKETS = 64
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Drift:
    """How one number of one input differs between two sets of samples.

    Attributes:
        psi: population stability index, 0 for equal shares in all bins.
        ks: largest distance of the distribution functions, in [0, 1].
        p_value: chance of such a distance without drift, corrected for all that were looked at.
    """

    input: str
    statistic: str
    psi: float
    ks: float
    p_value: float


def measure_drift(
    reference: DataSet, sample: DataSet, *, embed: Embed | None = None, seed: int = 0
) -> tuple[Drift, ...]:
    """Every number of every input that both have, most drifted first.

    Args:
        reference: calibration data.
        sample: recorded requests.
        embed: token ids, shape ``(N, L)``, to vectors, shape ``(N, D)``; None counts tokens in
            64 buckets, each row scaled to length 1.
        seed: of the values that are drawn.
    """
    found = []
    repeats = repetition(reference), repetition(sample)
    for name in sorted(set(reference.inputs) & set(sample.inputs)):
        old = _numbers(reference.inputs[name], embed, seed)
        new = _numbers(sample.inputs[name], embed, seed + 1)
        _project(old, new)
        for number in old.keys() & new.keys():
            apart = ks_test(old[number], new[number], repeats)
            found.append(Drift(name, number, psi(old[number], new[number]), *apart))
    if not found:
        return ()
    adjusted = holm([drift.p_value for drift in found])
    corrected = [
        Drift(d.input, d.statistic, d.psi, d.ks, float(p))
        for d, p in zip(found, adjusted, strict=True)
    ]
    return tuple(sorted(corrected, key=lambda d: (-d.psi, d.input, d.statistic)))


def judge_drift(
    drifts: tuple[Drift, ...], counts: tuple[int, int], max_psi: float | None
) -> Finding:
    """Whether the recorded inputs drifted: advisory at the usual limit unless the policy has one.

    Args:
        drifts: from `measure_drift`.
        counts: samples of calibration and of the recording.
        max_psi: the policy's limit.
    """
    limit = USUAL_MAX_PSI if max_psi is None else max_psi
    surely = [d for d in drifts if d.p_value <= 1.0 - CONFIDENCE]
    drifted = [d for d in surely if not d.psi <= limit]
    enough = bool(drifts) and min(counts) >= MIN_SAMPLES
    holds = enough and not drifted
    shown = (drifted or surely or list(drifts))[:1]
    value = shown[0].psi if shown else None
    return Finding(
        gate="input_drift",
        scope="shadow",
        outcome=Outcome.PASSED if holds else Outcome.INCONCLUSIVE,
        reason=_reason(drifts, drifted, counts, limit),
        value=value,
        limit=limit,
        relation="<=",
        unit="PSI",
        samples=counts[1],
        advisory=max_psi is None,
        remedy=_remedy(drifted, enough=enough),
    )


def psi(reference: Floats, sample: Floats) -> float:
    """Population stability index of two samples, each of shape ``(N,)``; the top names its source.

    Half a sample is added to each bin, so that an empty one counts as rare, not as impossible.
    Values that are not finite count as larger than all others.
    """
    old, new = (np.nan_to_num(x, nan=np.inf, posinf=np.inf) for x in (reference, sample))
    inner = np.quantile(old, np.arange(1, _BINS) / _BINS, method="inverted_cdf")
    edges = np.unique(inner)
    shares = []
    for values in (old, new):
        counts = np.bincount(np.searchsorted(edges, values), minlength=len(edges) + 1) + 0.5
        shares.append(counts / counts.sum())
    return float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())


def ks_test(
    reference: Floats, sample: Floats, repeats: tuple[float, float] = (1.0, 1.0)
) -> tuple[float, float]:
    """Two-sample Kolmogorov-Smirnov distance, and its p value by the usual approximation.

    Smirnov (1948), Annals of Mathematical Statistics 19:279-281, with the effective size
    ``n m / (n + m)``. Equal values make the true p value smaller than this.

    Args:
        reference: shape ``(N,)``.
        sample: shape ``(M,)``.
        repeats: how many rows of each stand for one, from `repetition`.
    """
    old, new = np.sort(reference), np.sort(sample)
    both = np.concatenate([old, new])
    apart = np.abs(
        np.searchsorted(old, both, "right") / len(old)
        - np.searchsorted(new, both, "right") / len(new)
    ).max()
    n, m = len(old) / repeats[0], len(new) / repeats[1]
    return float(apart), float(kstwobign.sf(np.sqrt(n * m / (n + m)) * apart))


def repetition(data: DataSet) -> float:
    """How many rows stand for one independent one, >= 1; the top says by which rule.

    Inputs of a few values are equal by chance too, so theirs are not held to be repeats.
    """
    values = sum(int(np.prod(array.shape[1:])) for array in data.inputs.values())
    if values <= _FEW_VALUES:
        return 1.0
    counts = Counter(
        hash(tuple(np.ascontiguousarray(array[row]).tobytes() for array in data.inputs.values()))
        for row in range(len(data))
    )
    return sum(count**2 for count in counts.values()) / max(1, len(data))


def hashed_counts(tokens: Array) -> Floats:
    """How often tokens of each of 64 buckets occur, shape ``(N, 64)``, each row of length 1.

    Feature hashing (Weinberger et al. 2009) by Knuth's multiplicative hash; token 0 is taken for
    padding and not counted.
    """
    bucket = (tokens.astype(np.uint64) * np.uint64(2654435761) % np.uint64(1 << 32)) >> np.uint64(
        26
    )
    counts = np.zeros((len(tokens), _BUCKETS))
    rows = np.repeat(np.arange(len(tokens)), tokens.shape[1]).reshape(tokens.shape)
    told = tokens != 0
    np.add.at(counts, (rows[told], bucket[told]), 1.0)
    norms = np.linalg.norm(counts, axis=1, keepdims=True)
    return np.asarray(np.divide(counts, norms, out=counts, where=norms > 0.0))


_EMBEDDING = "embedding"


def _numbers(array: Array, embed: Embed | None, seed: int) -> dict[str, Array]:
    """By name, shape ``(N,)``; and vectors under ``embedding``, shape ``(N, D)``."""
    source = np.random.default_rng(seed)
    parts: dict[str, list[Array]] = {}
    for start in range(0, len(array), _BLOCK_ROWS):
        block = np.asarray(array[start : start + _BLOCK_ROWS])
        numbers = dict(_of_block(block, source))
        if _tokens(array):
            numbers["length"] = (block != 0).sum(axis=1).astype(np.float64)
            numbers[_EMBEDDING] = np.asarray((embed or hashed_counts)(block), np.float64)
        for name, values in numbers.items():
            parts.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in parts.items()}


def _of_block(block: Array, source: np.random.Generator) -> Iterator[tuple[str, Floats]]:
    rows = np.arange(len(block))
    flat = block.reshape(len(block), -1).astype(np.float64)
    if flat.shape[1] == 1:
        yield "value", flat[:, 0]
        return
    yield "mean", flat.mean(axis=1)
    yield "norm", np.linalg.norm(flat, axis=1)
    yield "smallest", flat.min(axis=1)
    yield "largest", flat.max(axis=1)
    yield "values", flat[rows, source.integers(flat.shape[1], size=len(rows))]
    if block.ndim >= _CHANNEL_AXES and 1 < block.shape[1] <= _MOST_CHANNELS:
        means = block.reshape(len(block), block.shape[1], -1).mean(axis=2, dtype=np.float64)
        for channel, values in enumerate(means.T):
            yield f"channel {channel} mean", values


def _tokens(array: Array) -> bool:
    return array.dtype.kind in "iu" and array.ndim == _TOKEN_AXES


def _project(old: dict[str, Array], new: dict[str, Array]) -> None:
    """Replace vectors by where they lie between the two means: one number a sample.

    The means are of one half of the samples and the numbers of the other, as in a classifier
    two-sample test (Lopez-Paz and Oquab 2017): on the same samples they would always differ.
    """
    if _EMBEDDING not in old or _EMBEDDING not in new:
        return
    before, after = old.pop(_EMBEDDING), new.pop(_EMBEDDING)
    direction = after[::2].mean(axis=0) - before[::2].mean(axis=0)
    old["embedding distance"], new["embedding distance"] = (
        before[1::2] @ direction,
        after[1::2] @ direction,
    )


def _reason(
    drifts: tuple[Drift, ...], drifted: list[Drift], counts: tuple[int, int], limit: float
) -> str:
    if not drifts:
        return "the recording and the calibration data have no input in common"
    if min(counts) < MIN_SAMPLES:
        return f"{counts[1]} recorded and {counts[0]} calibration samples, {MIN_SAMPLES} are needed"
    told = f"{counts[1]} recorded against {counts[0]} calibration samples"
    if not drifted:
        return f"none of {len(drifts)} numbers surely has PSI > {limit:g}; {told}"
    named = ", ".join(f"{d.input} {d.statistic} {d.psi:.3g}" for d in drifted[:_NAMED])
    return f"{len(drifted)} of {len(drifts)} numbers have PSI > {limit:g}: {named}; {told}"


def _remedy(drifted: list[Drift], *, enough: bool) -> str:
    if not enough:
        return "Record more requests, or give more calibration data."
    if not drifted:
        return ""
    return (
        "Look at what changed upstream (a scale, a mix, a new source); if it is meant to stay, "
        "calibrate on recorded traffic and qualify again."
    )
