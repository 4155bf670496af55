"""A scorecard's kinds of device side by side: a row a candidate, a column a kind."""

from collections.abc import Iterator
from dataclasses import dataclass

from enginegate.candidate import Candidate
from enginegate.evidence import Outcome, Scorecard
from enginegate.messages import counted, short_number
from enginegate.report.content import one_line


@dataclass(frozen=True, slots=True)
class DeviceCell:
    """How one candidate did on one kind of device.

    Attributes:
        text: outcome, rate and p99; what was not measured is left out.
        outcome: of verdict and benchmark; None: it is no candidate there.
        is_winner: of that kind of device.
    """

    text: str
    outcome: Outcome | None
    is_winner: bool = False


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """Empty for a scorecard of one machine.

    Attributes:
        devices: the columns.
        rows: a candidate's name, then a cell for each kind of device.
    """

    devices: tuple[str, ...]
    rows: tuple[tuple[str, tuple[DeviceCell, ...]], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Heads of all columns."""
        return ("candidate", *self.devices)


def device_table(scorecard: Scorecard) -> DeviceTable:
    """Outcome, rate and p99 of every candidate on every kind of device."""
    if not scorecard.devices:
        return DeviceTable((), ())
    views = scorecard.by_device
    named = dict.fromkeys(v.candidate for view in views for v in view.verdicts)
    rows = tuple(
        (candidate.name, tuple(_cell(view, candidate) for view in views)) for candidate in named
    )
    return DeviceTable(scorecard.devices, rows)


def _cell(view: Scorecard, candidate: Candidate) -> DeviceCell:
    if view.verdict(candidate) is None:
        return DeviceCell("not there", None)
    outcome, measured = view.outcome(candidate), view.benchmark(candidate)
    words, wins = [outcome.word], candidate == view.winner
    if measured is not None and measured.chosen is not None:
        words.append(f"{measured.throughput_text}/s")
        if measured.p99_at_slo is not None:
            words.append(f"p99 {short_number(measured.p99_at_slo.value_ms)} ms")
    return DeviceCell(", ".join(words) + (" (winner)" if wins else ""), outcome, wins)


def device_sentences(scorecard: Scorecard) -> tuple[str, ...]:
    """What an approval covers, kind by kind; nothing for a scorecard of one machine."""
    if not scorecard.devices:
        return ()
    kinds = counted(len(scorecard.devices), "kind")
    first = f"It is about {kinds} of device; one approval covers the winners of all of them:"
    return (first, *_winners(scorecard))


def _winners(scorecard: Scorecard) -> Iterator[str]:
    for view in scorecard.by_device:
        reason = one_line(view.reason).rstrip(".")
        if view.winner is not None:
            yield f"{view.device}: {view.winner} {reason}."
        else:
            yield (
                f"{view.device}: no winner, so a server of that kind would be refused. {reason}."
            )
