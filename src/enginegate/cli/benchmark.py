"""Benchmarks on the command line: a search on a server of our own, or one load on yours."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from enginegate.atomic_io import write_file
from enginegate.benchmark.remote import RemoteModel, remote_model
from enginegate.candidate import Candidate
from enginegate.cli.failures import EXIT_CODES
from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.live_table import qualification_shown
from enginegate.cli.output.records import BenchmarkDocument
from enginegate.cli.policies import PolicyFile
from enginegate.errors import ExitCode, InputError
from enginegate.evidence import Outcome
from enginegate.loadgen.schedule import load_pattern
from enginegate.loadgen.traffic import Traffic
from enginegate.measurement import ClosedLoad, DriverChoice, LatencySample, Load
from enginegate.measuring.p99 import decide_pooled
from enginegate.pipeline import pipeline_module
from enginegate.policy import Policy, parse_policy, read_policy
from enginegate.policy.benchmarking import Slo
from enginegate.report import (
    ServingReport,
    print_measured,
    print_serving,
    serving_figures,
    serving_page,
)
from enginegate.report.tables import print_hanging
from enginegate.shadow.request_mix import request_mix
from enginegate.workspace import Workspace

_log = logging.getLogger("enginegate.benchmark")

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
    DriverChoice | None, typer.Option(help="who sends; perf_analyzer is a cross-check")
]
ServerAddress = Annotated[
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
    Path | None, typer.Option("--out", help="of the results. Default: .enginegate/serving/NAME")
]


@dataclass(frozen=True, slots=True)
class BenchmarkRequest:
    """The command line's changes to a policy; None leaves the policy's own."""

    load: str | None = None
    rate: float | None = None
    seconds: float | None = None
    driver: DriverChoice | None = None

    @property
    def clients(self) -> int | None:
        """Of a closed loop; None for an open one."""
        found = re.fullmatch(r"closed:([1-9]\d{0,4})", self.load or "")
        return int(found[1]) if found else None

    def rules(self, policy: Path) -> Policy:
        """The policy with these changes, checked like one that was written so.

        Raises:
            InputError: the load is none, or the policy does not allow the values.
        """
        rules = read_policy(policy)
        raw: dict[str, Any] = rules.model_dump()
        if self.load is not None and self.clients is None:
            raw["load"]["arrivals"] = self.load
        if self.driver is not None:
            raw["load"]["driver"] = self.driver
        if self.seconds is not None:
            raw["search"]["measurement_s"] = self.seconds
        if self.rate is not None:
            raw["search"] |= {"min_rate_per_s": self.rate, "max_rate_per_s": self.rate}
            if rules.search.at_rate_per_s is not None:
                raw["search"]["at_rate_per_s"] = self.rate
        changed = parse_policy(raw, f"{policy} with the command's options")
        try:
            load_pattern(changed.load.arrivals)
        except InputError as error:
            raise InputError(
                f"{error}\nA pattern is an open loop (on a schedule); closed:N is N clients, each "
                "waiting for its answer."
            ) from error
        return changed

    def one_load(self, rules: Policy) -> Load | ClosedLoad:
        """The load of a single measurement."""
        search = rules.search
        if self.clients is not None:
            return ClosedLoad(
                clients=self.clients, duration_s=search.measurement_s, seed=search.seed
            )
        rate = self.rate or rules.slo.min_throughput_per_s
        return Load(
            rate_per_s=rate,
            duration_s=search.measurement_s,
            seed=search.seed,
            arrivals=rules.load.arrivals,
        )


def benchmark_command(  # noqa: PLR0913, PLR0917 - one argument for each option
    policy: PolicyFile,
    candidate: Names = None,
    load: LoadName = None,
    rate: Rate = None,
    seconds: Seconds = None,
    driver: DriverName = None,
    server: ServerAddress = None,
    model: ModelName = None,
    folder: Folder = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Find the serving configuration that meets the SLO at the highest rate, and nothing else.

    Each candidate's engine (built first if it is missing) is served by a
    Triton of its own on this machine, in one configuration after another,
    under real requests. The best is confirmed with fresh seeds. Nothing is
    judged, logged or published. Measurements are kept: run it again after
    Ctrl-C, or with another SLO, and only what is missing is measured.

    Writes serving.html (interactive), serving.json and config.pbtxt of the
    winner, where each line says which measurement chose it; docs/serving.md
    explains how to read them.

    \b
    Examples:
      enginegate benchmark POLICY
      enginegate benchmark POLICY --candidate onnxruntime-int8 --load bursts
      enginegate benchmark POLICY --rate 500      (is the SLO met at 500/s?)
      enginegate benchmark POLICY --server HOST:8001 --rate 200 --seconds 60
      enginegate benchmark POLICY --server HOST:8001 --load closed:16
    """
    asked = BenchmarkRequest(load, rate, seconds, driver)
    rules = asked.rules(policy)
    results = folder or Workspace.of(rules).root / "serving" / rules.name
    _check_use(asked, server, candidate, model)
    if results.exists() and not results.is_dir():
        raise InputError(f"--out {results} is a file. Name a folder, which need not be there yet.")
    with printing(as_json=as_json) as output:
        if server is not None:
            where = (server, model or rules.name)
            code = _measure_there(rules, asked, where, results, output)
        else:
            wanted = _candidates_named(rules, candidate or [])
            code = _search_here(rules, wanted, results, output)
    raise typer.Exit(code)


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


def _search_here(
    rules: Policy, candidates: tuple[Candidate, ...], folder: Path, output: Printer
) -> ExitCode:
    flow, out = pipeline_module("flows.benchmark"), output.console
    with qualification_shown(rules, candidates, stages=("build", "benchmark")):
        found = flow.benchmark_candidates(rules, candidates)
    report: ServingReport = found.report
    print_serving(report, out)
    for candidate, why in found.unmeasured.items():
        print_hanging(out, f"Not measured: {candidate}: {' '.join(why.split())}")
    files = {
        "serving.html": serving_page(report, serving_figures(report)).encode(),
        "serving.json": report.pretty_json(),
        "config.pbtxt": found.config_pbtxt.encode(),
    }
    written = {folder / name: content for name, content in files.items() if content}
    for path, content in written.items():
        write_file(path, content)
        print_hanging(out, str(path), "Written: ")
    outcomes = [benchmark.outcome for benchmark in report.candidates]
    worst = max(outcomes, default=Outcome.INCONCLUSIVE)
    output.document(
        BenchmarkDocument(
            outcome=Outcome.PASSED if report.winner is not None else worst,
            report=report,
            unmeasured={str(candidate): why for candidate, why in found.unmeasured.items()},
            files=tuple(str(path) for path in written),
        )
    )
    return ExitCode.OK if report.winner is not None else EXIT_CODES[worst]


def _measure_there(
    rules: Policy, asked: BenchmarkRequest, where: tuple[str, str], folder: Path, output: Printer
) -> ExitCode:
    """One load; of an open loop the exit code says whether the SLO is shown to be met."""
    served, workspace = remote_model(*where), Workspace.of(rules)
    traffic = _traffic(rules, served)
    load = asked.one_load(rules)
    _log.info("%s at %s: %s for %.0f s", served.name, where[0], load, load.duration_s)
    found = served.measure(
        traffic,
        load,
        folder=workspace.results / "latencies",
        slo_p99_ms=rules.slo.p99_ms,
        # Nothing can be compared there: no do-nothing model can be placed on somebody's server.
        driver="python" if rules.load.driver == "auto" else rules.load.driver,
    )
    print_measured([found.measurement], rules.slo, output.console)
    path = folder / "measurement.json"
    write_file(path, found.measurement.pretty_json())
    print_hanging(output.console, str(path), "Written: ")
    code, sentence = slo_sentence(found, rules.slo)
    print_hanging(output.console, sentence)
    output.document(
        BenchmarkDocument(
            outcome=next(outcome for outcome, each in EXIT_CODES.items() if each is code),
            measurement=found.measurement,
            conclusion=sentence,
            files=(str(path),),
        )
    )
    return code


def slo_sentence(found: LatencySample, slo: Slo) -> tuple[ExitCode, str]:
    """Whether one measurement shows that the SLO is met; a closed loop is not judged."""
    if found.measurement.invalid:
        return ExitCode.INCONCLUSIVE, "p99 is open: the measurement is not valid."
    if isinstance(found.measurement.load, ClosedLoad):
        return ExitCode.OK, (
            f"Not judged against p99 <= {slo.p99_ms:g} ms: a closed loop slows down with the "
            "server, which hides its tail. Offer a rate with --rate to have it judged."
        )
    decision = decide_pooled([found], slo)
    words = {Outcome.PASSED: "is met", Outcome.FAILED: "is not met"}
    result = words.get(decision.outcome, f"is open; about {decision.needed} requests would decide")
    counted = f"{decision.over} of {decision.requests} over"
    return EXIT_CODES[decision.outcome], f"p99 <= {slo.p99_ms:g} ms {result} ({counted})."


def _traffic(rules: Policy, served: RemoteModel) -> Traffic:
    requests = request_mix(rules.traffic_tables, served.config.inputs, Workspace.of(rules).shadow)
    return Traffic.from_data(
        served.name,
        requests.data,
        order_seed=rules.search.seed,
        timeout_s=rules.load.timeout_s,
        arrivals_s=requests.arrivals_s,
        batch_sizes=rules.load.batch_sizes or requests.batch_sizes,
    )


def _candidates_named(rules: Policy, names: list[str]) -> tuple[Candidate, ...]:
    """The policy's candidates of those names; all of them when none is given.

    Raises:
        InputError: a name is not one of them; lists those there are.
    """
    there = {candidate.name: candidate for candidate in rules.candidates.all()}
    unknown = [name for name in names if name not in there]
    if unknown:
        raise InputError(
            f"The policy has no candidate {', '.join(map(repr, unknown))}.\n"
            f"It has: {', '.join(there)}. Add others under [candidates]."
        )
    return tuple(there[name] for name in dict.fromkeys(names or there))
