"""Whether an engine computes in what its name says: a pure judgement over counts."""

from enginegate.candidate import Candidate, Precision, PrecisionProof
from enginegate.precision import Census

_HALVES = frozenset({Precision.FP16, Precision.BF16})


def prove(
    candidate: Candidate, census: Census, *, device: str, doubts: tuple[str, ...] = ()
) -> PrecisionProof:
    """Judge the layer counts of the graph that was compiled or loaded.

    Args:
        census: counts of that graph.
        device: what runs it.
        doubts: what else was found that contradicts the name; any of it refutes the proof.
    """
    weighted = dict(census.weighted)
    if candidate.precision is Precision.TF32:
        weighted = {"tf32" if word == "fp32" else word: n for word, n in weighted.items()}
    found = ", ".join(f"{count} {word}" for word, count in weighted.items()) or "none"
    reasons = [*_missing(candidate.precision, weighted, census.quantised), *doubts]
    summary = f"Conv, Gemm and MatMul layers: {found}; {census.quantised} fed by Q/DQ pairs"
    return PrecisionProof(
        weighted_layers=weighted,
        quantised_layers=census.quantised,
        device=device,
        proven=not reasons,
        detail=f"{summary}. {' '.join(reasons)}".rstrip(),
    )


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
