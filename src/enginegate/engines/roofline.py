"""Whether arithmetic or memory traffic limits an engine (Williams, Waterman and Patterson, 2009).

The work of a batch is counted on its graph (work.py), the ceilings of the device are measured
(ceilings.py). A batch can take no less than its operations at the one ceiling, and no less than its
traffic at the other: the larger of the two is what limits it.
"""

from typing import Literal

from enginegate.engines.peak_throughput import PeakThroughput
from enginegate.engines.work import Work
from enginegate.evidence import Roofline

_MIN_COVERED = 0.8


def roofline(
    work: Work,
    found: PeakThroughput,
    *,
    samples_per_s: float | None = None,
    instances: int = 1,
) -> Roofline:
    """What limits one batch, and how near its limit the engine comes.

    Args:
        work: of one batch.
        found: of the device it runs on, in its precision.
        samples_per_s: what was measured, all instances together; None: not measured.
        instances: that ran; on a processor each has one thread.
    """
    flops_per_s = found.flops_for(instances)
    limit_s = _limit_s(work, flops_per_s, found.bytes_per_s)
    reached = None
    if limit_s and samples_per_s is not None:
        reached = limit_s * samples_per_s / work.batch_size
    return Roofline(
        batch_size=work.batch_size,
        flops=work.flops,
        bytes_moved=work.bytes_moved,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=found.bytes_per_s,
        bound=_bound(work, flops_per_s, found.bytes_per_s),
        reached=reached,
    )


def explain(line: Roofline, work: Work) -> str:
    """The same in a sentence, with what was not counted."""
    size = f"batch {line.batch_size}: {line.flops:.3g} operations, {line.bytes_moved:.3g} bytes"
    if line.peak_flops_per_s is None or line.peak_bytes_per_s is None:
        said = f"{size}; the device's ceilings are not known"
    else:
        ridge = line.peak_flops_per_s / line.peak_bytes_per_s
        said = (
            f"{size}, {line.flops / max(line.bytes_moved, 1.0):.3g} operations a byte where "
            f"{ridge:.3g} would balance: {_WORDS[line.bound]}"
        )
    if line.reached is not None:
        said += f"; reaches {line.reached:.0%} of what that allows"
    if work.uncounted:
        missing = ", ".join(f"{count} {kind}" for kind, count in work.uncounted.items())
        said += f" ({work.covered:.0%} of the graph's nodes counted, not {missing})"
    return said


_WORDS = {"compute": "compute-bound", "memory": "memory-bound", "unknown": "not decided"}


def _limit_s(work: Work, flops_per_s: float | None, bytes_per_s: float | None) -> float | None:
    if not flops_per_s or not bytes_per_s:
        return None
    return max(work.flops / flops_per_s, work.bytes_moved / bytes_per_s)


def _bound(
    work: Work, flops_per_s: float | None, bytes_per_s: float | None
) -> Literal["compute", "memory", "unknown"]:
    if not flops_per_s or not bytes_per_s or not work.flops or work.covered < _MIN_COVERED:
        return "unknown"
    by_arithmetic = work.flops / flops_per_s >= work.bytes_moved / bytes_per_s
    return "compute" if by_arithmetic else "memory"
