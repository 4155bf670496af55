"""Whether an engine computes in what its name says: a pure judgement over counts."""

from collections.abc import Mapping

from enginegate.candidate import Candidate, Precision, PrecisionProof
from enginegate.engines.typed import Typed
from enginegate.precision import Census

_HALVES = frozenset({Precision.FP16, Precision.BF16})


def prove(
    candidate: Candidate,
    census: Census,
    *,
    device: str,
    doubts: tuple[str, ...] = (),
    typed: Typed | None = None,
    executed: Mapping[str, int] | None = None,
) -> PrecisionProof:
    """Judge the layer counts of the graph that was compiled or loaded.

    Args:
        census: counts of that graph.
        device: what runs it.
        doubts: what else was found that contradicts the name; any of it refutes the proof.
        typed: its operations and weights by type.
        executed: layers by type in the graph that the runtime made of it; None if it shows none.
    """
    weighted = _as_tf32(candidate.precision, census.weighted)
    ran = _as_tf32(candidate.precision, executed or {})
    found = ", ".join(f"{count} {word}" for word, count in weighted.items()) or "none"
    reasons = [
        *_missing(candidate.precision, weighted, census.quantised),
        *(_not_executed(candidate.precision, ran) if executed is not None else ()),
        *doubts,
    ]
    summary = f"Conv, Gemm and MatMul layers: {found}; {census.quantised} fed by Q/DQ pairs"
    return PrecisionProof(
        weighted_layers=weighted,
        quantised_layers=census.quantised,
        flops=_as_tf32(candidate.precision, typed.flops) if typed else {},
        weights=typed.weights if typed else {},
        executed_layers=ran,
        device=device,
        proven=not reasons,
        detail=f"{summary}. {' '.join(reasons)}".rstrip(),
    )


def _as_tf32(precision: Precision, counts: Mapping[str, int]) -> dict[str, int]:
    if precision is not Precision.TF32:
        return dict(counts)
    return {"tf32" if word == "fp32" else word: count for word, count in counts.items()}


def _not_executed(precision: Precision, ran: Mapping[str, int]) -> list[str]:
    """Whether the runtime kept the type, or computes in another one between conversions."""
    word = precision.value
    if ran.get(word) or (precision not in _HALVES and not precision.needs_calibration):
        return []
    found = ", ".join(f"{count} {other}" for other, count in ran.items()) or "none"
    return [f"The graph that runs has no {word} layer (it has {found}): values are converted back."]


def _missing(precision: Precision, weighted: dict[str, int], quantised: int) -> list[str]:
    word = precision.value
    if precision.needs_calibration and not (quantised and weighted.get(word)):
        return [f"No layer is quantised to {word}, as the name says."]
    if precision in _HALVES and not weighted.get(word):
        return [f"No layer computes in {word}, as the name says."]
    others = sorted(set(weighted) - {word})
    if precision in {Precision.FP32, Precision.TF32} and others:
        return [f"Layers compute in {', '.join(others)}, not only in {word}."]
    return []
