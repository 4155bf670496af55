"""Which kills are made: each journal step, each durable act, torn appends, and random instants."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.kills.job import What
from tests.kills.kill_points import Death
from tests.kills.tagged import CHAIN, ENGINE

PUBLISH = ("intent", "placed", "configured", "loaded", "done")
ROLLBACK = ("intent", "configured", "loaded", "done")
_APPENDS = {"publish": 6, "rollback": 5}
_RECOVERY_ACTS = 24
# An undisturbed operation takes about this long; later instants find it done.
_LASTS_S: dict[tuple[What, str], float] = {
    ("publish", ENGINE): 0.25,
    ("rollback", ENGINE): 0.1,
    ("publish", CHAIN): 0.6,
    ("rollback", CHAIN): 0.15,
}


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: what is done, where it dies, and where its recovery dies (0: it does not)."""

    what: What
    model: str
    death: Death
    twice: int = 0


Acts = Mapping[tuple[What, str], int]


def every_step() -> Iterator[Kill]:
    """Each step of the journal, of an engine and of an ensemble, there and back, and undone."""
    for model in (ENGINE, CHAIN):
        also = ("prepared",) if model == CHAIN else ()
        for step in (*PUBLISH, *also):
            yield Kill("publish", model, Death("step", step=step))
        if model == ENGINE:
            yield Kill("publish-tight", model, Death("step", step="unloading"))
        for step in (*ROLLBACK, *also):
            yield Kill("rollback", model, Death("step", step=step))
        yield Kill("publish-wrong", model, Death("step", step="undone"))


def replaced() -> Iterator[Kill]:
    """Each step of a publication that unloads what is live first; meanwhile nobody is answered."""
    for step in ("unloading", *PUBLISH[2:]):
        yield Kill("publish-alone", ENGINE, Death("step", step=step))
    yield Kill("publish-alone", CHAIN, Death("step", step="unloading"))
    for number in (3, 8):
        yield Kill("publish-alone", ENGINE, Death("step", step="loaded"), twice=number)


def every_act(acts: Acts) -> Iterator[Kill]:
    """Just before each durable act of each operation."""
    for (what, model), count in acts.items():
        for number in range(1, count + 1):
            yield Kill(what, model, Death("act", number=number))


def torn() -> Iterator[Kill]:
    """In the middle of each append to the journal and to the audit log."""
    for what, count in _APPENDS.items():
        for number in range(1, count + 1):
            yield Kill("publish" if what == "publish" else "rollback", ENGINE, _torn(number))


def in_recovery() -> Iterator[Kill]:
    """Killed before the commit, and again before each durable act of the recovery."""
    for number in range(1, _RECOVERY_ACTS + 1):
        yield Kill("publish", ENGINE, Death("step", step="loaded"), twice=number)


def instants(count: int, seed: int = 0) -> Iterator[Kill]:
    """At random instants of random operations."""
    return drawn(count, _LASTS_S, random.Random(seed))  # noqa: S311 - no secret


def drawn(
    count: int, lasts_s: Mapping[tuple[What, str], float], draw: random.Random
) -> Iterator[Kill]:
    """The same of operations that last so long."""
    for _ in range(count):
        (what, model), longest_s = draw.choice(list(lasts_s.items()))
        after_s = round(draw.uniform(0.0, longest_s), 4)
        yield Kill(what, model, Death("instant", after_s=after_s))


def long(kills: int, acts: Acts) -> list[Kill]:
    """All of these in random order; the steps and torn appends always, the rest thinned out evenly.

    About a third are random instants; so is what is left when every point had its turn.
    """
    always = [*every_step(), *torn()]
    return filled(kills, always, [*in_recovery(), *every_act(acts)], instants)


def filled(
    kills: int, always: list[Kill], points: list[Kill], rest: Callable[[int], Iterator[Kill]]
) -> list[Kill]:
    """What is always made, as many of the points as there is room for, and the rest, shuffled."""
    room = max(0, kills - kills // 3 - len(always))
    kept = always + (points if len(points) <= room else _thinned(points, room))
    chosen = [*kept, *rest(max(0, kills - len(kept)))]
    random.Random(1).shuffle(chosen)  # noqa: S311 - no secret
    return chosen


def short(acts: Acts) -> list[Kill]:
    """Thirty kills and a few to spare, since some come too late: each step once, and others."""
    steps = [kill for kill in every_step() if kill.model == ENGINE or kill.death.step == "prepared"]
    points = list(every_act({key: count for key, count in acts.items() if key[1] == ENGINE}))
    return [
        *steps,
        *_thinned(points, 12),
        *_thinned(list(torn()), 5),
        *_thinned(list(in_recovery()), 2),
        *instants(6),
    ]


def _torn(number: int) -> Death:
    return Death("torn", number=number)


def _thinned(kills: list[Kill], count: int) -> list[Kill]:
    return [kills[(2 * place + 1) * len(kills) // (2 * count)] for place in range(count)]
