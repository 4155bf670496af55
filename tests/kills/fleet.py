"""The campaign's fleet, and where its roll-outs are killed.

Three servers: the primary, one with a repository of its own, and one that serves the primary's.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from enginegate.triton.install import find_triton
from enginegate.triton.server import ServerOptions, start
from tests.kills.campaign import Campaign
from tests.kills.fork_server import ForkServer
from tests.kills.job import What
from tests.kills.kill_points import Death
from tests.kills.plan import (
    PUBLISH,
    ROLLBACK,
    Kill,
    drawn,
    every_act,
    filled,
)
from tests.kills.tagged import CHAIN, ENGINE, QUICK

CANARY_S = 0.2
OPERATIONS: tuple[tuple[What, str], ...] = (
    ("publish", ENGINE),
    ("rollback", ENGINE),
    ("publish-wrong", ENGINE),
    ("publish-unfit", ENGINE),
    ("publish", CHAIN),
    ("rollback", CHAIN),
)
_ALONE, _TWIN = "own", "twin"
# Each of the two journals takes in every step once; going back takes the primary's a second time.
_UNFIT = (
    *(("intent", 2), ("placed", 2), ("configured", 2), ("undone", 1)),
    *(("intent", 3), ("configured", 3), ("loaded", 2), ("done", 2)),
)
_APPENDS: dict[What, int] = {"publish": 12, "rollback": 10}
_RECOVERY_ACTS = 32


@contextmanager
def standing(folder: Path, *, fleet: bool) -> Iterator[Campaign]:
    """Servers with two releases of an engine and of an ensemble: one, or a fleet."""
    install = find_triton(folder / "triton")
    options = ServerOptions(flags=QUICK)
    places = {"": folder}
    if fleet:
        places |= {_ALONE: folder / _ALONE, _TWIN: folder / _TWIN}
    with ExitStack() as stack:
        servers = {}
        for name, place in places.items():
            repository = (folder if name == _TWIN else place) / "repository"
            repository.mkdir(parents=True, exist_ok=True)
            running = start(install, repository, folder=place, options=options)
            servers[name] = stack.enter_context(running)
        forks = stack.enter_context(ForkServer(folder / "forks"))
        primary = servers.pop("")
        campaign = Campaign(primary, forks, folder, others=servers, canary_s=CANARY_S)
        for model in (ENGINE, CHAIN):
            campaign.begin(model)
        yield campaign


def fleet_kills(kills: int, lasting: Mapping[tuple[What, str], tuple[int, float]]) -> list[Kill]:
    """The steps, torn appends and canary analysis always; acts and recoveries thinned out evenly.

    Args:
        kills: how many.
        lasting: durable acts and seconds of each operation when it is left alone.
    """
    acts = {key: acts for key, (acts, _) in lasting.items()}
    always = [*_every_step(), *_torn(), *_in_canary_analysis()]
    points = [*_in_recovery(), *every_act(acts)]
    lasts_s = {key: lasts_s for key, (_, lasts_s) in lasting.items()}
    return filled(kills, always, points, lambda count: drawn(count, lasts_s, random.Random(0)))  # noqa: S311


def _every_step() -> Iterator[Kill]:
    """On the primary, then on the server with its own repository, there and back."""
    for model in (ENGINE, CHAIN):
        also = ("prepared",) if model == CHAIN else ()
        for journal in (1, 2):
            for step in (*PUBLISH, *also):
                yield Kill("publish", model, Death("step", step=step, number=journal))
            for step in (*ROLLBACK, *also):
                yield Kill("rollback", model, Death("step", step=step, number=journal))
    yield Kill("publish-wrong", ENGINE, Death("step", step="undone"))
    for step, number in _UNFIT:
        yield Kill("publish-unfit", ENGINE, Death("step", step=step, number=number))


def _torn() -> Iterator[Kill]:
    for what, count in _APPENDS.items():
        for number in range(1, count + 1):
            yield Kill(what, ENGINE, Death("torn", number=number))


def _in_canary_analysis() -> Iterator[Kill]:
    """When it begins, in its middle, and when it is over but nothing says so yet."""
    for model in (ENGINE, CHAIN):
        for after_s in (0.0, CANARY_S / 2, CANARY_S):
            yield Kill("publish", model, Death("window", after_s=after_s))


def _in_recovery() -> Iterator[Kill]:
    """Of the primary alone, of a canary that rolls back, and of a server that replicates."""
    deaths = (
        Death("step", step="loaded"),
        Death("window", after_s=0.0),
        Death("step", step="loaded", number=2),
    )
    for death in deaths:
        for number in range(1, _RECOVERY_ACTS + 1):
            yield Kill("publish", ENGINE, death, twice=number)
    for number in range(1, _RECOVERY_ACTS + 1):
        refused = Death("step", step="undone")
        yield Kill("publish-unfit", ENGINE, refused, twice=number)
