"""How a candidate's outputs differ from FP32's, sample by sample: arrays in, numbers out.

Shape suffixes: N samples, C classes, V values.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp  # type: ignore[import-untyped]

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import DataError, PolicyError
from enginegate.policy.gates import OutputTask
from validation.metrics.boxes import (
    Boxes,
    box_agreement,
    box_column,
    boxes_of,
    labelled_boxes,
    without_nonfinite,
)
from validation.metrics.class_counts import (
    count_labels,
    count_pixels,
    decision_agreement,
    decisions_of,
    exact_match,
)
from validation.outputs import CLASSIFY, OutputSpec, Trait, check_form, flat, nonfinite_rows
from validation.score import (
    in_variances,
    labels_by_measure,
    labels_for,
    own_score,
    paired_form,
    score,
)

if TYPE_CHECKING:
    import pandas as pd

NO_CLASS = -1
_MAPPINGS = ("slices", "scores", "own", "traits", "labels")


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """Reference and candidate on the same N samples. Arrays have shape ``(N,)``, in data order.

    A sample with NaN or Inf in any of the candidate's outputs counts as the worst possible: no
    class, wrong, infinite divergence and error.

    Attributes:
        scope: which samples, e.g. evaluation or shadow.
        ids: text, unique.
        slices: by column name, text.
        top1_reference: class index; None if the output has no classes.
        top1_candidate: class index; NO_CLASS where nonfinite.
        correct_reference: None without labels.
        correct_candidate: None without labels; False where nonfinite.
        kl_nats: KL(reference || candidate) of the softmax; ``inf`` where nonfinite.
        max_abs_error: largest difference over all output values; ``inf`` where nonfinite.
        nonfinite: whether the candidate gave NaN or Inf.
        rel_error: largest difference of the output, relative to its largest value.
        power: sum of squares of FP32's output, and of the difference, as one complex number.
        cosine: between both outputs; -1 where nonfinite.
        projection: FP32's output along one fixed direction, and the candidate's, as one complex
            number; the candidate's is alike on all samples only where its answers are.
        decision_agreement: share of a sample's labels, pixels or boxes that are FP32's; 0 where
            nonfinite; None if the output has none.
        scores: by metric, shape ``(N,)`` or ``(N, K)``; see ``validation.score`` for what a column
            holds.
        own: by right-or-wrong metric, whether FP32 itself is right; the other columns of
            ``scores`` hold FP32's score themselves.
        traits: what parts of the data are cut by; see ``validation.agreement``.
        labels: by metric, and as ``accuracy``, what FP32 was scored against; shape ``(N, ...)``,
            from the data itself.
        task: what the output means.
    """

    scope: str
    ids: NDArray[np.str_]
    slices: Mapping[str, NDArray[np.str_]]
    top1_reference: NDArray[np.int64] | None
    top1_candidate: NDArray[np.int64] | None
    correct_reference: NDArray[np.bool_] | None
    correct_candidate: NDArray[np.bool_] | None
    kl_nats: NDArray[np.float64] | None
    max_abs_error: NDArray[np.float64]
    nonfinite: NDArray[np.bool_]
    rel_error: NDArray[np.float64] | None = None
    power: NDArray[np.complex128] | None = None
    cosine: NDArray[np.float64] | None = None
    projection: NDArray[np.complex128] | None = None
    decision_agreement: NDArray[np.float64] | None = None
    scores: Mapping[str, Array] = field(default_factory=dict)
    own: Mapping[str, Array] = field(default_factory=dict)
    traits: Mapping[str, Array] = field(default_factory=dict)
    labels: Mapping[str, Array] = field(default_factory=dict)
    task: OutputTask = "classification"

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def top1_match(self) -> NDArray[np.bool_]:
        """Whether both name the same class; true everywhere if the output has none."""
        if self.top1_reference is None or self.top1_candidate is None:
            return np.ones(len(self), dtype=np.bool_)
        return np.equal(self.top1_reference, self.top1_candidate)

    @property
    def accuracy_delta(self) -> NDArray[np.int8] | None:
        """Candidate minus reference correctness: -1 lost, 0 same, 1 gained; None without labels."""
        if self.correct_reference is None or self.correct_candidate is None:
            return None
        return self.correct_candidate.astype(np.int8) - self.correct_reference.astype(np.int8)

    def with_parts(self) -> "OutputComparison":
        """The same with a slice column for each trait; once, when all samples are together."""
        parts = parts_of(self.traits, self.slices)
        return replace(self, slices={**self.slices, **parts}, traits={})

    def with_variances(self, asked: OutputSpec) -> "OutputComparison":
        """The same with squared errors of r2 in variances; once, when all samples are together."""
        scaled = {
            name: in_variances(column, self.labels[name])
            for name, column in self.scores.items()
            if asked.metrics[name].kind == "r2" and len(column)
        }
        return replace(self, scores={**self.scores, **scaled}) if scaled else self

    def columns(self) -> dict[str, Array]:
        """What gates measure, by the name of the column they find it in; nothing that is absent."""
        found: dict[str, Array | None] = {
            "top1_reference": self.top1_reference,
            "top1_candidate": self.top1_candidate,
            "top1_match": None if self.top1_reference is None else self.top1_match,
            "kl_nats": self.kl_nats,
            # Boxes change places, so that nothing can be compared place by place.
            "max_abs_error": None if self.task == "detection" else self.max_abs_error,
            "nonfinite": self.nonfinite,
            "rel_error": self.rel_error,
            "power": self.power,
            "cosine": self.cosine,
            "decision_agreement": self.decision_agreement,
            "accuracy_delta": self.accuracy_delta,
        }
        found |= {f"score.{name}": values for name, values in self.scores.items()}
        return {name: values for name, values in found.items() if values is not None}

    def frame(
        self, only: Collection[str] | None = None, cut_by: Collection[str] | None = None
    ) -> "pd.DataFrame":
        """One row a sample: its id, each measurement, and ``slice.NAME`` for each slice column.

        Args:
            only: these measurements, and with ``nonfinite`` ids of those samples; None: all.
            cut_by: these slice columns; None: all.
        """
        import pandas as pd  # noqa: PLC0415 - slow to import, needed only when judging

        ids: dict[str, Array] = {"sample_id": self.ids} if only is None else {}
        if only is not None and "nonfinite" in only:
            # Only these are ever shown; text of millions of others would be most of the memory.
            named = np.full(len(self), "", dtype=object)
            named[self.nonfinite] = self.ids[self.nonfinite]
            ids["sample_id"] = named
        wanted = {n: v for n, v in self.columns().items() if only is None or n in only}
        columns = {
            name: values if values.ndim == 1 else pd.Series(list(values), dtype=object)
            for name, values in {**ids, **wanted}.items()
        }
        cuts = {
            f"slice.{name}": pd.Categorical(values)
            for name, values in self.slices.items()
            if cut_by is None or name in cut_by
        }
        return pd.DataFrame({**columns, **cuts})


def compare(
    reference: Tensors,
    candidate: Tensors,
    data: DataSet,
    scope: str,
    *,
    asked: OutputSpec = CLASSIFY,
) -> OutputComparison:
    """Compare the outputs of two engines on the same samples.

    Args:
        reference: FP32 outputs by name, each of shape ``(N, ...)``.
        candidate: outputs of the same names, types and shapes.
        data: the N samples they were computed from.
        scope: which samples these are, e.g. evaluation or shadow.
        asked: what the outputs mean; one output of classes, and all others by their error, if not
            given.

    Raises:
        DataError: outputs differ in name, type or shape, or do not have one row a sample; the
            output is not of its task; a label is no class; or the reference gave NaN or Inf.
    """
    name = check_form(reference, candidate, data, asked)
    own = {name, asked.form.scores, asked.form.classes} if asked.alone else set(reference)
    counted = {each: array for each, array in reference.items() if each in own}
    nonfinite = nonfinite_rows({n: candidate[n] for n in counted}, len(data))
    pair = Pair(reference[name], candidate[name], nonfinite)
    boxes = _boxes(reference, candidate, name, asked, pair)
    classes = asked.task == "classification"
    labels = labels_for(data, name, "top1", alone=asked.alone) if classes else None
    return OutputComparison(
        scope=asked.scope(scope),
        ids=data.ids,
        slices=data.slices,
        **(_classified(pair, labels) if classes else _UNCLASSIFIED),
        max_abs_error=np.where(nonfinite, np.inf, _max_abs_error(counted, candidate, len(data))),
        nonfinite=nonfinite,
        **_distances(pair, asked),
        **_scored(asked, name, pair, data, boxes),
        traits=traits_of(asked.traits, data, pair.reference if classes else None),
        labels=labels_by_measure(data, name, asked),
        task=asked.task,
    )


def concatenate_comparisons(parts: Sequence[OutputComparison]) -> OutputComparison:
    """One comparison of the samples of several, in order; for data that is run in pieces.

    Raises:
        DataError: there are none, or they differ in scope, slice columns or in having labels.
    """
    forms = {(part.scope, tuple(part.slices), part.correct_reference is None) for part in parts}
    if len(forms) != 1:
        raise DataError(
            f"Only comparisons of one scope, with the same slice columns and all with or all "
            f"without labels, make one comparison; {len(parts)} were given, of {len(forms)} kinds."
        )
    joined: dict[str, Any] = {"scope": parts[0].scope, "task": parts[0].task}
    for name in (each.name for each in fields(OutputComparison) if each.name not in joined):
        columns = [getattr(part, name) for part in parts]
        if name in _MAPPINGS:
            joined[name] = {key: np.concatenate([c[key] for c in columns]) for key in columns[0]}
        else:
            joined[name] = None if columns[0] is None else np.concatenate(columns)
    return OutputComparison(**joined)


@dataclass(frozen=True, slots=True)
class Pair:
    """One output of both engines.

    Attributes:
        reference: shape ``(N, ...)``, finite.
        candidate: the same shape.
        nonfinite: samples where the candidate gave NaN or Inf in any output that counts.
    """

    reference: Array
    candidate: Array
    nonfinite: NDArray[np.bool_]


def kl_divergence(reference_NC: Array, candidate_NC: Array) -> NDArray[np.float64]:
    """KL(reference || candidate) of the softmax of two logit arrays, per sample.

    Both are promoted to float64 first, so FP16 logits cannot overflow. A candidate row with NaN or
    Inf gives NaN or Inf; the caller says what that means.

    Args:
        reference_NC: finite logits, shape ``(N, C)``.
        candidate_NC: the same shape and class order.

    Returns:
        Shape ``(N,)``, in nats, never negative.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        log_p_NC = log_softmax(reference_NC.astype(np.float64), axis=1)
        log_q_NC = log_softmax(candidate_NC.astype(np.float64), axis=1)
        p_NC = np.exp(log_p_NC)
        terms_NC = np.where(p_NC > 0.0, p_NC * (log_p_NC - log_q_NC), 0.0)
        # Rounding can give -1e-17 where the distributions are equal.
        return np.asarray(np.maximum(terms_NC.sum(axis=1), 0.0))


_UNCLASSIFIED: Mapping[str, Any] = dict.fromkeys(
    ("top1_reference", "top1_candidate", "correct_reference", "correct_candidate", "kl_nats")
)


def _classified(pair: Pair, labels: Array | None) -> dict[str, Any]:
    expected = pair.reference.argmax(axis=1)
    found = np.where(pair.nonfinite, NO_CLASS, pair.candidate.argmax(axis=1))
    divergence = kl_divergence(pair.reference, pair.candidate)
    return {
        "top1_reference": expected,
        "top1_candidate": found,
        "correct_reference": None if labels is None else expected == labels,
        "correct_candidate": None if labels is None else found == labels,
        "kl_nats": np.where(pair.nonfinite, np.inf, divergence),
    }


def _distances(pair: Pair, asked: OutputSpec) -> dict[str, Any]:
    """Relative error, powers and cosine of each sample's output, over all its values.

    Numbers of classes are no quantities, and boxes change places: of these only the projection.
    """
    expected_NV = flat(pair.reference)
    found_NV = np.where(pair.nonfinite[:, None], 0.0, flat(pair.candidate))
    difference_NV = found_NV - expected_NV
    signal, noise = (np.einsum("nv,nv->n", x, x) for x in (expected_NV, difference_NV))
    length = np.sqrt(signal * np.einsum("nv,nv->n", found_NV, found_NV))
    aligned = np.einsum("nv,nv->n", expected_NV, found_NV)
    # Two outputs of zeros point the same way; one of zeros and one of anything else do not.
    cosine = np.where(noise == 0.0, 1.0, 0.0)
    np.divide(aligned, length, out=cosine, where=length > 0.0)
    largest = np.abs(difference_NV).max(axis=1, initial=0.0)
    relative = np.where(largest > 0.0, np.inf, 0.0)
    scale = np.abs(expected_NV).max(axis=1, initial=0.0)
    np.divide(largest, scale, out=relative, where=scale > 0.0)
    power = signal.astype(np.complex128)
    power.imag = np.where(pair.nonfinite, np.inf, noise)
    # No two outputs of a model are likely to be equal along this one.
    direction_V = np.cos(np.arange(1.0, expected_NV.shape[1] + 1.0))
    projection = (expected_NV @ direction_V).astype(np.complex128)
    projection.imag = found_NV @ direction_V
    class_map = asked.task == "segmentation" and pair.reference.dtype.kind in "iub"
    if asked.task == "detection" or class_map:
        return {"projection": projection}
    return {
        "rel_error": np.where(pair.nonfinite, np.inf, relative),
        "power": power,
        "projection": projection,
        "cosine": np.where(pair.nonfinite, -1.0, np.minimum(cosine, 1.0)),
    }


def _scored(
    asked: OutputSpec, name: str, pair: Pair, data: DataSet, boxes: tuple[Boxes, Boxes] | None
) -> dict[str, Any]:
    """A column for each metric that the data has labels for, and FP32's own where it has none.

    Args:
        boxes: of both engines, for a detection.
    """
    decided: tuple[Array, Array] | None = None
    found: dict[str, Any] = {"scores": {}, "own": {}}
    if asked.task in {"multi-label", "segmentation"}:
        decided = decisions_of(pair.reference, asked), decisions_of(pair.candidate, asked)
        found["decision_agreement"] = decision_agreement(*decided, pair.nonfinite)
    if boxes is not None:
        found["decision_agreement"] = box_agreement(*boxes, pair.nonfinite, asked.threshold)
    for metric_name, metric in asked.metrics.items():
        labels = labels_for(data, name, metric.kind, alone=asked.alone)
        if labels is None:
            continue
        form = paired_form(metric.kind)
        column: Array
        if boxes is not None and form == "boxes":
            column = box_column(labelled_boxes(labels, asked, data.origin), *boxes)
        elif decided is not None and form == "counts":
            column = _counted(asked, pair, labels, decided)
        elif decided is not None and metric.kind == "exact_match":
            own = exact_match(labels, decided[0])
            right = exact_match(labels, decided[1]) & ~pair.nonfinite
            found["own"][metric_name] = own
            column = right.astype(np.int8) - own.astype(np.int8)
        else:
            mine = own_score(metric, pair.reference, labels)
            if mine is not None:
                found["own"][metric_name] = mine
            column = score(metric, pair.reference, pair.candidate, labels, pair.nonfinite, own=mine)
        found["scores"][metric_name] = column
    return found


def _counted(
    asked: OutputSpec, pair: Pair, labels: Array, decided: tuple[Array, Array]
) -> NDArray[np.int32]:
    if asked.task == "multi-label":
        return count_labels(labels, *decided, pair.nonfinite)
    return count_pixels(labels, decided, pair.nonfinite, pair.reference, asked)


def _boxes(
    reference: Tensors, candidate: Tensors, name: str, asked: OutputSpec, pair: Pair
) -> tuple[Boxes, Boxes] | None:
    if asked.task != "detection":
        return None
    expected, found = (boxes_of(each, name, asked) for each in (reference, candidate))
    return expected, without_nonfinite(found, pair.nonfinite)


def _max_abs_error(reference: Tensors, candidate: Tensors, samples: int) -> NDArray[np.float64]:
    worst = np.zeros(samples)
    with np.errstate(invalid="ignore", over="ignore"):
        for name, expected in reference.items():
            difference = candidate[name].astype(np.float64) - expected.astype(np.float64)
            beyond_first = tuple(range(1, difference.ndim))
            worst = np.maximum(worst, np.abs(difference).max(axis=beyond_first, initial=0))
    return worst


# Traits are noted sample by sample while the data streams by, and cut into slices at the end. They
# come from the input and from FP32 only, so every candidate is judged on the same slices.
_CONFIDENCES = (0.5, 0.9, 0.99)
_QUARTERS = (0.25, 0.5, 0.75)


def traits_of(wanted: tuple[Trait, ...], data: DataSet, logits: Array | None) -> dict[str, Array]:
    """Each trait of N samples, shape ``(N,)``.

    Args:
        wanted: traits by name.
        data: the samples.
        logits: FP32's class logits, shape ``(N, C)``; None if the output has none.

    Raises:
        PolicyError: confidence was asked of an output without classes.
        DataError: the length was asked, and no input is a sequence.
    """
    found: dict[str, Array] = {}
    if "confidence" in wanted:
        if logits is None:
            raise PolicyError(
                "slices.discover names confidence, and this output has no classes. Leave it out."
            )
        wide = logits.astype(np.float64)
        found["confidence"] = np.exp(wide.max(axis=1) - logsumexp(wide, axis=1))
    if "input_norm" in wanted:
        found["input_norm"] = _norms(data)
    if "length" in wanted:
        found["length"] = _lengths(data)
    return found


def parts_of(traits: Mapping[str, Array], taken: Iterable[str]) -> dict[str, NDArray[np.str_]]:
    """A slice column for each trait, by its name.

    Raises:
        DataError: a name is among those ``taken`` by the data's own slice columns.
    """
    if clash := sorted(traits.keys() & set(taken)):
        raise DataError(
            f"The data has slice columns {clash}, which slices.discover would make too. Rename the "
            "columns, or leave those names out of slices.discover."
        )
    return {name: _cut(name, values) for name, values in traits.items()}


def _norms(data: DataSet) -> NDArray[np.float64]:
    squares = np.zeros(len(data))
    for array in data.inputs.values():
        if array.dtype.kind == "f":
            wide = flat(array)
            squares += np.einsum("nv,nv->n", wide, wide)
    return np.sqrt(squares)


def _lengths(data: DataSet) -> NDArray[np.int64]:
    sequences = {n: a for n, a in data.inputs.items() if a.ndim == 2 and a.dtype.kind in "iub"}  # noqa: PLR2004 - (samples, positions)
    if not sequences:
        raise DataError(
            f"{data.origin}: slices.discover names length, and no input holds sequences (whole "
            f"numbers, shape (samples, positions)); inputs: {sorted(data.inputs)}. Leave it out."
        )
    array = sequences.get("attention_mask", next(iter(sequences.values())))
    return np.asarray((array != 0).sum(axis=1), dtype=np.int64)


def _cut(name: str, values: Array) -> NDArray[np.str_]:
    if name == "confidence":
        return _named(values, np.array(_CONFIDENCES), "below {:g}", "{:g} and up")
    if name == "length":
        ends = 2 ** np.arange(0, int(values.max(initial=1)).bit_length() + 1)
        return np.array([f"up to {ends[i]}" for i in np.searchsorted(ends, values)], dtype=np.str_)
    edges = np.quantile(values, _QUARTERS) if len(values) else np.array(_QUARTERS)
    names = np.array(["lowest quarter", "second quarter", "third quarter", "highest quarter"])
    return np.asarray(names[np.searchsorted(edges, values, side="right")])


def _named(values: Array, edges: Array, first: str, last: str) -> NDArray[np.str_]:
    between = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
    names = np.array([first.format(edges[0]), *between, last.format(edges[-1])])
    return np.asarray(names[np.searchsorted(edges, values, side="right")])
