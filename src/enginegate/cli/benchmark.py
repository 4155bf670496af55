"""Benchmarks on the command line: a search on a server of our own, or one load on yours."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from enginegate.atomic_io import write_file
from enginegate.benchmark.remote import RemoteModel, remote_model
from enginegate.candidate import Candidate
from enginegate.cli.benchmark_options import BenchmarkRequest, wanted
from enginegate.cli.checkout import of_checkout
from enginegate.cli.terminal import interruptible
from enginegate.errors import ExitCode, InputError
from enginegate.evidence import Outcome
from enginegate.loadgen.traffic import Traffic
from enginegate.measurement import ClosedLoad, Driver, LatencySample
from enginegate.measuring.p99 import decide_pooled
from enginegate.policy import Policy
from enginegate.policy.benchmarking import Slo
from enginegate.report import (
    ServingReport,
    print_measured,
    print_serving,
    serving_figures,
    serving_page,
)
from enginegate.shadow.request_mix import request_mix
from enginegate.workspace import Workspace

_log = logging.getLogger("enginegate.benchmark")
_EXIT_CODES = {
    Outcome.PASSED: ExitCode.OK,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    Outcome.FAILED: ExitCode.GATES_FAILED,
    Outcome.ERRORED: ExitCode.COULD_NOT_FIND_OUT,
}
_PIPE_COLUMNS = 120

PolicyFile = Annotated[Path, typer.Argument(help="the model family's policy")]
Names = Annotated[
    list[str] | None,
    typer.Option(help="KIND-PRECISION, may repeat; default: all of the policy"),
]
LoadName = Annotated[
    str | None,
    typer.Option(
        help="poisson, constant, bursts or replay (of recorded arrivals): requests leave on "
        "schedule; closed:N: N clients that wait for their answers (only with --server; the SLO "
        "is not judged). "
        "Default: the policy's"
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0.001, help="requests/s; only this rate is tried. Default: searched for"),
]
Seconds = Annotated[
    float | None, typer.Option(min=0.1, help="longest one measurement. Default: the policy's")
]
DriverName = Annotated[
    Driver | None, typer.Option(help="who sends; perf_analyzer is a cross-check")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="gRPC HOST:PORT of a running Triton: measures what it serves, at one load; its "
        "configuration is not changed, so nothing is searched"
    ),
]
ModelName = Annotated[
    str | None, typer.Option(help="with --server: the model there. Default: the policy's name")
]
Folder = Annotated[
    Path | None, typer.Option(help="of the results. Default: .enginegate/serving/NAME")
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(benchmark)


def benchmark(  # noqa: PLR0913, PLR0917 - one argument for each option
    policy: PolicyFile,
    candidate: Names = None,
    load: LoadName = None,
    rate: Rate = None,
    seconds: Seconds = None,
    driver: DriverName = None,
    server: Address = None,
    model: ModelName = None,
    out: Folder = None,
) -> None:
    """Find the serving configuration that holds the SLO best, and nothing else.

    Each candidate's engine (built first if it is missing) is served by a
    Triton of its own on this machine, in one configuration after another,
    under real requests. The best is confirmed with fresh seeds. Nothing is
    judged, filed or published. Measurements are kept: run it again after
    Ctrl-C, or with another SLO, and only what is missing is measured.

    Writes serving.html (interactive), serving.json and config.pbtxt of the
    winner, where each line says which measurement chose it; docs/serving.md
    explains how to read them.

    \b
    Examples:
      enginegate benchmark POLICY
      enginegate benchmark POLICY --candidate onnxruntime-int8 --load bursts
      enginegate benchmark POLICY --rate 500      (does 500/s hold?)
      enginegate benchmark POLICY --server HOST:8001 --rate 200 --seconds 60
      enginegate benchmark POLICY --server HOST:8001 --load closed:16
    """
    asked = BenchmarkRequest(load, rate, seconds, driver)
    rules = asked.rules(policy)
    folder = out or Workspace.of(rules).root / "serving" / rules.name
    _check_use(asked, server, candidate, model)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is a file. Name a folder, which need not be there yet.")
    if server is not None:
        raise typer.Exit(_measure_there(rules, asked, (server, model or rules.name), folder))
    raise typer.Exit(_search_here(rules, wanted(rules, candidate or []), folder))


def _check_use(
    asked: BenchmarkRequest, server: str | None, candidate: list[str] | None, model: str | None
) -> None:
    """Refuse options that do not go together, instead of overlooking one."""
    if server is not None and candidate:
        raise InputError("--candidate is searched here; with --server name its --model.")
    if server is None and (asked.clients is not None or model is not None):
        raise InputError(
            "closed:N and --model go with --server: a search needs requests that leave on "
            "schedule, because a closed loop slows down with the server and hides its tail."
        )


def _console() -> Console:
    """A pipe has no width of its own; the tables need this much."""
    plain = Console(highlight=False, emoji=False)
    return (
        plain if plain.is_terminal else Console(highlight=False, emoji=False, width=_PIPE_COLUMNS)
    )


def _search_here(rules: Policy, candidates: tuple[Candidate, ...], folder: Path) -> ExitCode:
    console = _console()
    flow = of_checkout("flows.benchmark")
    with interruptible(console):
        found = flow.benchmark_candidates(rules, candidates)
    report: ServingReport = found.report
    print_serving(report, console)
    for candidate, why in found.unmeasured.items():
        console.print(f"Not measured: {candidate}: {' '.join(why.split())}", markup=False)
    files = {
        "serving.html": serving_page(report, serving_figures(report)).encode(),
        "serving.json": report.pretty_json(),
        "config.pbtxt": found.config_pbtxt.encode(),
    }
    for name, content in files.items():
        if content:
            write_file(folder / name, content)
            console.print(f"Written: {folder / name}", markup=False)
    if report.winner is not None:
        return ExitCode.OK
    outcomes = [benchmark.outcome for benchmark in report.candidates]
    return _EXIT_CODES[max(outcomes, default=Outcome.INCONCLUSIVE)]


def _measure_there(
    rules: Policy, asked: BenchmarkRequest, where: tuple[str, str], folder: Path
) -> ExitCode:
    """One load; of an open one the exit code says whether the SLO is shown to hold."""
    console = _console()
    served, workspace = remote_model(*where), Workspace.of(rules)
    traffic = _traffic(rules, served)
    load = asked.one_load(rules)
    _log.info("%s at %s: %s for %.0f s", served.name, where[0], load, load.duration_s)
    found = served.measure(
        traffic,
        load,
        folder=workspace.results / "latencies",
        slo_p99_ms=rules.slo.p99_ms,
        driver=rules.load.driver,
    )
    print_measured([found.measurement], rules.slo, console)
    write_file(folder / "measurement.json", found.measurement.pretty_json())
    console.print(f"Written: {folder / 'measurement.json'}", markup=False)
    code, said = said_of(found, rules.slo)
    console.print(said, markup=False)
    return code


def said_of(found: LatencySample, slo: Slo) -> tuple[ExitCode, str]:
    """Whether one measurement shows that the SLO holds; of a closed loop that is not asked."""
    if found.measurement.invalid:
        return ExitCode.INCONCLUSIVE, "p99 is open: the measurement is not valid."
    if isinstance(found.measurement.load, ClosedLoad):
        return ExitCode.OK, (
            f"Not judged against p99 <= {slo.p99_ms:g} ms: a closed loop slows down with the "
            "server, which hides its tail. Offer a rate with --rate to have it judged."
        )
    decision = decide_pooled([found], slo)
    held = {Outcome.PASSED: "holds", Outcome.FAILED: "does not hold"}
    said = held.get(decision.outcome, f"is open; about {decision.needed} requests would decide")
    counted = f"{decision.over} of {decision.requests} over"
    return _EXIT_CODES[decision.outcome], f"p99 <= {slo.p99_ms:g} ms {said} ({counted})."


def _traffic(rules: Policy, served: RemoteModel) -> Traffic:
    requests = request_mix(rules.traffic_tables, served.config.inputs, Workspace.of(rules).shadow)
    return Traffic.from_data(
        served.name,
        requests.data,
        order_seed=rules.search.seed,
        timeout_s=rules.load.timeout_s,
        arrivals_s=requests.arrivals_s,
        batch_sizes=requests.batch_sizes,
    )
