"""Scheduled: what must be looked after while nobody promotes anything.

What a killed promotion or rollback left is finished or undone first. The live release is watched
against its promise: look after look while it is young, then one look a run. Recorded traffic is
user data, so its age is limited by the policy and enforced here; a recording whose process was
killed is ended on the server; and the live repository is verified.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prefect import flow

from enginegate.decision import Release
from enginegate.errors import EnginegateError, RepositoryError, ServerError
from enginegate.evidence import Outcome
from enginegate.policy import Policy, read_policy
from enginegate.watching import Look
from tasks.announce import announce
from tasks.live_sample import compare_live
from tasks.pick_up import pick_up
from tasks.release import follow_with_champion
from tasks.unanswered import note_unanswered
from tasks.watch import (
    alert,
    expire_shadow,
    follow_storage,
    is_live,
    keep_look,
    live_release,
    roll_back_failed,
    take_look,
    tell_ledger,
    verify_live,
)

# One run goes on for at most this long, so that the next one of a schedule of ten minutes starts.
RUN_S = 540.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What one run did and saw.

    Attributes:
        done: one sentence for each thing that was done.
        looks: at what is live; none when nothing is.
    """

    done: tuple[str, ...]
    looks: tuple[Look, ...]


@flow(name="watch", persist_result=False, validate_parameters=False)
def watch(policy: Path, run_s: float = RUN_S) -> Watched:
    """Watch what is live, delete recorded traffic that is too old, verify the live repository.

    Args:
        policy: the model family's policy file.
        run_s: a young release is watched for at most this long in one run; 0 is one look.

    Raises:
        RepositoryError: the live repository is not what was published; the message lists it all.
        ServerError: what is live could not be measured. Both alert; a look that failed does what
            the policy says, and is in the result.
    """
    rules = read_policy(Path(policy))
    try:
        return _watch(rules, run_s)
    except EnginegateError as error:
        alert(rules.name, str(error))
        raise


def _watch(rules: Policy, run_s: float) -> Watched:
    done = (*pick_up(rules), *expire_shadow(rules), *tell_ledger(rules), *follow_storage(rules))
    try:
        problems = verify_live(rules)
        looks = tuple(_looks(rules, run_s))
    finally:
        # Last: a Prefect server that does not answer delays no look and no rollback.
        done += (*note_unanswered(rules), *announce(rules))
    if problems:
        raise RepositoryError("\n".join(problems))
    broken = [look for look in looks if look.outcome is Outcome.ERRORED]
    if broken:
        raise ServerError("\n".join(str(look) for look in broken))
    return Watched(done, looks)


def _looks(rules: Policy, run_s: float) -> Iterator[Look]:
    """One look; while the release is young, more of them until one does not hold."""
    end_s = time.monotonic() + run_s
    while (release := live_release(rules)) is not None:
        look = take_look(rules, release, compare_live(rules, release))
        look = keep_look(rules, release, _acted(rules, release, look))
        yield look
        stops = look.outcome in {Outcome.FAILED, Outcome.ERRORED}
        if stops or not look.intensive or time.monotonic() + rules.watch.look_s > end_s:
            return


def _acted(rules: Policy, release: Release, look: Look) -> Look:
    """Do what the policy says about a look; a rollback that is refused becomes an alert.

    Unless another release is live by now: the log says so, and there is nothing left to do.
    """
    if look.action == "rollback":
        back = roll_back_failed(rules, release, look)
        if back is not None:
            alert(look.model, f"{look}. {back.said}", version=look.version, action="rollback")
            follow_with_champion(rules, back.release)
            announce(rules)
            return look
        if not is_live(rules, release):
            # Somebody else was faster; what failed serves nobody any more.
            return look.model_copy(update={"action": "none"})
        look = look.model_copy(update={"action": "alert"})
    # One that could not be measured ends the run, which alerts.
    if look.action == "alert" and look.outcome is not Outcome.ERRORED:
        alert(look.model, str(look), version=look.version)
    return look
