"""Whether an engine computes in what its name says: a pure judgement over counts."""

from collections.abc import Mapping

from enginegate.candidate import Candidate, Precision, PrecisionProof
from enginegate.precision import GraphStats

_LEAST_SHARE = 0.5  # of the operations


def check_precision_proof(
    candidate: Candidate,
    stats: GraphStats,
    *,
    device: str,
    doubts: tuple[str, ...] = (),
    executed: Mapping[str, int] | None = None,
) -> PrecisionProof:
    """Judge the layer counts of the graph that was compiled or loaded.

    Args:
        stats: of that graph.
        device: what runs it.
        doubts: what else was found that contradicts the name; any of it refutes the proof.
        executed: layers by type in the graph that the runtime made of it; None if it shows none.
    """
    weighted = _as_tf32(candidate.precision, stats.layers)
    ran = _as_tf32(candidate.precision, executed or {})
    found, word = _listed(weighted), candidate.precision.value
    mixed = not candidate.precision.is_as_exported and len(weighted) > 1 and word in weighted
    shares = _shares(word, weighted, stats)
    reasons = [
        *_missing(candidate.precision, weighted, stats.quantised),
        *(_minority(candidate, shares) if mixed else ()),
        *(_not_executed(candidate.precision, ran) if executed is not None else ()),
        *doubts,
    ]
    summary = f"Conv, Gemm and MatMul layers: {found}; {stats.quantised} fed by Q/DQ pairs"
    if stats.recurrent:
        summary = (
            f"Conv, Gemm, MatMul and recurrent layers: {found}; {stats.quantised} fed by Q/DQ "
            f"pairs; {_listed(stats.recurrent)} of them recurrent"
        )
    if mixed:
        told = ", ".join(f"{share:.1%} of the {of}" for of, share in shares.items())
        summary = f"{summary}; {word}: {told}"
    return PrecisionProof(
        weighted_layers=weighted,
        quantised_layers=stats.quantised,
        flops=_as_tf32(candidate.precision, stats.layer_flops),
        weights=stats.weights,
        executed_layers=ran,
        device=device,
        proven=not reasons,
        detail=f"{summary}. {' '.join(reasons)}".rstrip(),
    )


def _as_tf32(precision: Precision, counts: Mapping[str, int]) -> dict[str, int]:
    if precision is not Precision.TF32:
        return dict(counts)
    return {"tf32" if word == "fp32" else word: count for word, count in counts.items()}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.items()) or "none"


def _shares(word: str, weighted: Mapping[str, int], stats: GraphStats) -> dict[str, float]:
    """How much of the computing is of a type, 0 to 1; the most telling measure that is known first.

    Operations are known where all shapes are.
    """
    counts = {"layers": weighted}
    counts |= {"layers' weights": stats.layer_weights} if stats.layer_weights else {}
    counts |= {"operations": stats.layer_flops} if stats.layer_flops and not stats.unsized else {}
    return {of: _share(word, found) for of, found in reversed(counts.items())}


def _minority(candidate: Candidate, shares: Mapping[str, float]) -> list[str]:
    """Whether less than half of the computing is in the type that the name says.

    Not of a repaired candidate: its name says that nodes are kept at FP32, and the policy's
    max_kept_share how many may be.
    """
    word = candidate.precision.value
    if candidate.is_repaired or next(iter(shares.values())) >= _LEAST_SHARE:
        return []
    return [
        (
            f"Less than half of it computes in {word}, so it is not what its name says. Drop "
            f"{word} from [candidates], or export the model with layers that can be converted."
        )
    ]


def _share(word: str, counts: Mapping[str, int]) -> float:
    return counts.get(word, 0) / max(sum(counts.values()), 1)


def _not_executed(precision: Precision, ran: Mapping[str, int]) -> list[str]:
    """Whether the runtime kept the type, or computes in another one between conversions."""
    word = precision.value
    if ran.get(word) or precision.is_as_exported:
        return []
    found = _listed(ran)
    return [f"The graph that runs has no {word} layer (it has {found}): values are converted back."]


def _missing(precision: Precision, weighted: dict[str, int], quantised: int) -> list[str]:
    word = precision.value
    if precision.needs_calibration and not (quantised and weighted.get(word)):
        return [f"No layer is quantised to {word}, as the name says."]
    if precision.is_16_bit and not weighted.get(word):
        return [f"No layer computes in {word}, as the name says."]
    others = sorted(set(weighted) - {word})
    if precision.is_as_exported and others:
        return [f"Layers compute in {', '.join(others)}, not only in {word}."]
    return []
