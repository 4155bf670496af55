"""Is everything a release went to as it was published? Every server, and object storage."""

from collections.abc import Iterator
from functools import partial

from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository.history.audit import AuditLog
from enginegate.repository.history.journal import last_change
from enginegate.repository.promotion import LiveRepository
from enginegate.repository.recovery import was_withdrawn
from enginegate.repository.rollout.fleet import Fleet
from enginegate.repository.rollout.fleet_server import FleetServer
from enginegate.repository.rollout.replica_sync import promise_differs
from enginegate.repository.rollout.rollout_state import RolloutState
from enginegate.repository.store.layout import Layout, models
from enginegate.repository.store.object_journal import is_abandoned, is_open
from enginegate.repository.store.object_lease import check_recorded, cut_short
from enginegate.repository.store.object_repository import ObjectRepository
from enginegate.repository.verify import VerifyCheck, checked, verify_folder


def verify(
    target: LiveRepository | Fleet | ObjectRepository, *, read_back: bool = True
) -> tuple[VerifyCheck, ...]:
    """Check folders, servers and objects; nothing is changed, no problem hides another.

    Args:
        target: what to check.
        read_back: read every object in storage whole; else only what says which release is live.

    Raises:
        RepositoryBusyError: somebody is changing a repository: look again when they are done.
    """
    if isinstance(target, LiveRepository):
        return verify_folder(target)
    if isinstance(target, Fleet):
        return tuple(_fleet(target))
    return (*verify(target.local), *_objects(target, read_back=read_back))


def _fleet(fleet: Fleet) -> Iterator[VerifyCheck]:
    yield from verify_folder(fleet.lead)
    for member in fleet.members:
        if not member.shares:
            for check in verify_folder(member.repository):
                yield check.model_copy(update={"subject": f"{member.name}: {check.subject}"})
        for model in sorted({*models(fleet.root), *member.models()}):
            subject = f"{member.name}: {model} as on the lead"
            who = RolloutState(fleet.root).under_way_by(model)
            if who is not None:
                yield VerifyCheck(subject=subject, note=f"It is being rolled out by {who}.")
            elif _is_silent(member, fleet, model):
                yield VerifyCheck(
                    subject=subject,
                    unknown=f"Server {member.name!r} does not answer, so what it serves could not "
                    "be found out. Start it, or take it out of target.fleet in the policy.",
                )
            else:
                yield checked(subject, partial(_as_on_lead, member, fleet, model))


def _is_silent(member: FleetServer, fleet: Fleet, model: str) -> bool:
    """Whether nothing but its server could say that a member serves what is live."""
    live = Layout(fleet.root, model).current()
    here = Layout(member.repository.root, model).current()
    if live is None or here is None or here.version != live.version:
        return False
    return not member.answers()


def _as_on_lead(member: FleetServer, fleet: Fleet, model: str) -> None:
    current = Layout(fleet.root, model).current()
    live = current.version if current else None
    here = Layout(member.repository.root, model).current()
    if live is None and here is not None and was_withdrawn(Layout(fleet.root, model)):
        raise RepositoryError(
            f"{model} was withdrawn; server {member.name!r} has release {here.version} in "
            f"{member.repository.root}. Take it out with `enginegate verify --repair`."
        )
    if live is not None and not member.serves(model, live):
        state = "does not serve it" if member.answers() else "does not answer"
        raise RepositoryError(
            f"Release {live} of {model} is live; server {member.name!r} {state}. Bring it to the "
            "lead's with `enginegate verify --repair`."
        )


def _objects(target: ObjectRepository, *, read_back: bool) -> Iterator[VerifyCheck]:
    where = f"{target.model} in {target.store.url}"
    yield checked(f"{where}: journal", partial(_check_journal, target))
    yield checked(f"{where}: live release", partial(_check_pointer, target))
    yield checked(f"{where}: what killed uploads left", partial(_check_stray, target))
    for version in target.releases.versions() if read_back else ():
        if target.releases.has_bytes(version):
            check = partial(target.releases.check, version)
            yield checked(f"{where}: release {version}", check)


def _check_journal(target: ObjectRepository) -> None:
    entries = target.journal.read()
    if entries and is_open(entries[-1]) and is_abandoned(entries[-1]):
        raise RepositoryError(
            f"{cut_short(entries[-1])} Finish or undo it with `enginegate verify --repair`."
        )


def _check_pointer(target: ObjectRepository) -> None:
    """What is live must be what the journal says, with that manifest, and be so here too."""
    check_recorded(target.journal, target.releases, AuditLog(target.root).read())
    change = last_change(target.journal.read())
    last = change.version if change is not None and change.kind != "withdraw" else None
    pointer = target.current()
    live = pointer.version if pointer else None
    if live != last:
        raise TamperedError(
            f"current.json says that release {live or 'none'} is live; the journal's last change "
            f"made it {last or 'none'}. Somebody changed the bucket."
        )
    if pointer is not None and live is not None:
        target.releases.release_of(pointer)
    current = Layout(target.root, target.model).current()
    here = current.version if current else None
    if here != live:
        raise RepositoryError(
            f"Release {live or 'none'} is live; {target.root} has {here or 'none'}. Follow it with "
            "`enginegate pull`."
        )
    if pointer is not None and current is not None and live is not None:
        wanted, held = pointer.promises.get(live), current.promises.get(live)
        if promise_differs(pointer, current):
            raise RepositoryError(
                f"Release {live} is held to the promise {(wanted or 'its own')[:12]}, and in "
                f"{target.root} to {(held or 'its own')[:12]}. Follow it with `enginegate pull`."
            )


def _check_stray(target: ObjectRepository) -> None:
    last = target.journal.last()
    stray = target.releases.stray()
    if stray and not (last is not None and is_open(last)):
        raise RepositoryError(
            f"There are objects of {', '.join(map(str, stray))}, which never became releases. "
            "Remove them with `enginegate verify --repair`."
        )
