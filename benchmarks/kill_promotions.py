"""Kills promotions and rollbacks on a real Triton, under load, and counts what was left broken.

Each operation runs in a process of its own that dies by SIGKILL: after each step of the journal,
before each durable act (fsync, rename, unlink, ...), in the middle of an append, in the middle of
recovery, and at random instants. A fresh process recovers and verifies; then folder and server are
looked at again from here. Clients of an engine and of an ensemble never stop, and each answer is
checked against the version that it names.

``python benchmarks/kill_promotions.py`` prints a table and writes results/kill_promotions.json;
``--kills 60`` measures less. ``--fleet`` does it to roll-outs to three servers, one with a
repository of its own, and writes results/kill_promotions_fleet.json.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lab.figures import at_most, clients_row, counted, keep, machine  # noqa: E402
from enginegate.errors import ServerError  # noqa: E402
from enginegate.loadgen.background_load import BackgroundLoad  # noqa: E402
from tests.kills.campaign import Campaign, Killed  # noqa: E402
from tests.kills.fleet import OPERATIONS, fleet_kills, standing  # noqa: E402
from tests.kills.job import What  # noqa: E402
from tests.kills.plan import Kill, long  # noqa: E402
from tests.kills.tagged import CHAIN, ENGINE  # noqa: E402

KILLS, RATE_PER_S = 600, 40.0
_EVERY = 20
_OPERATIONS: tuple[What, ...] = ("publish", "rollback", "publish-wrong")


def measure(kills: int, rate_per_s: float, *, fleet: bool = False) -> dict[str, Any]:
    """Kill so many operations, of one server or of a fleet.

    Raises:
        ServerError: Triton died; nothing that was killed may bring it down.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kill-promotions-") as name,
        standing(Path(name), fleet=fleet) as campaign,
    ):
        began_s = time.perf_counter()
        with campaign.called(ENGINE, CHAIN, rate_per_s=rate_per_s) as clients:
            plan = (_fleet_plan if fleet else _plan)(campaign, kills)
            found = list(_killed(campaign, plan))
        lasted_s = time.perf_counter() - began_s
        names = [
            f"{model} on {server}" if server else model
            for model in (ENGINE, CHAIN)
            for server in campaign.servers
        ]
        called = dict(zip(names, clients, strict=True))
        return _figures(plan, found, called, lasted_s, campaign.server.version)


def _plan(campaign: Campaign, kills: int) -> list[Kill]:
    acts = {
        (what, model): campaign.acts(what, model)
        for model in (ENGINE, CHAIN)
        for what in _OPERATIONS
    }
    return long(kills, acts)


def _fleet_plan(campaign: Campaign, kills: int) -> list[Kill]:
    return fleet_kills(kills, {key: campaign.undisturbed(*key) for key in OPERATIONS})


def _killed(campaign: Campaign, plan: list[Kill]) -> Iterator[Killed]:
    began_s, bad = time.perf_counter(), 0
    for number, each in enumerate(plan, start=1):
        try:
            killed = campaign.kill(each.what, each.model, each.death, twice=each.twice)
        except ServerError:
            print(f"During {each.what} of {each.model}, killed {each.death}:")
            campaign.check_alive()  # If a Triton itself died, this shows the end of its log.
            raise
        bad += bool(killed.problems)
        for problem in killed.problems:
            print(f"  {killed.model} {killed.what} {killed.death}: {problem}")
        if number % _EVERY == 0 or number == len(plan):
            left_s = (time.perf_counter() - began_s) / number * (len(plan) - number)
            print(f"{number} of {len(plan)}, {bad} broken, {left_s:.0f} s left", flush=True)
        yield killed


def _figures(
    plan: list[Kill],
    found: list[Killed],
    clients: dict[str, BackgroundLoad],
    lasted_s: float,
    version: str,
) -> dict[str, Any]:
    cut = [kill for kill in found if kill.cut]
    return {
        "machine": machine(),
        "triton": version,
        "lasted_s": round(lasted_s, 1),
        "kills": len(cut),
        "ended_before_the_kill": len(found) - len(cut),
        "broken": sum(bool(kill.problems) for kill in found),
        "broken_at_most": at_most(len(cut)),
        "rows": _rows(plan, found),
        "clients": {name: clients_row(each) for name, each in clients.items()},
        "broken_kills": [asdict(kill) for kill in found if kill.problems],
    }


def _rows(plan: list[Kill], found: list[Killed]) -> list[dict[str, Any]]:
    """Kills by model, operation and way of dying."""
    groups: dict[tuple[str, str, str], Counter[str]] = {}
    slowest: Counter[tuple[str, str, str]] = Counter()
    for each, killed in zip(plan, found, strict=True):
        if not killed.cut:
            continue
        way = "step, then in recovery" if each.twice else each.death.at
        key = (killed.model, killed.what, way)
        count = groups.setdefault(key, Counter())
        count["kills"] += 1
        count["new" if killed.after == killed.target else "old"] += 1
        count["recovered"] += killed.recovered
        count["broken"] += bool(killed.problems)
        slowest[key] = max(slowest[key], round(killed.recovery_s * 1e3))
    return [
        {
            "model": key[0],
            "operation": key[1],
            "died": key[2],
            **{name: groups[key][name] for name in ("kills", "recovered", "old", "new", "broken")},
            "slowest_recovery_ms": slowest[key],
        }
        for key in sorted(groups)
    ]


def show(figures: dict[str, Any]) -> None:
    """Print the table and what it supports."""
    names = list(figures["rows"][0])
    print("\n| " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|" + "|".join("---" if place < 3 else "---:" for place in range(len(names))) + "|")  # noqa: PLR2004
    for row in figures["rows"]:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")
    print(f"\nTriton {figures['triton']}, {figures['lasted_s']:.0f} s.")
    print(f"- left broken: {counted(figures['broken'], figures['kills'], 'kills')}")
    for name, seen in figures["clients"].items():
        print(f"- {name}, failed: {counted(seen['failed'], seen['requests'], 'requests')}")
        print(f"- {name}, wrong: {counted(seen['wrong'], seen['requests'], 'answers')}")


def main() -> int:
    """Measure, print, keep; status 1 if anything was left broken, failed or wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests a second, each")
    parser.add_argument("--fleet", action="store_true", help="roll-outs to several servers")
    given = parser.parse_args()
    figures = measure(given.kills, given.rate, fleet=given.fleet)
    show(figures)
    print(f"\n{keep('kill_promotions_fleet' if given.fleet else 'kill_promotions', figures)}")
    seen = figures["clients"].values()
    return int(bool(figures["broken"] or any(c["failed"] or c["wrong"] for c in seen)))


if __name__ == "__main__":
    sys.exit(main())
