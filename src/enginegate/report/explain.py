"""Each verdict in words that a release manager understands. Nothing is decided here."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

from enginegate.candidate import Candidate
from enginegate.errors import InputError
from enginegate.evidence import Benchmark, Finding, Outcome, Scorecard, Verdict
from enginegate.report.content import (
    alone_sentence,
    fp32_sentences,
    fp32_slices,
    short_digest,
    winner_sentences,
    without_line_breaks,
)
from enginegate.report.serving import pattern_sentences, roofline_sentence
from enginegate.report.tables import print_hanging

_MEANINGS = MappingProxyType(
    {
        Outcome.PASSED: "It may be approved: everything that decides was measured and is in order.",
        Outcome.INCONCLUSIVE: "It may not be approved: nothing speaks against it, but the evidence "
        "is not enough.",
        Outcome.FAILED: "It may not be approved: at least one limit is broken for certain.",
        Outcome.ERRORED: "It may not be approved: a check broke, so nothing is known about it.",
    }
)
_HEADINGS = (
    (Outcome.ERRORED, "What could not be found out"),
    (Outcome.FAILED, "What speaks against it"),
    (Outcome.INCONCLUSIVE, "What is not known well enough"),
    (Outcome.PASSED, "What is in order"),
)
_DATA = MappingProxyType({"evaluation": "the labelled data", "shadow": "recorded traffic"})
_SUBJECTS: Mapping[str, str] = MappingProxyType(
    {
        "kl_p99": "Its class probabilities",
        "max_abs_error": "Its largest deviation in any output value",
        "max_rel_error": "Its largest deviation relative to the output",
        "p99_abs_error": "Its deviation from FP32 on all but 1 % of the samples",
        "p99_rel_error": "Its relative deviation from FP32 on all but 1 % of the samples",
        "sqnr": "Its signal to noise ratio against FP32",
        "cosine_p1": "Its likeness to FP32 (cosine) on all but 1 % of the samples",
        "noise_floor": "FP32's own noise",
        "decision_agreement": "Its agreement with FP32 in single labels, pixels or boxes",
    }
)
_QUESTIONS: Mapping[str, str] = MappingProxyType(
    {
        "build": "Whether it can be built",
        "runnable": "Whether it runs here",
        "precision_proof": "Whether it computes in the precision it is named after",
        "provenance": "Where it comes from",
        "samples": "Whether there are enough samples",
        "nonfinite": "Whether it gives NaN or infinity",
        "slice_samples": "Whether each part of the data is large enough to be judged",
        "slice_values": "Whether a slice column is usable",
        "constant_reference": "Whether the data shows anything",
        "constant_answers": "Whether its answers depend on the input",
        "shadow_integrity": "Whether the recorded traffic belongs to this model",
        "shadow_version": "Whether the recorded traffic belongs to this version",
        "input_drift": "Whether today's inputs are like those it was calibrated on",
        "p99_ms": "How long requests take under load",
        "throughput": "How many requests it can take",
        "speedup": "Whether it is faster by the policy's margin",
        "overload": "What becomes of throughput just past that",
        "faster_alone": "Whether it is faster than the winner without a server",
        "slower_than_eager": "Whether it is faster than PyTorch without compiling",
    }
)
_PER = 1000
_INDENT = re.compile(r" +(?:- )?")
_COMMAND = "enginegate explain"
_OUTCOME_WORDS = tuple(f": {outcome.word.upper()}" for outcome in Outcome)


def explain(
    scorecard: Scorecard, *, only: Collection[Candidate] | None = None, blocking: bool = False
) -> str:
    """The scorecard in words: at most ten lines for all of it, then each candidate by itself.

    Args:
        scorecard: what was found.
        only: explain these candidates; None: all of them.
        blocking: explain only candidates that did not pass, and of them only what keeps them.
    """
    lines = list(_opening(scorecard))
    shown = [v for v in scorecard.verdicts if only is None or v.candidate in only]
    if blocking:
        return "\n".join((*lines, *_all_blocking(scorecard, shown))) + "\n"
    if only is None:
        baseline = (*fp32_sentences(scorecard), *fp32_slices(scorecard, most=None))
        if baseline:
            lines += ["", *baseline]
    for verdict in shown:
        lines += ["", f"{verdict.candidate}: {_word(scorecard, verdict.candidate)}"]
        lines += _candidate(scorecard, verdict, blocking=False)
    return "\n".join(lines) + "\n"


def print_explained(
    scorecard: Scorecard,
    console: Console,
    *,
    only: Collection[Candidate] | None = None,
    blocking: bool = False,
) -> None:
    """Print `explain` with each line's own indentation kept where it wraps."""
    for line in explain(scorecard, only=only, blocking=blocking).splitlines():
        begins = _INDENT.match(line)
        indent = begins.group() if begins else ""
        if _COMMAND in line:
            console.print(Text(line), soft_wrap=True)
        else:
            style = "bold" if not indent and line.endswith(_OUTCOME_WORDS) else ""
            print_hanging(console, Text(line[len(indent) :], style=style), indent)


def candidates_named(scorecard: Scorecard, names: Sequence[str]) -> tuple[Candidate, ...] | None:
    """The scorecard's candidates of those names; None when none is given.

    Raises:
        InputError: a name is not one of them; lists those there are.
    """
    there = {verdict.candidate.name: verdict.candidate for verdict in scorecard.verdicts}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise InputError(
            f"Scorecard {short_digest(scorecard)} has no candidate "
            f"{', '.join(map(repr, unknown))}. It has: {', '.join(there)}."
        )
    return tuple(there[name] for name in dict.fromkeys(names)) or None


def _opening(scorecard: Scorecard) -> Iterator[str]:
    """At most ten lines: which, what may be approved, its numbers, everybody's outcome, next."""
    short = short_digest(scorecard)
    by = f", for {scorecard.requested_by}" if scorecard.requested_by else ""
    yield (
        f"{scorecard.model_uri} for {scorecard.model}, scorecard {short} of "
        f"{scorecard.created_at:%Y-%m-%d %H:%M:%S %Z}{by}"
    )
    yield _headline(scorecard)
    numbers = tuple(winner_sentences(scorecard))
    yield from (f"  {sentence}" for sentence in (*numbers[:-1][:2], *numbers[-1:]))
    groups: dict[Outcome, list[str]] = {}
    for verdict in scorecard.verdicts:
        candidate = verdict.candidate
        mark = " (tied)" if candidate in scorecard.tied else ""
        groups.setdefault(scorecard.outcome(candidate), []).append(f"{candidate}{mark}")
    for outcome in sorted(groups):
        yield f"{outcome.word.capitalize()}: {', '.join(groups[outcome])}"
    if set(groups) - {Outcome.PASSED}:
        yield f"Only what blocks: {_COMMAND} {short} --only blocking"


def _headline(scorecard: Scorecard) -> str:
    if scorecard.winner is None:
        return f"There is nothing to approve: {without_line_breaks(scorecard.reason)}"
    return f"{scorecard.winner} is up for approval: {without_line_breaks(scorecard.reason)}"


def _all_blocking(scorecard: Scorecard, verdicts: Iterable[Verdict]) -> Iterator[str]:
    """What keeps candidates from passing; candidates with the same obstacle share one entry."""
    groups: dict[tuple[str, ...], list[Candidate]] = {}
    for verdict in verdicts:
        if scorecard.outcome(verdict.candidate) is not Outcome.PASSED:
            word = _word(scorecard, verdict.candidate)
            said = (word, *_candidate(scorecard, verdict, blocking=True))
            groups.setdefault(said, []).append(verdict.candidate)
    for (word, *lines), candidates in groups.items():
        yield from ("", f"{', '.join(map(str, candidates))}: {word}", *lines)
    if not groups:
        yield from ("", "Nothing blocks what was asked for.")


def _word(scorecard: Scorecard, candidate: Candidate) -> str:
    return scorecard.outcome(candidate).word.upper()


def _candidate(scorecard: Scorecard, verdict: Verdict, *, blocking: bool) -> Iterator[str]:
    candidate = verdict.candidate
    outcome = scorecard.outcome(candidate)
    benchmark = scorecard.benchmark(candidate)
    findings = (*verdict.findings, *(benchmark.findings if benchmark else ()))
    counting = [finding for finding in findings if not finding.advisory]
    yield f"  {candidate_meaning(scorecard, candidate)}"
    for word, heading in _HEADINGS[:-1] if blocking else _HEADINGS:
        found = [finding for finding in counting if finding.outcome is word]
        if found:
            yield f"  {heading}:"
            yield from (f"    {line}" for line in _lines(found))
    if candidate.name in scorecard.unmeasured:
        yield f"  It was not benchmarked: {scorecard.unmeasured[candidate.name]}."
    elif benchmark is None and outcome is Outcome.INCONCLUSIVE:
        yield "  It was not benchmarked, so nothing is known about its speed."
    if blocking:
        return
    if benchmark is not None:
        yield f"  {_speed(benchmark)}"
        yield from (f"  {sentence}" for sentence in _serving(benchmark))
    alone = alone_sentence(scorecard, candidate)
    if alone:
        yield f"  {alone}"
    shown = [finding for finding in findings if finding.advisory and not finding.of_fp32]
    shown += [each for each in scorecard.speed_findings if each.scope == candidate.name]
    if shown:
        yield "  Shown only, decides nothing:"
        yield from (f"    - {without_line_breaks(_plain(finding))}" for finding in shown)


def candidate_meaning(scorecard: Scorecard, candidate: Candidate) -> str:
    """Whether a candidate may be approved, in a sentence."""
    outcome = scorecard.outcome(candidate)
    if candidate in scorecard.tied:
        return (
            f"It passed every gate and is tied with {scorecard.winner}: the measurements do not "
            "tell which serves better."
        )
    if outcome is Outcome.PASSED and candidate != scorecard.winner:
        return "It passed every gate, and another candidate serves better."
    return _MEANINGS[outcome]


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line a finding; slices that passed share one that tells of the nearest to its limit."""
    passed = [f for f in findings if "/" in f.scope and f.outcome is Outcome.PASSED]
    for finding in findings:
        if finding not in passed:
            yield from _finding_lines(finding)
    if passed:
        nearest = max(passed, key=_closeness)
        yield f"- Slices within their limits: {len(passed)}. Nearest to it: {_sentence(nearest)}"


def _finding_lines(finding: Finding) -> Iterator[str]:
    yield f"- {_sentence(finding)}"
    if finding.outcome is Outcome.PASSED:
        return
    if finding.would_pass is not None:
        yield f"  A limit of {_number(finding, finding.would_pass)} would have let it through."
    if finding.remedy:
        yield f"  What to do: {without_line_breaks(finding.remedy)}"


def _sentence(finding: Finding) -> str:
    """The finding as a sentence; the reason as it is where there are no better words."""
    say = _SENTENCES.get(finding.gate.removeprefix("slice_"))
    if finding.value is None or finding.limit is None:
        return _plain(finding)
    if say is not None:
        return say(finding)
    if finding.gate.endswith("_loss") or finding.gate in _SUBJECTS:
        return _measured(finding)
    return _plain(finding)


def _accuracy(finding: Finding) -> str:
    loss, worse = abs(finding.value or 0.0), "more" if (finding.value or 0.0) >= 0.0 else "fewer"
    return (
        f"On {_where(finding)} it gets about {_per(loss)} {worse} wrong answers "
        f"than FP32 in every {_PER:,}{_surely(finding.high, 'more')}; "
        f"{_per(finding.limit or 0.0)} are allowed ({finding.samples:,} samples)."
    )


def _agreement(finding: Finding) -> str:
    low = None if finding.low is None else 1.0 - finding.low
    changed = 1.0 - (finding.value or 0.0)
    return (
        f"On {_where(finding)} about {_per(changed)} of every {_PER:,} answers "
        f"differ from FP32's{_surely(low, '')}; {_per(1.0 - (finding.limit or 0.0))} are "
        f"allowed ({finding.samples:,} samples)."
    )


def _nonfinite(finding: Finding) -> str:
    if finding.value:
        return f"On {_where(finding)} it gave NaN or infinity for {finding.value:.0f} samples."
    return f"On {_where(finding)} it never gave NaN or infinity ({finding.samples:,} samples)."


def _divergence(finding: Finding) -> str:
    return (
        f"On {_where(finding)} its class probabilities differ from FP32's by at most "
        f"{_end(finding):.3g} nats for 99 % of the samples; {finding.limit:.3g} is allowed."
    )


def _measured(finding: Finding) -> str:
    default = f"Its {'growth of' if finding.of_error else 'loss in'} {finding.measure}"
    bound = "at most" if finding.relation == "<=" else "at least"
    return (
        f"{_SUBJECTS.get(finding.gate, default)} is {_number(finding, finding.value or 0.0)} on "
        f"{_where(finding)}; {bound} {_number(finding, finding.limit or 0.0)} is allowed."
    )


_SENTENCES: Mapping[str, Callable[[Finding], str]] = MappingProxyType(
    {
        "accuracy_loss": _accuracy,
        "top1_agreement": _agreement,
        "nonfinite": _nonfinite,
        "kl_p99": _divergence,
    }
)


def _where(finding: Finding) -> str:
    data, _, part = finding.scope.partition("/")
    name, _, output = data.partition(":")
    words = _DATA.get(name, name) + (f", output {output}" if output else "")
    return f"the part {part} of {words}" if part else words


def _surely(end: float | None, word: str) -> str:
    """The unfavourable end of the interval, in words."""
    if end is None or end <= 0.0:
        return ""
    return f" (with the policy's confidence at most {_per(end)}{f' {word}' if word else ''})"


def _closeness(finding: Finding) -> float:
    """How much of its limit a finding uses up; for ranking only."""
    value, limit = finding.value or 0.0, finding.limit or 0.0
    return value - limit if finding.relation == "<=" else limit - value


def _end(finding: Finding) -> float:
    return finding.high if finding.high is not None else finding.value or 0.0


def _number(finding: Finding, number: float) -> str:
    if finding.unit == "fraction":
        return f"{100 * number:.3g} %"
    return f"{number:.4g} {finding.unit}".rstrip()


def _per(fraction: float) -> str:
    return f"{_PER * fraction:.3g}"


def _plain(finding: Finding) -> str:
    question, reason = _QUESTIONS.get(finding.gate), without_line_breaks(finding.reason)
    if question is None:
        return f"{finding.gate.replace('_', ' ')} on {finding.scope}: {reason}"
    data, _, _ = finding.scope.partition(":")
    where = f" ({_DATA[data]})" if data in _DATA else ""
    return f"{question}{where}: {reason}"


def _serving(benchmark: Benchmark) -> Iterator[str]:
    """Roofline and heavier mixes, in words."""
    if benchmark.roofline is not None:
        yield roofline_sentence(benchmark.roofline)
    yield from pattern_sentences(benchmark.patterns)


def _speed(benchmark: Benchmark) -> str:
    if benchmark.p99_at_slo is None:
        return "No configuration of it was found to be fast enough."
    return (
        f"Serving it handles {benchmark.throughput_text} requests a second{benchmark.rows_text}, "
        f"99 of 100 within {benchmark.p99_at_slo.value_ms:.1f} ms."
    )
