"""FP32's own score, and what it makes the gates worth that compare with it. Pure.

A candidate is judged by what it loses against FP32. Where FP32 itself answers no better than chance
there is nothing to lose, so every candidate would pass: with permuted labels, with outputs in
another order, with inputs that were prepared in another way. A gate is therefore inconclusive

- on all samples, where the interval of FP32's own score does not lie beyond *chance*: what the best
  answer scores that does not look at the input;
- anywhere, where FP32 is right on no larger share than may be lost: no candidate can be worse;
- on all samples of a classifier, where FP32 is right on none of a class: a permuted class hides in
  the mean, and the data need not have a slice for it.

What FP32 scores is shown in any case. A gate that failed stays failed: a candidate that is surely
worse than FP32 is worse, whatever the labels are. A policy that names ``accuracy_fp32`` as advisory
says that FP32 is really no better; the gate then decides as if it were.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array
from enginegate.evidence import Finding, Outcome, loss_gate, measure_words
from enginegate.policy.gates import ERRORS, Gates
from validation.agreement import OutputComparison
from validation.checks import class_sizes, slice_sizes
from validation.gate import finite
from validation.metrics.class_counts import best_guess
from validation.outputs import OutputSpec, flat
from validation.resampling import (
    Floats,
    own_boxes,
    own_counts,
    own_f1,
    own_mean,
    resampled_numbers,
)
from validation.score import ACCURACY, GALLERY, paired_form, target_variance
from validation.statistics import Estimate, Share, share_interval

# A class that FP32 names is missed among the labels only if it is named as often as half an average
# class: an "other" that the data does not have is named now and then by a sound model too.
_USUAL_SHARE = 0.5
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class _Measure:
    """One measure of FP32 on N samples.

    Attributes:
        name: accuracy, or the metric's.
        kind: the metric's kind; top1 for accuracy.
        values: what its column holds of FP32 (`validation.score`), shape ``(N,)`` or ``(N, K)``.
        guess: what a guess scores on each sample, shape ``(N,)``; None where chance is one number,
            or not known.
        chance: the mean of that, or that number; None: not known.
        how: which guess, in words.
        most: the largest loss that the policy allows, of a right-or-wrong measure or macro F1.
        most_in_slice: the same of a slice; None: slices are not judged by this measure.
        unit: of a number, for people.
    """

    name: str
    kind: str
    values: Array
    guess: Floats | None
    chance: float | None
    how: str
    most: float | None
    most_in_slice: float | None
    unit: str = ""

    @property
    def relation(self) -> str:
        """How a good score stands to chance."""
        return "<=" if self.kind in ERRORS else ">="

    @property
    def is_share(self) -> bool:
        """Whether it is a share, from 0 to 1, of which no more can be lost than there is."""
        return paired_form(self.kind) != "numbers"

    def estimate(
        self, rows: NDArray[np.bool_] | slice, confidence: float, *, only: int | None = None
    ) -> Estimate:
        """FP32's score on some of the samples, or of one class, with its interval."""
        values, form = self.values[rows], paired_form(self.kind)
        if form == "binary":
            return share_interval(Share.of(values), confidence)
        if form == "counts":
            return own_counts(values, self.kind, confidence, only=only)
        if form == "boxes":
            return own_boxes(values, self.kind, confidence, only=only)
        if self.kind == "macro_f1":
            return own_f1(values, confidence)
        return own_mean(values, confidence, squared=self.kind == "rmse")

    def beats_chance(self, found: Estimate, confidence: float) -> bool:
        """Whether the whole interval, paired where chance is known by sample, is beyond chance."""
        if self.chance is None:
            return True
        if self.guess is None or self.is_share:
            return found.low > self.chance
        pairs = np.asarray(self.values, dtype=np.complex128)
        pairs.imag = self.guess
        kind = self.kind if self.kind in ERRORS else "mean"
        return resampled_numbers(pairs, kind, confidence).estimate.low > 0.0


def own_scores(
    comparison: OutputComparison, gates: Gates, asked: OutputSpec
) -> tuple[Finding, ...]:
    """What FP32 scores on labelled samples: on all of them, then on each slice that is judged.

    Each is shown only (advisory). It passed when a loss can be seen there; `held_back` makes the
    gate that it belongs to inconclusive where it did not.
    """
    if not len(comparison):
        return ()
    found = []
    sizes = slice_sizes(comparison, asked.max_values)
    for measure in _measures(comparison, gates, asked):
        found.append(_overall(measure, comparison, gates))
        if measure.most_in_slice is not None:
            found += [
                _of_slice(measure, comparison, part, gates, only=int(part[1]))
                for part, size in class_sizes(comparison, measure.name, asked).items()
                if size >= gates.min_slice_samples
            ]
            found += [
                _of_slice(measure, comparison, part, gates)
                for part, size in sizes.items()
                if size >= gates.min_slice_samples
            ]
    return tuple(found)


def held_back(
    findings: Sequence[Finding], own: Sequence[Finding], gates: Gates
) -> tuple[Finding, ...]:
    """The findings; a loss that FP32's own score makes worthless is inconclusive, and says why.

    Its number is left out, for it says nothing.
    """
    worthless = {
        (loss_gate(score.gate), score.scope): score
        for score in own
        if score.outcome is not Outcome.PASSED
        and score.limit is not None
        and score.gate not in gates.advisory
    }
    held = []
    for finding in findings:
        score = worthless.get((finding.gate, finding.scope))
        if score is None or finding.outcome > Outcome.INCONCLUSIVE:
            held.append(finding)
            continue
        nothing = dict.fromkeys(("value", "low", "high", "would_pass"))
        why = {"outcome": Outcome.INCONCLUSIVE, "reason": score.reason, "remedy": score.remedy}
        held.append(finding.model_copy(update=nothing | why))
    return tuple(held)


def _measures(comparison: OutputComparison, gates: Gates, asked: OutputSpec) -> Iterator[_Measure]:
    labels = comparison.labels
    if comparison.correct_reference is not None:
        known = labels.get(ACCURACY)
        yield _Measure(
            ACCURACY,
            "top1",
            comparison.correct_reference,
            None,
            None if known is None else _most_frequent(known, 1),
            _NAMING,
            gates.max_accuracy_loss,
            gates.max_slice_accuracy_loss,
        )
    for name, column in comparison.scores.items():
        kind, k = asked.metrics[name].kind, asked.metrics[name].k
        form = paired_form(kind)
        if form == "binary" and name not in comparison.own:
            continue
        values = comparison.own[name] if form == "binary" else column
        guess, chance, how = _chance(kind, k, labels.get(name))
        if form == "counts":
            chance, how = best_guess(kind, column), "giving the same answer to every sample"
        elif form == "boxes":
            chance, how = 0.0, "finding nothing"
        yield _Measure(
            name,
            kind,
            np.asarray(values.real) if form == "numbers" else values,
            guess,
            chance,
            how,
            gates.max_metric_loss.get(name),
            gates.max_slice_metric_loss.get(name),
            "" if paired_form(kind) != "numbers" else asked.metrics[name].unit,
        )


def _overall(measure: _Measure, comparison: OutputComparison, gates: Gates) -> Finding:
    found = measure.estimate(slice(None), gates.confidence)
    said = _said(measure, found)
    if measure.chance is None:
        reason = f"{said}; no chance level of {measure.kind} is known, so this is not judged"
        return _finding(measure, comparison.scope, found, None, Outcome.INCONCLUSIVE, reason)
    chance = f"chance is {_number(measure, measure.chance)} ({measure.how})"
    if not measure.beats_chance(found, gates.confidence):
        why = f"{said}, and {chance}: labels or outputs are probably permuted"
    elif _is_empty(measure, found, measure.most):
        why = f"{said}; {_nothing_to_lose(measure, measure.most)}"
    else:
        why = _class_never_right(measure, comparison, gates)
        why = why and f"{said}, but {why}"
    outcome = Outcome.INCONCLUSIVE if why else Outcome.PASSED
    reason = why or f"{said}; {chance}"
    return _finding(measure, comparison.scope, found, measure.chance, outcome, reason)


def _of_slice(
    measure: _Measure,
    comparison: OutputComparison,
    part: tuple[str, str],
    gates: Gates,
    *,
    only: int | None = None,
) -> Finding:
    """A slice is not held against chance: one that holds a single class has none.

    Args:
        only: the class of labels, pixels or boxes that the slice is made of.
    """
    column, value = part
    rows = slice(None) if only is not None else comparison.slices[column] == value
    found = measure.estimate(rows, gates.confidence, only=only)
    scope = f"{comparison.scope}/{column}={value}"
    said, most = _said(measure, found), measure.most_in_slice
    if _is_empty(measure, found, most):
        reason = f"{said}; {_nothing_to_lose(measure, most)}"
        return _finding(measure, scope, found, most, Outcome.INCONCLUSIVE, reason)
    limit = most if measure.is_share else None
    return _finding(measure, scope, found, limit, Outcome.PASSED, said)


def _is_empty(measure: _Measure, found: Estimate, most: float | None) -> bool:
    return measure.is_share and most is not None and found.value <= most


def _nothing_to_lose(measure: _Measure, most: float | None) -> str:
    return (
        f"{_number(measure, most or 0.0)} may be lost, so no candidate can be worse than is allowed"
    )


def _class_never_right(measure: _Measure, comparison: OutputComparison, gates: Gates) -> str:
    """A class, by label or by FP32's answer, on which FP32 is never right; empty: there is none."""
    labels, answers = comparison.labels.get(ACCURACY), comparison.top1_reference
    if measure.name != ACCURACY or labels is None or answers is None:
        return ""
    right = np.asarray(measure.values)
    classes = len(np.unique(labels))
    usual = max(gates.min_slice_samples, _USUAL_SHARE * len(labels) / classes)
    missed = _never_right(labels, answers, right, gates.min_slice_samples)
    if missed is not None:
        count, own, other = missed
        return (
            f"it is right on none of the {count} labelled {own}; it mostly calls them {other}: "
            "labels of that class are probably permuted"
        )
    named = _never_right(answers, labels, right, usual)
    if named is not None:
        count, own, other = named
        return (
            f"it is right on none of the {count} that it calls {own}; they are mostly labelled "
            f"{other}: labels of that class are probably permuted"
        )
    return ""


def _never_right(
    groups: NDArray[np.int64], others: NDArray[np.int64], right: NDArray[np.bool_], least: float
) -> tuple[int, int, int] | None:
    """The largest group of at least so many samples without a right one.

    Returns:
        Its size, its class, and the class that ``others`` most often has there.
    """
    values, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
    hits = np.bincount(places, weights=right, minlength=len(values))
    bad = np.flatnonzero((hits == 0) & (counts >= max(1.0, least)))
    if not len(bad):
        return None
    worst = bad[np.argmax(counts[bad])]
    instead, times = np.unique(others[places == worst], return_counts=True)
    return int(counts[worst]), int(values[worst]), int(instead[np.argmax(times)])


# How a guess answers that does not look at the input.
_NAMING = "always naming the most frequent class"


def _chance(kind: str, k: int, labels: Array | None) -> tuple[Floats | None, float | None, str]:
    """What a guess scores by sample and on average, and which guess; None: not known."""
    if labels is None or kind not in _GUESSES:
        return None, None, ""
    return _GUESSES[kind](labels, k)


def _most_frequent(labels: Array, k: int) -> float:
    """Share of the k most frequent classes; never below k over the number of classes."""
    counts = np.unique(labels, return_counts=True)[1]
    return float(np.sort(counts)[::-1][:k].sum() / len(labels))


def _f1_of_a_guess(labels: Array) -> float:
    """The best macro F1 without the input: classes drawn as often as labels have them.

    With class c drawn with share q and having share p, its F1 is 2pq / (p + q); the mean over
    classes is largest at q = p, and is then one over the number of classes.
    """
    return 1.0 / len(np.unique(labels))


def _mean_errors(labels: Array, power: int) -> Floats:
    """Each sample's error, absolute (1) or squared (2), of always answering the mean target."""
    targets = flat(labels)
    return np.asarray((np.abs(targets - targets.mean(axis=0)) ** power).mean(axis=1))


def _mean_cosines(labels: Array) -> Floats:
    """Each target's cosine with the mean direction of all."""
    targets = flat(labels)
    length = np.linalg.norm(targets, axis=1, keepdims=True)
    unit = np.divide(targets, length, out=np.zeros_like(targets), where=length > 0.0)
    mean = unit.mean(axis=0)
    size = float(np.linalg.norm(mean))
    return np.asarray(unit @ (mean / size)) if size > 0.0 else np.zeros(len(unit))


def _random_recall(labels: Array, k: int) -> Floats:
    """Chance that a random k of a sample's block hold one of its label, shape ``(N,)``."""
    found = np.zeros(len(labels))
    for start in range(0, len(labels), GALLERY):
        block = labels[start : start + GALLERY]
        _, places, counts = np.unique(block, return_inverse=True, return_counts=True)
        others, alike = len(block) - 1, counts[places] - 1
        missed = np.ones(len(block))
        for drawn in range(min(k, others)):
            missed *= np.maximum(others - alike - drawn, 0) / (others - drawn)
        found[start : start + GALLERY] = 1.0 - missed
    return found


def _by_sample(scores: Floats, how: str, *, root: bool = False) -> tuple[Floats, float, str]:
    mean = round(float(scores.mean()), _DIGITS) + 0.0  # 0 of r2 is exact but for rounding
    return scores, mean**0.5 if root else mean, how


_Guess = Callable[[Array, int], tuple[Floats | None, float, str]]
_GUESSES: Mapping[str, _Guess] = MappingProxyType(
    {
        "top1": lambda labels, _: (None, _most_frequent(labels, 1), _NAMING),
        "topk": lambda labels, k: (
            None,
            _most_frequent(labels, k),
            f"always naming the {k} most frequent classes",
        ),
        "macro_f1": lambda labels, _: (
            None,
            _f1_of_a_guess(labels),
            "drawing classes as often as labels have them",
        ),
        "recall": lambda labels, k: _by_sample(_random_recall(labels, k), "a random order"),
        "mae": lambda labels, _: _by_sample(_mean_errors(labels, 1), "always answering the mean"),
        "rmse": lambda labels, _: _by_sample(
            _mean_errors(labels, 2), "always answering the mean", root=True
        ),
        "r2": lambda labels, _: _by_sample(
            1.0 - _mean_errors(labels, 2) / target_variance(labels), "always answering the mean"
        ),
        "cosine": lambda labels, _: _by_sample(
            _mean_cosines(labels), "always answering the mean direction"
        ),
    }
)


def _said(measure: _Measure, found: Estimate) -> str:
    what = "" if measure.name == ACCURACY else f" in {measure_words(measure.name)}"
    low, high = (_number(measure, end, unit=False) for end in (found.low, found.high))
    return (
        f"FP32 itself {_verb(measure)} {_number(measure, found.value)} ({low} to {high}){what} on "
        f"{found.samples} samples"
    )


def _verb(measure: _Measure) -> str:
    return "is off by" if measure.kind in ERRORS else "scores"


def _number(measure: _Measure, value: float, *, unit: bool = True) -> str:
    if measure.is_share:
        return f"{100 * value:.3g}{' %' if unit else ''}"
    return f"{value:.4g}{f' {measure.unit}' if unit and measure.unit else ''}"


def _finding(
    measure: _Measure,
    scope: str,
    found: Estimate,
    limit: float | None,
    outcome: Outcome,
    reason: str,
) -> Finding:
    gate = f"{'slice_' if '/' in scope else ''}{measure.name}_fp32"
    remedy = ""
    if outcome is not Outcome.PASSED and limit is not None:
        where = "of this slice " if "/" in scope else ""
        remedy = (
            f"Look at the labels {where}and at the order of the model's outputs, then at how the "
            f"inputs were prepared. If FP32 is really no better, name {gate} in [gates] advisory."
        )
    return Finding(
        gate=gate,
        scope=scope,
        outcome=outcome,
        reason=reason,
        value=finite(found.value),
        limit=limit,
        relation="<=" if measure.kind in ERRORS else ">=",
        unit="fraction" if measure.is_share else measure.unit,
        low=finite(found.low),
        high=finite(found.high),
        samples=found.samples,
        advisory=True,
        remedy=remedy,
    )
