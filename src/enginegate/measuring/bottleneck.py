"""Where the time of a measurement goes, in words, and what to try.

Triton counts totals, so what it says about stages are means. A percentile cannot be split with
them: what is said about p99 here is what follows if the slowest requests were computed as fast as
the others, and it says so.
"""

from typing import NamedTuple

from enginegate.measurement import Measurement, StageSplit
from enginegate.messages import short_number

_ADVICE = {
    "queueing": "add instances, shorten max_queue_delay, or let batches grow",
    "computing": "use a faster precision or engine, or smaller batches",
    "preparing inputs": "send fewer or smaller inputs, or use shared memory",
    "returning outputs": "return fewer or smaller outputs, or use shared memory",
    "client and network": "send over gRPC or shared memory, or give the clients more processor",
}
# Batches this full on average are called nearly empty; this share of full ones, mostly full.
_NEARLY_EMPTY, _MOSTLY_FULL = 0.25, 0.5


class StageShare(NamedTuple):
    """One part of the mean time of a request."""

    name: str
    time_ms: float
    share: float


def latency_breakdown(stages: StageSplit) -> tuple[StageShare, ...]:
    """The parts of the mean time of a request, largest first; shares add up to 1.

    The client's part is there when the clients' own mean was known.
    """
    times_ms = _server_ms(stages)
    if stages.client_ms is not None:
        times_ms["client and network"] = stages.client_ms
    return _ordered(times_ms)


def largest_stage(measurement: Measurement) -> str:
    """Where most of the server's time goes, and what to try; empty when it was not counted."""
    if measurement.stages is None:
        return ""
    found = _ordered(_server_ms(measurement.stages))
    if not found:
        return ""
    name, _, share = found[0]
    return f"{name} is {share:.0%} of the mean server time: {_ADVICE[name]}"


def explain_p99(measurement: Measurement, limit_ms: float) -> str:
    """What p99 is, which part of a request's time is the largest, and what to try, in sentences."""
    p99 = measurement.p99
    if p99 is None:
        return _failures(measurement)
    relation = "within" if p99.value_ms <= limit_ms else "above"
    said = [f"p99 is {short_number(p99.value_ms)} ms, {relation} the limit of {limit_ms:g} ms."]
    found = latency_breakdown(measurement.stages) if measurement.stages else ()
    if measurement.stages is None or not found:
        return f"{said[0]} What the server did meanwhile was not counted."
    whole = "mean server time" if measurement.stages.client_ms is None else "mean time of a request"
    largest = found[0]
    said.append(
        f"{largest.share:.0%} of the {whole} is {largest.name} "
        f"({short_number(largest.time_ms)} "
        f"ms): {_ADVICE[largest.name]}."
    )
    said.append(_tail(p99.value_ms, found))
    said.append(_batches(measurement, measurement.stages, largest.name))
    return " ".join(sentence for sentence in said if sentence)


def _server_ms(stages: StageSplit) -> dict[str, float]:
    return {
        "queueing": stages.queue_ms,
        "computing": stages.compute_infer_ms,
        "preparing inputs": stages.compute_input_ms,
        "returning outputs": stages.compute_output_ms,
    }


def _ordered(times_ms: dict[str, float]) -> tuple[StageShare, ...]:
    total_ms = sum(times_ms.values())
    if total_ms == 0.0:
        return ()
    found = [StageShare(name, time_ms, time_ms / total_ms) for name, time_ms in times_ms.items()]
    return tuple(sorted(found, key=lambda bucket: -bucket.time_ms))


def _failures(measurement: Measurement) -> str:
    asked = measurement.completed + measurement.failed
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(measurement.errors.items()))
    if not asked:
        return "Nothing was measured, so there is no p99."
    return (
        f"p99 falls on failed requests: {measurement.failed} of {asked} failed"
        f"{f' ({kinds})' if kinds else ''}. Look at the failures before the latency: RESOURCE and "
        "UNAVAILABLE are refusals of a full queue, DEADLINE_EXCEEDED are requests that waited."
    )


def _tail(p99_ms: float, found: tuple[StageShare, ...]) -> str:
    """What p99 is beyond a mean execution; nothing when that would say nothing."""
    mean_ms = sum(bucket.time_ms for bucket in found)
    working_ms = sum(b.time_ms for b in found if b.name not in {"queueing", "client and network"})
    if p99_ms <= mean_ms or p99_ms <= working_ms:
        return ""
    return (
        f"p99 is {p99_ms / mean_ms:.2g} times the mean; if the slowest requests were executed as "
        f"fast as the mean ({short_number(working_ms)} ms), {1 - working_ms / p99_ms:.0%} of it is "
        "waiting (the server counts means only, so this is not measured)."
    )


def _batches(measurement: Measurement, stages: StageSplit, largest: str) -> str:
    allowed, executions = measurement.config.max_batch_size, sum(stages.batches.values())
    if allowed == 1 or not measurement.config.dynamic_batching:
        return "Every request runs alone: allow batches." if largest == "queueing" else ""
    full = stages.batches.get(allowed, 0) / executions if executions else 0.0
    if full >= _MOSTLY_FULL:
        return (
            f"{full:.0%} of the executions were as large as allowed ({allowed}): a larger "
            "max_batch_size or more instances may carry more."
        )
    if largest != "queueing" and stages.mean_batch_size <= _NEARLY_EMPTY * allowed:
        return (
            f"Batches had {stages.mean_batch_size:.2g} of at most {allowed}: a longer "
            "max_queue_delay would fill them, at the price of waiting."
        )
    return ""
