"""Whether a run was still warming up after what is cut from every run.

From every run the same is left out: its first tenth, at most two seconds (`measure.skipped_s`), and
of that only what was answered. Nothing that is found in the answers makes it more, and a failure is
never left out, so no choice of this program turns a run that misses an SLO into one that holds it.

A start that is slow for longer than that is counted in full where the model was warm already: it is
the server's. Right after a load it may be the model's first executions; then the run is void
("still warming up") and is measured again, now warm, and counted in full.

Method: Welch's procedure (The Statistical Analysis of Simulation Results, 1983), where the eye is
replaced by a rule: the run is cut into windows of equal count, and it is warm from the first window
whose median is within the range of the second half. Medians, and the first such window, because a
stall of the server is no warm-up; MSER-5 (White, Cobb and Spratt, 2000), which minimises the error
of a mean, may take all that precedes one late stall for one. A start that is faster than the rest
is no warm-up either: that is a queue filling up. Nor is one in which requests failed.
"""

import numpy as np
from numpy.typing import NDArray

_WINDOWS = 20
_FEWEST_WINDOWS = 8
_FEWEST_REQUESTS = 10
_DEVIATIONS = 3.0
_SHARE = 0.1
_NORMAL = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


def slow_until_s(due_s: NDArray[np.float64], latency_s: NDArray[np.float64]) -> float:
    """Seconds from the start for which a run was slower than its rest; 0 when it was not.

    At most about half of the run; a start that is slow for longer has no rest to compare with.

    Args:
        due_s: when each request should have left, ascending, shape ``(R,)``.
        latency_s: infinite for a failure, shape ``(R,)``.
    """
    windows = min(_WINDOWS, len(latency_s) // _FEWEST_REQUESTS)
    if windows < _FEWEST_WINDOWS:
        return 0.0
    parts = np.array_split(latency_s, windows)
    warm = _first_warm(np.array([np.median(part) for part in parts]))
    if not all(np.isfinite(part).all() for part in parts[:warm]):
        return 0.0
    return float(np.array_split(due_s, windows)[warm][0]) if warm else 0.0


def _first_warm(medians: NDArray[np.float64]) -> int:
    """Index of the first window of the warm part, at most the middle one."""
    half = len(medians) // 2
    usual = float(np.median(medians[half:]))
    if not np.isfinite(usual):
        return 0
    spread = _NORMAL * float(np.median(np.abs(medians[half:] - usual)))
    settled = medians <= usual + max(_DEVIATIONS * spread, _SHARE * usual)
    return next((index for index in range(half) if settled[index]), half)
