"""Telling people: flows say what waits or is wrong, and whoever has a messenger gets it.

Messages are for people, so whatever goes wrong with them is logged and no flow ends otherwise for
it. Where no receiver is named nothing is looked for, written or sent.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from prefect.blocks.system import Secret
from prefect.client.schemas.objects import BlockDocument
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL

from enginegate.approval_rules import check_approvable
from enginegate.errors import ApprovalError, EnginegateError, InputError
from enginegate.evidence import Scorecard
from enginegate.notifications import (
    ApprovalRequest,
    Notice,
    NoticeLedger,
    Receivers,
    approval_notice,
    combined,
    over_notice,
    promise_notices,
    receivers_of_environment,
    receivers_of_text,
    release_notices,
    watch_notice,
)
from enginegate.policy import Policy
from enginegate.policy.operating import LiveTables
from enginegate.redact import link_base, masked
from enginegate.repository import AuditLog, Layout
from enginegate.repository.history.audit import live_changes
from enginegate.repository.history.broken_promises import broken_promises
from enginegate.watch.log import PromiseBrokenError, WatchCheck, WatchLog
from enginegate.workspace import Workspace, now
from tasks.artifacts import places_of
from tasks.prefect_server import REFUSALS, quick_client

BLOCK = "enginegate-notify"
_log = logging.getLogger("enginegate.notify")


def configured_receivers() -> Receivers | None:
    """Those of ENGINEGATE_NOTIFY, else those of Prefect's Secret block; None: none are named.

    Raises:
        InputError: what is named there are no addresses.
        EnginegateError: Prefect's server cannot say whether there is such a block.
    """
    return receivers_of_environment() or _receivers_of_block()


def save_receivers(given: Receivers) -> str:
    """Keep addresses in Prefect's Secret block, where every worker finds them; a sentence.

    Raises:
        InputError: no Prefect server is named.
        EnginegateError: it cannot be reached, or refuses.
    """
    if not PREFECT_API_URL.value():
        raise InputError(
            "No Prefect server is named, so there is none to keep the addresses on. Set "
            "PREFECT_API_URL, e.g. http://127.0.0.1:4200/api, and run this again."
        )
    try:
        Secret(value="\n".join(given.addresses)).save(BLOCK, overwrite=True)
    except REFUSALS as error:
        raise EnginegateError(
            f"Prefect's server did not take the block {BLOCK!r}: {type(error).__name__}. See "
            "whether it runs, and run this again."
        ) from None
    return f"Prefect's Secret block {BLOCK} holds {', '.join(given.labels)}."


def notify_of_question(
    scorecard: Scorecard, policy: Policy, origin: Path, workspace: Workspace
) -> None:
    """A qualification has ended with something that a person may approve."""
    with _harmless("an approval that waits"):
        try:
            check_approvable(scorecard, policy.approval)
        except ApprovalError:
            return
        asked = ApprovalRequest(
            question="qualified",
            asked_at=now(),
            policy=str(origin),
            missing=policy.approval.required,
            may_approve=policy.approval.approvers,
        )
        _notify_of_approval(scorecard, asked, policy.live_tables, workspace)


def notify_of_form(
    scorecard: Scorecard, asked: ApprovalRequest, tables: LiveTables, workspace: Workspace
) -> None:
    """A promotion is about to be suspended until somebody answers Prefect's form."""
    with _harmless("an approval that waits"):
        _notify_of_approval(scorecard, replace(asked, form=_run_page()), tables, workspace)


def notify_of_watch(
    tables: LiveTables, policy: Path, workspace: Workspace, error: Exception | None
) -> None:
    """What has begun and what is over, once each, at the end of a run of the watch.

    Args:
        tables: what is live where.
        policy: file, for the commands in messages.
        workspace: has the ledger of what was told.
        error: how the run ended; None: well.
    """
    with _harmless("what the watch found"):
        receivers = configured_receivers()
        if receivers is None:
            return
        ledger, place = NoticeLedger.of(workspace), _place(tables)
        errored = error is not None and not isinstance(error, PromiseBrokenError)
        if error is not None and errored:
            found = watch_notice(tables.model, place, error, str(policy), now(), _run_page())
            ledger.add([found])
        # What broke the watch may be what is read here: of that people are told all the same.
        with _harmless("promises and releases"):
            _take_up(ledger, tables, policy, workspace, errored=errored)
        _deliver(ledger, receivers, _own(tables))


def _take_up(
    ledger: NoticeLedger, tables: LiveTables, policy: Path, workspace: Workspace, *, errored: bool
) -> None:
    """What the live repository's records say has begun, is over, or was answered."""
    place = _place(tables)
    events, checks = AuditLog(tables.target.repository).read(), _checks(tables, workspace)
    current = Layout(tables.target.repository, tables.model).current()
    broken = broken_promises(events, tables.model, checks)
    # Whoever wants no alert of a failed check gets none here either.
    tells = tables.watch.on_failure != "nothing"
    lasting = (
        promise_notices(
            tables.model, place, broken, current.version if current else None, str(policy)
        )
        if tells
        else ()
    )
    newest = str(checks[-1]) if checks else ""

    def ended(begun: Notice) -> Notice | None:
        if (begun.place, begun.model) != (place, tables.model):
            return None
        # A run that broke off says nothing about what an earlier one could not measure.
        if begun.subject == "watch" and errored:
            return None
        return over_notice(begun, broken, newest, now())

    ledger.settle(lasting, ended)
    ledger.add(release_notices(live_changes(events), tables.model, place, now()))
    ledger.forget(lambda notice: _is_answered(notice, workspace))


def notify_of_releases(tables: LiveTables, workspace: Workspace) -> None:
    """What became live by this flow, and in the day before it if nobody was told."""
    with _harmless("what became live"):
        receivers = configured_receivers()
        if receivers is None:
            return
        ledger, events = NoticeLedger.of(workspace), AuditLog(tables.target.repository).read()
        ledger.add(release_notices(live_changes(events), tables.model, _place(tables), now()))
        _deliver(ledger, receivers, _own(tables))


def _notify_of_approval(
    scorecard: Scorecard, asked: ApprovalRequest, tables: LiveTables, workspace: Workspace
) -> None:
    receivers = configured_receivers()
    if receivers is None:
        return
    if not asked.page:
        places = places_of(scorecard, workspace)
        asked = replace(asked, page=places.page, start_command=places.start_command)
    ledger = NoticeLedger.of(workspace)
    ledger.add([approval_notice(scorecard, asked, _place(tables))])
    _deliver(ledger, receivers, _own(tables))


def _deliver(ledger: NoticeLedger, receivers: Receivers, wanted: Callable[[Notice], bool]) -> None:
    """Send each receiver all that it lacks as one message, and write down who took it."""
    claimed = ledger.claim(wanted, receivers.labels, now())
    lacking = {
        label: [entry for entry in claimed if label not in entry.taken_by]
        for label in receivers.labels
    }
    messages = {
        label: combined([entry.notice for entry in entries])
        for label, entries in lacking.items()
        if entries
    }
    for answer in receivers.send(messages):
        if answer.why:
            _log.warning(
                "receiver %s of %s did not get a message: %s. The next watch tries again; try "
                "it now with: enginegate notify test",
                answer.receiver,
                receivers.origin,
                answer.why,
            )
            continue
        ledger.took(lacking[answer.receiver], answer.receiver, now())
        _log.info(
            "receiver %s got: %s",
            answer.receiver,
            "; ".join(entry.notice.title for entry in lacking[answer.receiver]),
        )


@contextmanager
def _harmless(subject: str) -> Iterator[None]:
    """Whatever happens in the block is logged, without a text that may hold an address."""
    try:
        yield
    except EnginegateError as error:
        _log.warning("nobody was told of %s: %s", subject, masked(str(error)))
    except Exception as error:  # noqa: BLE001 - of a library; the flow has done its work
        _log.warning("nobody was told of %s: %s", subject, type(error).__name__)


def _receivers_of_block() -> Receivers | None:
    if not PREFECT_API_URL.value():
        return None
    try:
        with quick_client() as client:
            found: BlockDocument = client.read_block_document_by_name(BLOCK, "secret")
    except ObjectNotFound:
        return None
    except REFUSALS as error:
        raise EnginegateError(
            f"Prefect's server could not be asked for the block {BLOCK!r}: {type(error).__name__}."
        ) from None
    return receivers_of_text(str(found.data.get("value", "")), f"Prefect's Secret block {BLOCK}")


def _run_page() -> str:
    """The address of this run on Prefect's pages; empty where nobody can open them."""
    base = PREFECT_UI_URL.value()
    if not (PREFECT_API_URL.value() and base and flow_run.id):
        return ""
    return f"{link_base(str(base))}/runs/flow-run/{flow_run.id}"


def _place(tables: LiveTables) -> str:
    return tables.target.objects or str(tables.target.repository.absolute())


def _own(tables: LiveTables) -> Callable[[Notice], bool]:
    place = _place(tables)
    return lambda notice: (notice.place, notice.model) == (place, tables.model)


def _checks(tables: LiveTables, workspace: Workspace) -> Sequence[WatchCheck]:
    """Of the live release."""
    layout = Layout(tables.target.repository, tables.model)
    current = layout.current()
    if current is None:
        return ()
    return WatchLog.at(workspace, layout.release(current.version)).read()


def _is_answered(notice: Notice, workspace: Workspace) -> bool:
    """Whether as many people have answered since as were asked, or one said no."""
    if not notice.scorecard:
        return False
    since = [d for d in workspace.decisions(notice.scorecard) if d.decided_at > notice.at]
    return len(since) >= notice.answers or any(d.answer == "reject" for d in since)
