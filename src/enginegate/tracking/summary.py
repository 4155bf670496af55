"""How a qualification reads in MLflow: names of runs, columns of the table, notes.

MLflow's table draws a metric with six decimals and neither unit nor interval, so the columns that
people compare are tags with the text; charts and sorting use the metrics.
"""

from enginegate.candidate import Candidate, Engine, registered_version
from enginegate.engine_kinds import engine_kinds
from enginegate.evidence import Benchmark, Finding, Outcome, Scorecard
from enginegate.measurement import Percentile
from enginegate.messages import counted, escape_markdown

OUTCOME, P99, RATE, CHANGE, SIZE = "outcome", "p99 ms", "rate in SLO", "change vs FP32", "size"
RUNTIME = "runtime"
_KIB, _MIB = 1 << 10, 1 << 20
_REASON_LENGTH = 240


def version_of(scorecard: Scorecard) -> str:
    """``v2`` for a version of the registry, else the whole address of the model."""
    version = registered_version(scorecard.model_uri)
    return scorecard.model_uri if version is None else f"v{version[1]}"


def run_name(scorecard: Scorecard) -> str:
    """The parent run's name: version, outcome, winner."""
    said = f"{scorecard.model} {version_of(scorecard)}: {best_outcome(scorecard).word}"
    if scorecard.winner is None:
        return f"{said}, no winner"
    tied = f" (tied with {len(scorecard.tied)})" if scorecard.tied else ""
    return f"{said}, {scorecard.winner} wins{tied}"


def candidate_run_name(scorecard: Scorecard, candidate: Candidate) -> str:
    """A child run's name; charts cut it at its end, so the candidate comes first."""
    where = f" on {scorecard.device}" if scorecard.device else ""
    return f"{candidate}{where}: {standing(scorecard, candidate)}, {version_of(scorecard)}"


def best_outcome(scorecard: Scorecard) -> Outcome:
    """How the qualification ended: with a winner, as well as its best candidate did."""
    outcomes = (scorecard.outcome(verdict.candidate) for verdict in scorecard.verdicts)
    return min(outcomes, default=Outcome.INCONCLUSIVE)


def standing(scorecard: Scorecard, candidate: Candidate) -> str:
    """``winner``, ``tied``, else the outcome."""
    if candidate == scorecard.winner:
        return "winner"
    return "tied" if candidate in scorecard.tied else scorecard.outcome(candidate).word


def table_tags(scorecard: Scorecard, candidate: Candidate, engine: Engine | None) -> dict[str, str]:
    """The columns of the table that are text; what was not measured has none."""
    verdict, benchmark = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    loss = verdict.task_loss if verdict else None
    size = engine.file.size_bytes if engine else benchmark.engine_bytes if benchmark else None
    texts = {
        OUTCOME: _outcome_text(scorecard, candidate),
        P99: _percentile_text(benchmark.p99_at_slo if benchmark else None),
        RATE: _rate_text(benchmark),
        CHANGE: _change_text(loss),
        SIZE: "" if size is None else _size_text(size),
    }
    return {name: text for name, text in texts.items() if text}


def _outcome_text(scorecard: Scorecard, candidate: Candidate) -> str:
    """The standing, and the first gate that decided against it."""
    blocking = blocking_findings(scorecard, candidate)
    why = f": {blocking[0].gate}" if blocking else ""
    return f"{standing(scorecard, candidate)}{why}"


def runtime_of(candidate: Candidate) -> str:
    """The runtime as people write it, e.g. ``ONNX Runtime``."""
    kind = engine_kinds().get(candidate.kind)
    return kind.title if kind else candidate.kind


def _percentile_text(percentile: Percentile | None) -> str:
    """Milliseconds with the interval, e.g. ``2.49 (2.22 to 2.74)``; empty: not measured."""
    if percentile is None:
        return ""
    text = f"{percentile.value_ms:.2f}"
    if percentile.low_ms is None or percentile.high_ms is None:
        return text
    return f"{text} ({percentile.low_ms:.2f} to {percentile.high_ms:.2f})"


def _rate_text(benchmark: Benchmark | None) -> str:
    """Requests a second within the SLO, ``≥`` where more may be possible; empty: not measured."""
    return f"{benchmark.throughput_text}/s" if benchmark and benchmark.chosen else ""


def _change_text(loss: Finding | None) -> str:
    """The change of the task's score with its interval, and which, unless it is accuracy.

    Empty: not judged.
    """
    if loss is None or loss.value is None:
        return ""
    unit, form = (" pp", "+.2f") if loss.in_points else (loss.unit and f" {loss.unit}", "+.4g")

    def show(number: float) -> str:
        return format(round(number, 9) + 0.0, form)

    ends = loss.change_ends
    interval = "" if ends is None else f" ({show(ends[0])} to {show(ends[1])})"
    named = "" if loss.measure == "accuracy" else f"{loss.measure} "
    return f"{named}{show(loss.as_change(loss.value))}{unit}{interval}"


def _size_text(size_bytes: int) -> str:
    """Bytes as people write them."""
    return f"{size_bytes / _MIB:.1f} MiB" if size_bytes >= _MIB else f"{size_bytes / _KIB:.0f} KiB"


def blocking_findings(scorecard: Scorecard, candidate: Candidate) -> tuple[Finding, ...]:
    """What keeps a candidate from passing, of its verdict and its benchmark, worst first."""
    verdict, benchmark = scorecard.verdict(candidate), scorecard.benchmark(candidate)
    findings = (*(verdict.findings if verdict else ()), *(benchmark.findings if benchmark else ()))
    found = [f for f in findings if not f.advisory and f.outcome is not Outcome.PASSED]
    return tuple(sorted(found, key=lambda finding: -finding.outcome))


def engine_name(scorecard: Scorecard, candidate: Candidate) -> str:
    """A logged model's name: one that did not pass says so where only names are listed."""
    outcome = scorecard.outcome(candidate)
    return candidate.name if outcome is Outcome.PASSED else f"{candidate} {outcome.word}"


def engine_note(scorecard: Scorecard, candidate: Candidate) -> str:
    """A logged model's description: the state first, in plain text, then what decided.

    MLflow calls every logged model whose files are complete *Ready*, also one that failed.
    """
    outcome, blocking = scorecard.outcome(candidate), blocking_findings(scorecard, candidate)
    if outcome is Outcome.PASSED:
        return f"{standing(scorecard, candidate).upper()}{_served(scorecard, candidate)}"
    reasons = [escape_markdown(f"{f.gate} on {f.scope}: {_one_line(f.reason)}") for f in blocking]
    why = "\n".join(f"- {reason}" for reason in reasons) or f"- {_unmeasured(scorecard, candidate)}"
    gates = ", ".join(dict.fromkeys(f.gate for f in blocking)) or "not benchmarked"
    return f"{outcome.word.upper()}: {gates}. Do not register or serve it.\n\n{why}"


def candidate_note(scorecard: Scorecard, candidate: Candidate) -> str:
    """Markdown for a child run's description: the outcome, and what keeps it from passing."""
    lines = [f"**{standing(scorecard, candidate)}**{_served(scorecard, candidate)}", ""]
    lines += [
        "- " + escape_markdown(f"{f.outcome.word}: {f.gate} on {f.scope}: {f.reason} {f.remedy}")
        for f in blocking_findings(scorecard, candidate)
    ]
    if scorecard.benchmark(candidate) is None:
        lines.append(f"- {_unmeasured(scorecard, candidate)}")
    return "\n".join(lines)


def result_sentence(scorecard: Scorecard) -> str:
    """The newest qualification in one sentence, for the experiment's note."""
    subject = f"{scorecard.model} {version_of(scorecard)}"
    if scorecard.winner is None:
        judged = counted(len(scorecard.verdicts), "candidate")
        word = best_outcome(scorecard).word
        return f"{subject}: {word}; 0 of {judged} passed every gate."
    benchmark = scorecard.benchmark(scorecard.winner)
    tied = f" (tied with {', '.join(map(str, scorecard.tied))})" if scorecard.tied else ""
    p99 = _p99(benchmark)
    served = f"{_rate_text(benchmark)} at p99 {p99.value_ms:.2f} ms" if p99 else "not measured"
    return f"{subject}: {scorecard.winner} wins{tied}, {served}."


def _served(scorecard: Scorecard, candidate: Candidate) -> str:
    """What it sustained, after a colon; empty: nothing that met the SLO."""
    benchmark = scorecard.benchmark(candidate)
    if benchmark is None or benchmark.chosen is None:
        return ""
    return f": {_rate_text(benchmark)}, p99 {_percentile_text(_p99(benchmark))} ms."


def _p99(benchmark: Benchmark | None) -> Percentile | None:
    return benchmark.p99_at_slo if benchmark else None


def _unmeasured(scorecard: Scorecard, candidate: Candidate) -> str:
    why = scorecard.unmeasured.get(candidate.name)
    return f"not benchmarked: {why}" if why else "not benchmarked"


def _one_line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= _REASON_LENGTH else f"{joined[:_REASON_LENGTH]} …"
