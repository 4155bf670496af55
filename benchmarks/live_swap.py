"""Promotes and rolls back under steady load on a real Triton: what do clients notice?

Poisson arrivals, latency from when a request was due, each answer checked against the version that
it names. Half of the swaps publish a new release (bytes copied, digests, load, warm-up, golden
samples, commit), half roll back to the one before. They run in a process of their own; the model is
warmed up before it takes traffic. Calm of equal length before and after each swap is what the time
during it is compared with.

``python benchmarks/live_swap.py`` prints a table and writes results/live_swap.json and .png;
``--swaps 10`` measures less.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lab.campaign import Campaign  # noqa: E402
from benchmarks.lab.figures import (  # noqa: E402
    RESULTS,
    clients_row,
    counted,
    keep,
    machine,
    percentile_ms,
)
from benchmarks.lab.nursery import Nursery  # noqa: E402
from benchmarks.lab.tagged import ENGINE, QUICK  # noqa: E402
from benchmarks.lab.windows import PHASES, Seen, Swap, lasted_ms, rows, seen  # noqa: E402
from enginegate.triton.callers import Callers  # noqa: E402
from enginegate.triton.install import find_triton  # noqa: E402
from enginegate.triton.server import ServerOptions, start  # noqa: E402

SWAPS, RATE_PER_S, CALM_S = 100, 100.0, 0.7
TARGET = 1.5
_EVERY = 10


def measure(
    swaps: int, rate_per_s: float, calm_s: float, *, quick: bool
) -> tuple[dict[str, Any], list[Seen]]:
    """Swap so often under load."""
    with tempfile.TemporaryDirectory(prefix="live-swap-") as name:
        folder = Path(name)
        (folder / "repository").mkdir()
        install = find_triton(folder / "triton")
        options = ServerOptions(flags=QUICK if quick else ())
        with (
            start(install, folder / "repository", folder=folder, options=options) as server,
            Nursery(folder / "nursery") as nursery,
        ):
            campaign = Campaign(server, nursery, folder)
            campaign.begin(ENGINE)
            with campaign.called(ENGINE, rate_per_s=rate_per_s) as (clients,):
                time.sleep(calm_s)
                done = list(_swaps(campaign, swaps, calm_s))
            version = server.version
    found = seen(clients, done)
    return _figures(found, clients, rate_per_s, version), found


def _swaps(campaign: Campaign, count: int, calm_s: float) -> Iterator[Swap]:
    began_run_s = time.perf_counter()
    for number in range(count):
        # The package is made, and the next process is chosen, before the clock starts.
        swap = campaign.prepared("rollback" if number % 2 else "publish", ENGINE)
        time.sleep(calm_s)
        began_s = time.perf_counter()
        swap()
        ended_s = time.perf_counter()
        time.sleep(calm_s)
        yield Swap("rollback" if number % 2 else "promotion", began_s, ended_s, calm_s)
        if (number + 1) % _EVERY == 0:
            left_s = (time.perf_counter() - began_run_s) / (number + 1) * (count - number - 1)
            print(f"{number + 1} of {count} swaps, {left_s:.0f} s left", flush=True)


def _figures(
    found: list[Seen], clients: Callers, rate_per_s: float, version: str
) -> dict[str, Any]:
    late_s = clients.result.late_s if clients.result else np.zeros(0)
    return {
        "machine": machine(),
        "triton": version,
        "rate_per_s": rate_per_s,
        "swaps": lasted_ms(found),
        "clients": clients_row(clients),
        "generator_late_p99_ms": percentile_ms(late_s, 0.99),
        "target_p99_over_before": TARGET,
        "rows": rows(found),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table and what it supports."""
    print(
        "\n| swap | phase | requests | p50 ms | p99 ms | max ms | p99 over before (95 %) |"
        "\n|---|---|---:|---:|---:|---:|---:|"
    )
    for row in figures["rows"]:
        print(
            f"| {row['swap']} | {row['phase']} | {row['requests']:,} | {row['p50_ms']:.1f} "
            f"| {row['p99_ms']:.1f} | {row['max_ms']:.1f} "
            f"| {row['p99_over_before']:.2f} ({row['low']:.2f} to {row['high']:.2f}) |"
        )
    print(f"\nTriton {figures['triton']}, {figures['rate_per_s']:g} requests a second, Poisson.")
    for what, took in figures["swaps"].items():
        print(
            f"- {took['count']:.0f} {what}s: median {took['median_ms']:.0f} ms, "
            f"slowest {took['max_ms']:.0f} ms"
        )
    clients = figures["clients"]
    print(f"- failed: {counted(clients['failed'], clients['requests'], 'requests')}")
    print(f"- wrong: {counted(clients['wrong'], clients['requests'], 'answers')}")
    total = int(sum(took["count"] for took in figures["swaps"].values()))
    if not clients["failed"] and not clients["wrong"]:
        print(f"- swaps that cost a request: {counted(0, total, 'swaps')}")
    print(
        f"- the load generator itself was late by {figures['generator_late_p99_ms']:.1f} ms (p99)"
    )


def plot(found: Sequence[Seen], path: Path) -> None:
    """Every request's latency around its swap, with the p99 of each phase as a line."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    colours = {"before": "#0072B2", "during": "#D55E00", "after": "#009E73"}
    kinds = sorted({each.swap.what for each in found})
    figure = Figure(figsize=(10.0, 5.5), layout="constrained")
    for axes, what in zip(np.atleast_1d(figure.subplots(1, len(kinds))), kinds, strict=True):
        own = [each for each in found if each.swap.what == what]
        for phase in PHASES:
            due_s = np.concatenate([each.due_s[phase] for each in own])
            latency_ms = np.concatenate([each.latency_s[phase] for each in own]) * 1e3
            axes.scatter(due_s, latency_ms, s=4, alpha=0.35, color=colours[phase])
            p99_ms = percentile_ms(latency_ms / 1e3, 0.99)
            if len(due_s):
                axes.hlines(
                    p99_ms,
                    due_s.min(),
                    due_s.max(),
                    color=colours[phase],
                    label=f"p99 {phase}: {p99_ms:.1f} ms (n = {len(due_s):,})",
                )
        axes.axvline(0.0, color="#333333", linewidth=0.8)
        axes.set(
            title=f"{len(own)} {what}s",
            xlabel="seconds from the begin of the swap",
            ylabel="latency, ms",
            yscale="log",
        )
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.savefig(path, dpi=120)


def main() -> int:
    """Measure, print, keep; status 1 if a request failed or an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--swaps", type=int, default=SWAPS)
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests a second")
    parser.add_argument("--calm", type=float, default=CALM_S, help="seconds before and after each")
    parser.add_argument(
        "--quick", action="store_true", help="a server that does not complete configurations"
    )
    given = parser.parse_args()
    figures, found = measure(given.swaps, given.rate, given.calm, quick=given.quick)
    show(figures)
    print(f"\n{keep('live_swap', figures)}")
    plot(found, RESULTS / "live_swap.png")
    clients = figures["clients"]
    return int(bool(clients["failed"] or clients["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
