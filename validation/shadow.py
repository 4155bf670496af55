"""What must hold before a shadow sample can be evidence.

A candidate is compared with the reference replayed on the recorded inputs, never with the recorded
outputs: Triton's trace writes six significant digits, so those are only good enough to tell whether
the sample belongs to this model at all.
"""

import numpy as np
from numpy.typing import NDArray

from enginegate.data import Array, DataSet, Tensors
from enginegate.errors import DataError
from enginegate.evidence import Finding, Outcome
from enginegate.policy import Gates
from validation.agreement import Comparison

# Six digits are 5e-6 of a value, in the recorded inputs too; a layer may amplify those.
TRACE_TOLERANCE = 1e-4


def judge_recording(
    recorded: Tensors, replayed: Tensors, data: DataSet, *, tolerance: float = TRACE_TOLERANCE
) -> Finding:
    """Whether the recorded FP32 outputs are what the reference gives on the recorded inputs.

    Args:
        recorded: outputs as the trace holds them, shape ``(N, ...)`` each.
        replayed: outputs of the reference on ``data``.
        data: the recorded samples.
        tolerance: difference allowed, relative to a sample's largest output.

    Raises:
        DataError: an output was not recorded, or in another shape.
    """
    worst = np.zeros(len(data))
    for name, expected in replayed.items():
        if name not in recorded or recorded[name].shape != expected.shape:
            found = recorded[name].shape if name in recorded else "missing"
            raise DataError(
                f"{data.origin}: recorded output {name!r} is {found}, the reference gives "
                f"{expected.shape}. The sample is of another model; record it again."
            )
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
        remedy="" if holds else "Record the sample again: it seems to be of another model version.",
    )


def judge_noise(noise: Comparison, gates: Gates) -> Finding:
    """Whether the error limit is above the reference's own noise.

    Diffy's idea: what the reference does not reproduce cannot be blamed on a candidate.

    Args:
        noise: the reference compared with a second run of itself.
        gates: limits of the candidate that is to be judged.
    """
    largest = float(noise.max_abs_error.max(initial=0.0))
    flips = int((~noise.top1_match).sum())
    above = len(noise) > 0 and largest <= gates.max_abs_error
    return Finding(
        gate="noise_floor",
        scope=noise.scope,
        outcome=Outcome.PASSED if above else Outcome.INCONCLUSIVE,
        reason=f"FP32 differs from itself by {largest:.3g} {'<=' if above else '>'} "
        f"{gates.max_abs_error:g}; {flips} of {len(noise)} top classes changed",
        value=largest if np.isfinite(largest) else None,
        limit=gates.max_abs_error,
        relation="<=",
        samples=len(noise),
        advisory="noise_floor" in gates.advisory,
        remedy="" if above else "No candidate can be judged below this; raise max_abs_error.",
    )


def _relative_error(recorded: Array, replayed: Array) -> NDArray[np.float64]:
    """Largest difference of each sample, relative to its largest replayed value; shape ``(N,)``."""
    beyond_first = tuple(range(1, replayed.ndim))
    scale = np.abs(replayed).astype(np.float64).max(axis=beyond_first, initial=0.0)
    error = np.abs(recorded.astype(np.float64) - replayed.astype(np.float64))
    largest = error.max(axis=beyond_first, initial=0.0)
    relative = np.where(largest > 0.0, np.inf, 0.0)
    np.divide(largest, scale, out=relative, where=scale > 0.0)
    return relative
