"""Promotes and rolls back under steady load on a real Triton: what do clients notice?

Poisson arrivals, latency from when a request was due, each answer checked against the version that
it names. Half of the swaps publish a new release (bytes copied, digests, load, warm-up, golden
samples, commit), half roll back to the one before. They run in a process of their own; the model is
warmed up before it takes traffic. Calm of equal length before and after each swap is what the time
during it is compared with.

Twice: a model that works for 20 ms a batch, and one that does next to nothing, whose latency is
that of the machine. Beside them a control that changes nothing on the server: some Python process
starts and imports NumPy, which is what a new version of a Python model costs the machine.

``python benchmarks/live_swap.py`` prints a table and writes results/live_swap.json and a picture of
each run;
``--swaps 10`` measures less.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lab.figures import (  # noqa: E402
    RESULTS,
    clients_row,
    counted,
    keep,
    machine,
    percentile_ms,
)
from benchmarks.lab.windows import PHASES, Seen, Swap, lasted_ms, rows, seen  # noqa: E402
from enginegate.loadgen.background_load import BackgroundLoad  # noqa: E402
from enginegate.triton.install import find_triton  # noqa: E402
from enginegate.triton.server import start  # noqa: E402
from tests.kills.campaign import Campaign  # noqa: E402
from tests.kills.fork_server import ForkServer  # noqa: E402
from tests.kills.tagged import ENGINE  # noqa: E402

SWAPS, RATE_PER_S, CALM_S = 100, 100.0, 0.7
WORK_MS = (20.0, 0.0)
TARGET = 1.5
_EVERY = 10
_CONTROL = (sys.executable, "-c", "import numpy")


def measure(
    work_ms: float, swaps: int, rate_per_s: float, calm_s: float
) -> tuple[dict[str, Any], list[Seen]]:
    """Swap so often under load."""
    with tempfile.TemporaryDirectory(prefix="live-swap-") as name:
        folder = Path(name)
        (folder / "repository").mkdir()
        install = find_triton(folder / "triton")
        with (
            start(install, folder / "repository", folder=folder) as server,
            ForkServer(folder / "forks") as forks,
        ):
            campaign = Campaign(server, forks, folder, work_ms=work_ms)
            campaign.begin(ENGINE)
            with campaign.called(ENGINE, rate_per_s=rate_per_s) as (clients,):
                time.sleep(calm_s)
                done = list(_swaps(campaign, swaps, calm_s))
            version = server.version
    found = seen(clients, done)
    return {"work_ms": work_ms, "triton": version, **_figures(found, clients, rate_per_s)}, found


def _swaps(campaign: Campaign, count: int, calm_s: float) -> Iterator[Swap]:
    began_run_s = time.perf_counter()
    for number in range(count):
        # The package is made, and the next process is chosen, before the clock starts.
        swap = campaign.prepared("rollback" if number % 2 else "publish", ENGINE)
        yield _timed("rollback" if number % 2 else "promotion", swap, calm_s)
        if number % 2:
            yield _timed("control", _control, calm_s)
        if (number + 1) % _EVERY == 0:
            left_s = (time.perf_counter() - began_run_s) / (number + 1) * (count - number - 1)
            print(f"{number + 1} of {count} swaps, {left_s:.0f} s left", flush=True)


def _timed(what: str, act: Callable[[], None], calm_s: float) -> Swap:
    time.sleep(calm_s)
    began_s = time.perf_counter()
    act()
    ended_s = time.perf_counter()
    time.sleep(calm_s)
    return Swap(what, began_s, ended_s, calm_s)


def _control() -> None:
    subprocess.run(_CONTROL, check=True)  # noqa: S603


def _figures(found: list[Seen], clients: BackgroundLoad, rate_per_s: float) -> dict[str, Any]:
    return {
        "rate_per_s": rate_per_s,
        "swaps": lasted_ms(found),
        "clients": clients_row(clients),
        "generator_late_p99_ms": percentile_ms(clients.result.late_s, 0.99),
        "rows": rows(found),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the table and what it supports."""
    print(f"\nThe model works for {figures['work_ms']:g} ms a batch.")
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
    total = int(sum(t["count"] for what, t in figures["swaps"].items() if what != "control"))
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
    parser.add_argument("--work", type=float, nargs="*", default=WORK_MS, help="ms a batch")
    given = parser.parse_args()
    runs = []
    for work_ms in given.work:
        figures, found = measure(work_ms, given.swaps, given.rate, given.calm)
        show(figures)
        plot(found, RESULTS / f"live_swap_{work_ms:g}ms.png")
        runs.append(figures)
    kept = {"machine": machine(), "target_p99_over_before": TARGET, "runs": runs}
    print(f"\n{keep('live_swap', kept)}")
    return int(any(run["clients"]["failed"] or run["clients"]["wrong"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
