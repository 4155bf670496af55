"""Small literal evidence for tests that need some; each argument changes one fact."""

from datetime import UTC, datetime

from enginegate.candidate import Candidate, FileDigest, Precision
from enginegate.decision import Decision, Promise, Release, ReleasedEngine
from enginegate.evidence import (
    BatchSpeed,
    Benchmark,
    DataDigests,
    EngineSpeed,
    Finding,
    Outcome,
    Scorecard,
    Verdict,
)
from enginegate.measurement import Percentile
from enginegate.serving import ServingConfig

WHEN = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
INT8 = Candidate(kind="onnxruntime", precision=Precision.INT8)
FP32 = Candidate(kind="onnxruntime", precision=Precision.FP32)
SERVING = ServingConfig(max_batch_size=8, max_queue_delay_us=500, instances=1)


def sha(character: str) -> str:
    """A digest that is easy to tell from others."""
    return character * 64


def finding(outcome: Outcome = Outcome.PASSED, *, gate: str = "samples", **fields) -> Finding:
    return Finding(gate=gate, scope="evaluation", outcome=outcome, reason="900 >= 200", **fields)


def verdict(*findings: Finding, candidate: Candidate = INT8, engine: str | None = "e") -> Verdict:
    return Verdict(
        candidate=candidate,
        engine_sha256=sha(engine) if engine else None,
        findings=findings or (finding(),),
    )


def benchmark(
    throughput_per_s: float = 400.0,
    *,
    candidate: Candidate = INT8,
    outcome: Outcome = Outcome.PASSED,
    p99_ms: float = 9.0,
) -> Benchmark:
    return Benchmark(
        candidate=candidate,
        engine_sha256=sha("e"),
        server="Triton 2.51.0, CPU",
        measurements=(),
        chosen=SERVING,
        throughput_at_slo_per_s=throughput_per_s,
        p99_at_slo=Percentile(
            quantile=0.99, value_ms=p99_ms, low_ms=p99_ms - 1, high_ms=p99_ms + 1, samples=1200
        ),
        findings=(finding(outcome, gate="p99_ms"),),
    )


def scorecard(**changes) -> Scorecard:
    fields = {
        "model": "digits",
        "model_uri": "models:/digits/1",
        "created_at": WHEN,
        "onnx_sha256": sha("0"),
        "policy_sha256": sha("1"),
        "data": DataDigests(evaluation=sha("2"), calibration=sha("3"), shadow=None),
        "environment": {"python": "3.11"},
        "verdicts": (verdict(),),
        "benchmarks": (benchmark(),),
        "winner": INT8,
        "reason": "highest throughput within the SLO",
    }
    return Scorecard(**(fields | changes))


def decision(card: Scorecard, **changes) -> Decision:
    fields = {
        "scorecard_sha256": card.digest,
        "answer": "approve",
        "approver": "ada",
        "reason": "margins are wide",
        "decided_at": WHEN,
    }
    return Decision(**(fields | changes))


def release(**changes) -> Release:
    card = scorecard()
    engine = {
        "device": "cpu",
        "candidate": INT8,
        "engine_sha256": sha("e"),
        "serving": SERVING,
        "backend": "python",
        "golden": FileDigest(sha256=sha("a"), size_bytes=1),
        "golden_max_abs_error": 0.1,
        "files": {},
        "promise": Promise(p99_ms=20, throughput_per_s=50, slo_p99_ms=25),
    }
    engine |= {
        name: changes.pop(name) for name in [*changes] if name in ReleasedEngine.model_fields
    }
    fields = {
        "model": "digits",
        "version": 2,
        "model_uri": "models:/digits/1",
        "engines": (ReleasedEngine(**engine),),
        "inputs": (),
        "outputs": (),
        "scorecard_sha256": card.digest,
        "decision": decision(card),
        "previous_version": 1,
        "published_at": WHEN,
    }
    return Release(**(fields | changes))


def engine_speed(
    candidate: Candidate = INT8, *windows_per_s: float, batch_size: int = 8, **changes
) -> EngineSpeed:
    """One batch size on the host, 1,000 samples a second unless windows are given."""
    fields = {
        "candidate": candidate,
        "engine_sha256": sha("e"),
        "device": "CPUExecutionProvider",
        "inputs_on": "host",
        "batches": (
            BatchSpeed(
                batch_size=batch_size, windows_per_s=windows_per_s or (990, 1000, 1010), runs=20
            ),
        ),
    }
    return EngineSpeed(**(fields | changes))
