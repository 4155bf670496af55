"""What must hold before a shadow sample can be evidence.

A candidate is compared with the reference replayed on the recorded inputs, never with the recorded
outputs: Triton's trace writes six significant digits, so those are only good enough to tell whether
the sample belongs to this model at all.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, DataSet, Tensors
from enginegate.evidence import Finding, Outcome
from enginegate.policy.gates import Gates
from validation.agreement import OutputComparison

# Six digits are 5e-6 of a value, in the recorded inputs too; a layer may amplify those.
TRACE_TOLERANCE = 1e-4


def judge_recording(
    recorded: Tensors,
    replayed: Tensors,
    data: DataSet,
    *,
    tolerance: float = TRACE_TOLERANCE,
    advisory: bool = False,
) -> Finding:
    """Whether the recorded FP32 outputs are what the reference gives on the recorded inputs.

    Args:
        recorded: outputs as the trace holds them, shape ``(N, ...)`` each.
        replayed: outputs of the reference on ``data``.
        data: the recorded samples.
        tolerance: difference allowed, relative to a sample's largest output.
        advisory: the outputs are of a live release, which need not answer like this reference.
    """
    worst = np.zeros(len(data))
    for name, expected in replayed.items():
        if name not in recorded or recorded[name].shape != expected.shape:
            return _another_form(recorded, name, expected, advisory=advisory)
        worst = np.maximum(worst, _relative_error(recorded[name], expected))
    largest = float(worst.max(initial=0.0))
    differing = int((~(worst <= tolerance)).sum())
    holds = len(data) > 0 and differing == 0
    return Finding(
        gate="shadow_integrity",
        scope="shadow",
        outcome=Outcome.PASSED if holds else Outcome.INCONCLUSIVE,
        reason=f"largest relative difference between recorded and replayed outputs {largest:.3g} "
        f"{'<=' if holds else '>'} {tolerance:g}; {differing} of {len(data)} samples differ",
        value=largest if np.isfinite(largest) else None,
        limit=tolerance,
        relation="<=",
        samples=len(data),
        advisory=advisory,
        remedy="" if holds else "Record the sample again: it seems to be of another model version.",
    )


def _another_form(recorded: Tensors, name: str, expected: Array, *, advisory: bool) -> Finding:
    found = f"of shape {recorded[name].shape}" if name in recorded else "missing"
    return Finding(
        gate="shadow_integrity",
        scope="shadow",
        outcome=Outcome.INCONCLUSIVE,
        reason=f"recorded output {name!r} is {found}, the reference gives {expected.shape}: the "
        "sample is of another model",
        samples=len(expected),
        advisory=advisory,
        remedy="Record the sample again, from this model.",
    )


def judge_version(
    model: str, rows: Mapping[int, int], *, wanted: str, version: int | None
) -> Finding:
    """Whether a sample was recorded from the model it is used for, and from one version of it.

    Args:
        model: whose requests they are.
        rows: count of rows by the version that answered; version 0 was not reported.
        wanted: the policy's model.
        version: the only one it may be of, when it was recorded for this; else any one will do,
            and several are a note: their inputs are evidence, their outputs are of several models.
    """
    versions = sorted(rows)
    several = len(versions) != 1 or (version is not None and versions != [version])
    told = ", ".join(
        f"version {v} ({rows[v]} rows)" if v else f"{rows[v]} rows not reported" for v in versions
    )
    reason, remedy = f"recorded from {model}: {told or 'nothing'}", ""
    if model != wanted:
        reason += f"; the policy is about {wanted}"
        remedy = f"Record {wanted}, or name another sample in [data] shadow."
    elif several:
        remedy = "Record again while one version serves, or look at what changed in between."
    holds = model == wanted and not several
    return Finding(
        gate="shadow_version",
        scope="shadow",
        outcome=Outcome.PASSED if holds else Outcome.INCONCLUSIVE,
        reason=reason,
        value=len(versions),
        limit=1,
        relation="<=",
        unit="versions",
        samples=sum(rows.values()),
        advisory=model == wanted and version is None,
        remedy=remedy,
    )


def not_replayable(origin: str, withheld: tuple[str, ...], samples: int) -> Finding:
    """A sample whose inputs were redacted says nothing about a candidate: inconclusive."""
    return Finding(
        gate="shadow_integrity",
        scope="shadow",
        outcome=Outcome.INCONCLUSIVE,
        reason=f"{origin} was recorded without {', '.join(withheld) or 'inputs'}, so it cannot be "
        "replayed",
        samples=samples,
        remedy="Record a sample with the model's inputs (a redactor may rewrite them), or take "
        "[data] shadow out of the policy.",
    )


def judge_noise(noise: OutputComparison, gates: Gates) -> Finding:
    """Whether the error limit is above the reference's own noise.

    Diffy's idea: what the reference does not reproduce cannot be blamed on a candidate.

    Args:
        noise: the reference compared with a second run of itself.
        gates: limits of the candidate that is to be judged.
    """
    largest = float(noise.max_abs_error.max(initial=0.0))
    limit = gates.max_abs_error
    above = len(noise) > 0 and largest <= (np.finfo(np.float64).max if limit is None else limit)
    relation = "<=" if above else ">"
    against = "; no limit on it" if limit is None else f" {relation} {limit:g}"
    return Finding(
        gate="noise_floor",
        scope=noise.scope,
        outcome=Outcome.PASSED if above else Outcome.INCONCLUSIVE,
        reason=f"FP32 differs from itself by {largest:.3g}{against}; {_changed(noise)}",
        value=largest if np.isfinite(largest) else None,
        limit=limit,
        relation="<=",
        samples=len(noise),
        advisory="noise_floor" in gates.advisory,
        remedy="" if above else "No candidate can be judged below this; raise max_abs_error.",
    )


def _changed(noise: OutputComparison) -> str:
    """What that does to FP32's answers, in the words of their task."""
    samples = len(noise)
    if noise.top1_reference is not None:
        return f"{int((~noise.top1_match).sum())} of {samples} top classes changed"
    if noise.decision_agreement is not None:
        changed = int((noise.decision_agreement < 1.0).sum())
        decided = {"multi-label": "labels", "segmentation": "pixels"}.get(noise.task, "boxes")
        return f"{decided} changed in {changed} of {samples} samples"
    return f"{int((noise.max_abs_error > 0.0).sum())} of {samples} answers changed"


def _relative_error(recorded: Array, replayed: Array) -> NDArray[np.float64]:
    """Largest difference of each sample, relative to its largest replayed value; shape ``(N,)``."""
    beyond_first = tuple(range(1, replayed.ndim))
    scale = np.abs(replayed).astype(np.float64).max(axis=beyond_first, initial=0.0)
    error = np.abs(recorded.astype(np.float64) - replayed.astype(np.float64))
    largest = error.max(axis=beyond_first, initial=0.0)
    relative = np.where(largest > 0.0, np.inf, 0.0)
    np.divide(largest, scale, out=relative, where=scale > 0.0)
    return relative
