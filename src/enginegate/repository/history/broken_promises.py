"""Broken promises: failed checks of a release, which stay with it until a person acknowledges them.

Every failed check is an event of the audit log, and so is every acknowledgement: which of them
came first is the order of the log, whatever a clock said and whichever workspace checked. A failed
check that could not be written there yet counts all the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from enginegate.errors import InputError
from enginegate.evidence import Finding, Outcome
from enginegate.repository.history.audit import AuditLog, AuditRecord, Event, origin
from enginegate.repository.lock import hold_lock
from enginegate.watch.log import WatchCheck, gate_of

_SHORTEST_NAME, _SHORTEST_REASON = 2, 5


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """One failed check of a release, and who acknowledged it.

    Attributes:
        release: its number.
        check: the check's number, among those of this release.
        at: when it was checked.
        why: what was promised and what was measured.
        acknowledged: the event of the audit log that acknowledges it; None: nobody has.
    """

    release: int
    check: int
    at: datetime
    why: str
    acknowledged: Event | None = None

    def __str__(self) -> str:
        return (
            f"release {self.release} broke its promise at check {self.check} "
            f"({self.at:%Y-%m-%d %H:%M:%S %Z}): {self.why}"
        )


@dataclass(frozen=True, slots=True)
class ShownState:
    """What MLflow, Prefect and the terminal show of one release.

    Attributes:
        latest: the newest check; None: this workspace has none.
        broken: failed checks that nobody has acknowledged, oldest first.
        acknowledged: who acknowledged the newest check, if it failed and somebody did.
    """

    latest: WatchCheck | None
    broken: tuple[BrokenPromise, ...] = ()
    acknowledged: Event | None = None

    @property
    def word(self) -> str:
        """*failed* until it is acknowledged, else how the newest check ended."""
        if self.broken:
            return Outcome.FAILED.word
        return self.latest.outcome.word if self.latest else "not checked"

    def __str__(self) -> str:
        said = [f"{broken}. Nobody has acknowledged this." for broken in self.broken[-1:]]
        earlier = len(self.broken) - 1
        if earlier > 0:
            said.append(f"Failed checks before it that nobody has acknowledged: {earlier}.")
        if self.broken:
            said.append("Acknowledge: enginegate acknowledge POLICY --reason WHY.")
        if self.latest is not None and not self._is_latest(self.broken[-1:]):
            said.append(f"Newest: {self.latest}.")
        if self.acknowledged is not None:
            said.append(f"Acknowledged by {self.acknowledged.who}: {self.acknowledged.why}.")
        return " ".join(said)

    def _is_latest(self, broken: Sequence[BrokenPromise]) -> bool:
        return any(self.latest and each.check == self.latest.number for each in broken)


def broken_words(finding: Finding) -> str:
    """What was promised and what was measured, e.g. ``server_time: promised <= 3 ms, …``."""
    said = f"{gate_of(finding)}: "
    if finding.value is not None and finding.limit is not None and finding.relation:
        unit = f" {finding.unit}" if finding.unit else ""
        said += f"promised {finding.relation} {finding.limit:.4g}{unit}, "
        said += f"measured {finding.value:.4g}{unit}; "
    return said + finding.reason


def broken_promises(
    events: Iterable[Event], model: str, checks: Iterable[WatchCheck] = ()
) -> tuple[BrokenPromise, ...]:
    """Every failed check of a model that is known, oldest first.

    Args:
        events: of the audit log, oldest first.
        model: its name.
        checks: of its releases; those that failed and are not in the log are not acknowledged.
    """
    found: list[BrokenPromise] = []
    waiting: dict[int, list[int]] = {}  # of each release, which of them nobody has acknowledged
    recorded: set[str] = set()
    for event in events:
        if event.model != model or event.release is None or event.check is None:
            continue
        if event.event == "promise broken":
            recorded.add(event.operation)
            waiting.setdefault(event.release, []).append(len(found))
            found.append(BrokenPromise(event.release, event.check, event.at, event.why))
        elif event.event == "acknowledged":
            for place in waiting.pop(event.release, ()):
                b = found[place]
                found[place] = BrokenPromise(b.release, b.check, b.at, b.why, event)
    unrecorded = [c for c in checks if c.broken and operation_of(c) not in recorded]
    return (
        *found,
        *(BrokenPromise(c.version, c.number, c.at, _why(c)) for c in unrecorded),
    )


def shown_state(
    events: Iterable[Event], model: str, release: int, checks: Sequence[WatchCheck]
) -> ShownState:
    """What is shown of a release, from its checks and what the audit log knows of them.

    *Failed* stays until it is acknowledged; passed, inconclusive and errored show the newest check.

    Args:
        events: of the audit log, oldest first.
        model: its name.
        release: its number.
        checks: of this release, oldest first.
    """
    return shown_of(broken_promises(events, model, checks), release, checks)


def shown_of(
    promises: Iterable[BrokenPromise], release: int, checks: Sequence[WatchCheck]
) -> ShownState:
    """`shown_state`, of broken promises that are known already.

    Args:
        promises: of the model, oldest first.
        release: its number.
        checks: of this release, oldest first.
    """
    known = [b for b in promises if b.release == release]
    latest = checks[-1] if checks else None
    acknowledged = [b.acknowledged for b in known if latest and b.check == latest.number]
    return ShownState(
        latest=latest,
        broken=tuple(b for b in known if b.acknowledged is None),
        acknowledged=acknowledged[-1] if acknowledged else None,
    )


def record_broken(root: Path, check: WatchCheck) -> None:
    """Write a failed check into the audit log, once.

    Raises:
        RepositoryBusyError: somebody else is changing the repository.
        RepositoryError: the log cannot be written, or was changed.
    """
    with hold_lock(root):
        AuditLog(root).note(_deed(check))


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What a person says about broken promises.

    Attributes:
        who: the person's name.
        why: what they found out, or will do.
        release: only of this one; None: of every release.
        channel: how it comes, for the audit log.
    """

    who: str
    why: str
    release: int | None = None
    channel: str = "Python"

    def check(self) -> None:
        """Refuse one without a name or a reason.

        Raises:
            InputError: one of them is missing or too short.
        """
        if len(self.who.strip()) < _SHORTEST_NAME or len(self.why.strip()) < _SHORTEST_REASON:
            raise InputError(
                f"An acknowledgement needs a name (at least {_SHORTEST_NAME} characters) and a "
                f"reason (at least {_SHORTEST_REASON}); given were {self.who!r} and {self.why!r}."
            )


def acknowledge(
    root: Path, model: str, given: Acknowledgement, checks: Sequence[WatchCheck] = ()
) -> tuple[BrokenPromise, ...]:
    """Write into the audit log that a person knows of a model's broken promises.

    One event for each release; it covers the failed checks before it and none after it.

    Args:
        root: the live repository.
        model: its name.
        given: by whom, why, and for which release.
        checks: of the live release: those that failed and are not in the log are written first.

    Returns:
        What was acknowledged.

    Raises:
        InputError: no name, no reason, or there is nothing to acknowledge.
        RepositoryBusyError: somebody else is changing the repository.
        RepositoryError: the log cannot be written, or was changed.
    """
    given.check()
    if not root.is_dir():
        raise InputError(f"{root} is no folder, so no promise of {model} was ever broken there.")
    with hold_lock(root):
        log = AuditLog(root)
        for check in checks:
            if check.broken:
                log.note(_deed(check))
        open_ones = tuple(
            each
            for each in broken_promises(log.read(), model)
            if each.acknowledged is None and given.release in {None, each.release}
        )
        if not open_ones:
            of = f"release {given.release} of {model}" if given.release else model
            raise InputError(
                f"No broken promise of {of} waits for an acknowledgement in {root}. "
                "`enginegate status POLICY` lists those that do."
            )
        newest = {each.release: each for each in open_ones}
        for each in newest.values():
            deed = AuditRecord(
                event="acknowledged",
                model=model,
                who=given.who,
                why=given.why,
                origin=origin(given.channel),
                release=each.release,
                check=each.check,
            )
            log.note(deed)
    return open_ones


def operation_of(check: WatchCheck) -> str:
    """What the audit log calls a check: written once, also by two who try."""
    return f"check:{check.release_sha256[:16]}:{check.number}:{check.at.isoformat()}"


def _deed(check: WatchCheck) -> AuditRecord:
    where = origin("watch")
    return AuditRecord(
        event="promise broken",
        model=check.model,
        who="watch",
        why=_why(check),
        origin=where,
        release=check.version,
        check=check.number,
        operation=operation_of(check),
    )


def _why(check: WatchCheck) -> str:
    return "; ".join(broken_words(finding) for finding in check.broken)
