"""Scheduled: what must be looked after while nobody promotes anything.

Recorded traffic is user data, so its age is limited by the policy and enforced here; a recording
whose process was killed is ended on the server; and the live repository is verified.
"""

from pathlib import Path

from prefect import flow

from enginegate.errors import RepositoryError
from enginegate.policy import read_policy
from tasks.watch import expire_shadow, verify_live


@flow(name="watch", persist_result=False, validate_parameters=False)
def watch(policy: Path) -> tuple[str, ...]:
    """Delete recorded traffic that is too old, end recordings cut short, verify what is live.

    Returns:
        One sentence for each thing that was done.

    Raises:
        RepositoryError: the live repository is not what was published; the message lists it all.
    """
    rules = read_policy(Path(policy))
    done = expire_shadow(rules)
    problems = verify_live(rules)
    if problems:
        raise RepositoryError("\n".join(problems))
    return done
