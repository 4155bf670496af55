"""The demo: of three versions of a real model one goes live, one is refused, one comes back out.

Version 2 is refused because its int8 cannot read faint images, which nothing but its slice shows.
Everything is real: training, ONNX, engines, Triton, MLflow, Prefect. What a person would answer is
answered by ``--approve``; with ``ask`` it is asked on the terminal.
"""

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.prompt import Prompt
from rich.text import Text

from enginegate.approval_rules import check_decision
from enginegate.atomic_io import write_file
from enginegate.candidate import Candidate, Precision
from enginegate.cli.output.live_table import qualification_shown
from enginegate.data import DataSet
from enginegate.data_sources import load_data
from enginegate.decision import Decision, Release
from enginegate.errors import ApprovalError, EnginegateError, ExitCode, InputError, ServerError
from enginegate.evidence import Outcome, Scorecard
from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.traffic import Traffic
from enginegate.measuring.p99 import nearest_rank
from enginegate.policy import Policy, read_policy
from enginegate.report import print_approval, print_scorecard, print_table
from enginegate.report.tables import print_hanging
from enginegate.repository import Layout, LiveRepository, record_decision
from enginegate.repository.history.audit import answers_to
from enginegate.tracking import Tracker
from enginegate.triton.endpoint import live_server
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server
from enginegate.workspace import Workspace, now
from examples.digits.register import prepare
from flows.promote import promote
from flows.qualify import qualify
from flows.rollback import rollback

Answer = Literal["yes", "no", "ask"]

POLICY = Path("policies/digits.toml")
# In a checkout, and beside the flows in an installed wheel.
_SHIPPED_POLICY = Path(__file__).parents[2] / POLICY
# Each with the extra that brings it.
_NEEDED = {"onnxruntime": "cpu", "tritonclient": "cpu", "torch": "torch"}
_RATE_PER_S = 50.0
# Of FP32's rate; below it is within what a busy machine does to a short search.
_WORTH_IT = 1.2
_PROCESSOR = Path("/proc/cpuinfo")
# As Linux names them: products of 8-bit integers, summed up in 32 bits, in one step.
_INTEGER_INSTRUCTIONS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
_SETTLE_S = 1.0
# A busy machine may be slow to answer; that is not a lost request.
_PATIENCE_S = 30.0


def run(answer: Answer, workspace: Workspace, out: Console) -> int:
    """Run it; the exit code is the command's."""
    if workspace.root != Path(".enginegate").absolute():
        raise InputError(
            "The demo's policy uses ./.enginegate: unset ENGINEGATE_HOME, then try again."
        )
    _check_installed()
    if not POLICY.exists():
        write_file(POLICY, _SHIPPED_POLICY.read_bytes())
        print_hanging(out, f"{POLICY} is the demo's policy: what its model must prove.")
    policy = read_policy(POLICY)
    demo = _Demo(answer, workspace, policy, out)
    before = _counts(workspace)
    started = time.monotonic()
    demo.run()
    demo.close(before, time.monotonic() - started)
    return ExitCode.OK


@dataclass(slots=True)
class _Demo:
    answer: Answer
    workspace: Workspace
    policy: Policy
    out: Console
    step: int = 0
    registered: int = 0
    cards: list[Scorecard] = field(default_factory=list)

    def run(self) -> None:
        first = self.qualified(1)
        with live_server(self.policy.target.repository, self.workspace) as server:
            self._bring_up(server)
            self.approved(first)
            self.promoted(first)
            self.call(server)
            self.refused(self.qualified(2))
            third = self.qualified(3)
            self.approved(third)
            self.swapped(server, third)
            self.call(server)

    def qualified(self, version: int) -> Scorecard:
        self.say(f"Train and register models:/digits/{version}")
        made = prepare(
            self.workspace.root,
            self.workspace.tracking_uri,
            version,
            lambda line: self.tell(f"  {line}"),
        )
        self.registered += made.created
        self.say(f"Qualify it: ONNX, engines, verdicts, benchmarks -> scorecard (policy {POLICY})")
        with qualification_shown(self.policy.with_model(made.uri)):
            card = qualify(POLICY, made.uri)
        self.cards.append(card)
        print_scorecard(card, self.out, self._sizes(card))
        tracker = Tracker(self.workspace.tracking_uri, self.workspace.artifacts)
        compare = tracker.comparison(card.mlflow_run)
        if compare.start_command:
            ui = f"{_command()} ui {card.digest[:12]}"
            self.out.print(f"\nCompare in MLflow, while this runs: {ui}", soft_wrap=True)
        self.out.print(f"  {compare.runs_url}", soft_wrap=True)
        return card

    def approved(self, card: Scorecard) -> None:
        """Ask, unless a decision that still stands was given in an earlier run."""
        self.say("Ask a person: may it go live? The answer binds to the scorecard's digest")
        written = self.workspace.decision(card.digest)
        if self.answer == "yes" and written is not None and self._stands(written, card):
            self.tell(f"{written.approver} approved {card.digest[:12]}: {written.reason}")
            return
        self._ask_for(card)
        decision = self._decision(card)
        record_decision(self.policy.target.repository, decision, self.policy.name)
        self.workspace.save_decision(decision)
        self.tell(f"{decision.approver}: {decision.answer} ({decision.reason})")

    def _stands(self, decision: Decision, card: Scorecard) -> bool:
        given = answers_to(card, (decision,), self.policy.target.repository)
        try:
            check_decision(
                given.decisions, card, self.policy.approval, now=now(), record=given.record
            )
        except ApprovalError:
            return False
        return True

    def refused(self, card: Scorecard) -> None:
        """Say why nothing of this version may go live; an answer is not even asked for."""
        if card.winner is not None:
            self.tell(
                f"On this machine {card.winner} of {card.model_uri} passed; it is left aside."
            )
            return
        self.say(f"Refused: {card.model_uri}")
        self.tell(card.reason)
        for verdict in card.verdicts:
            failed = [each for each in verdict.findings if each.outcome is Outcome.FAILED]
            # A slice says where it hurts: "light=faint" before the total.
            for finding in sorted(failed, key=lambda each: "=" not in each.scope):
                self.tell(
                    f"  {verdict.candidate}, {finding.gate} on {finding.scope}: {finding.reason}"
                )
        self.tell("Nobody is asked and nothing changes: what was live stays live.")

    def promoted(self, card: Scorecard) -> Release:
        self.say("Promote the winner into the live Triton repository")
        release = promote(POLICY, card.digest)
        self.tell(
            f"Release {release.version} is live: {release.engine.candidate}, {release.model_uri}"
        )
        return release

    def swapped(self, server: Server, card: Scorecard) -> None:
        """Promote and roll back under traffic; not one request may fail."""
        data = load_data(self.policy.data.evaluation)
        traffic = Traffic.from_data(self.policy.name, data, timeout_s=_PATIENCE_S)
        with BackgroundLoad(server.grpc, traffic, rate_per_s=_RATE_PER_S) as load:
            time.sleep(_SETTLE_S)
            self.promoted(card)
            time.sleep(_SETTLE_S)
            self.say("Roll back")
            started = time.monotonic()
            release = rollback(POLICY)
            took_s = time.monotonic() - started
            time.sleep(_SETTLE_S)
        report, p99_s = load.report(), nearest_rank(load.result.latency_s)
        self.tell(f"Release {release.version} is live again after {took_s:.1f} s.")
        self.tell(
            f"Meanwhile {report.sent} requests were sent at {_RATE_PER_S:.0f}/s and "
            f"{report.failed} "
            f"failed; by release: {report.versions}; p99 {p99_s * 1e3:.1f} ms."
        )
        if report.failed:
            raise ServerError(f"Requests failed during the swap: {report.errors}.")

    def call(self, server: Server) -> None:
        """Ask the live model as any client would, and show the command."""
        self.say("Call the live model")
        data = load_data(self.policy.data.evaluation).head(1)
        body = self.workspace.root / "demo" / "request.json"
        body.parent.mkdir(parents=True, exist_ok=True)
        body.write_text(json.dumps(_request(data)))
        url = f"http://{server.http}/v2/models/{self.policy.name}/infer"
        shown = body.relative_to(Path.cwd())
        command = ["curl", "-sf", "--max-time", f"{_PATIENCE_S:.0f}", url, "-d", f"@{shown}"]
        self.out.print(shlex.join(command), soft_wrap=True)
        reply = json.loads(_posted(command, url, body))
        logits = reply["outputs"][0]["data"]
        label = int(data.labels[0]) if data.labels is not None else -1
        self.tell(
            f"  version {reply['model_version']} answers {logits.index(max(logits))}; "
            f"the label is {label}"
        )

    def close(self, before: dict[str, int], took_s: float) -> None:
        """What was new in this run, and where to look."""
        self.say("What was found")
        for card in self.cards:
            print_table(card, self.out, self._sizes(card))
        self.tell(_speedup_words(self.cards[0]))
        made = {name: count - before[name] for name, count in _counts(self.workspace).items()}
        news = ", ".join(f"{count} {name}" for name, count in made.items())
        self.tell(
            f"Done in {took_s:.0f} s. New in this run: "
            f"{self.registered} registered versions, {news}."
        )
        if not any(made.values()) and not self.registered:
            self.tell("Nothing was trained, registered, built, judged or measured again.")
        self.tell("Next:")
        for command in (
            f"status {POLICY}",
            f"verify {POLICY}",
            f"serve {POLICY}",
            "--help",
        ):
            self.out.print(f"  {_command()} {command}", soft_wrap=True)

    def say(self, what: str) -> None:
        self.step += 1
        self.out.print()
        print_hanging(self.out, Text(what, style="bold"), Text(f"{self.step}. ", style="bold"))

    def tell(self, text: str) -> None:
        """Print a sentence; it may hold brackets, and its words stay whole."""
        words = text.lstrip()
        print_hanging(self.out, words, text[: len(text) - len(words)])

    def _bring_up(self, server: Server) -> None:
        root = self.policy.target.repository
        with server.client() as client:
            repository = LiveRepository(root, client)
            for sentence in repository.recover():
                self.tell(sentence)
            if Layout(root, self.policy.name).current() is not None:
                release = repository.bring_up(self.policy.name)
                self.tell(f"Release {release.version} of an earlier run is live again.")

    def _ask_for(self, card: Scorecard) -> None:
        if self.answer == "ask":
            print_approval(card, self.out)
        else:
            self.tell(f"Scorecard {card.digest}: {card.winner or 'no winner'}: {card.reason}")

    def _decision(self, card: Scorecard) -> Decision:
        answer, approver, reason = self.answer, "demo", "the demo's own approval"
        if self.answer == "ask":
            approver = Prompt.ask("Your name", console=self.out, default="demo")
            answer = (
                "yes"
                if Prompt.ask("Approve?", choices=["yes", "no"], default="no") == "yes"
                else "no"
            )
            reason = Prompt.ask(
                "Why (5 letters or more)", console=self.out, default="seen and judged"
            )
        return Decision(
            scorecard_sha256=card.digest,
            answer="approve" if answer == "yes" else "reject",
            approver=approver,
            reason=reason,
            decided_at=now(),
        )

    def _sizes(self, card: Scorecard) -> dict[Candidate, int]:
        built = [v for v in card.verdicts if v.engine_sha256 is not None]
        return {
            v.candidate: self.workspace.engine(v.engine_sha256 or "")[0].file.size_bytes
            for v in built
        }


def _check_installed() -> None:
    """Before minutes are spent: what the demo cannot do without.

    Raises:
        EnginegateError: a package is missing.
        ServerError: there is no Triton server.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(dict.fromkeys(_NEEDED[name] for name in missing))
        raise EnginegateError(
            f"The demo trains a PyTorch model and serves it; {sys.executable} lacks "
            f"{', '.join(missing)}. Install: pip install 'enginegate[{extras}]'"
        )
    find_triton(None)


def _command() -> str:
    """How this shell starts the command: by its name where PATH has it, else by its place."""
    own = Path(sys.executable).with_name("enginegate")
    if shutil.which("enginegate") == str(own):
        return "enginegate"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def _speedup_words(card: Scorecard) -> str:
    """Whether int8 was worth it on this processor, in one sentence."""
    served = {found.candidate.precision: found for found in card.benchmarks if found.chosen}
    fp32, int8 = served.get(Precision.FP32), served.get(Precision.INT8)
    if fp32 is None or int8 is None:
        return "FP32 and int8 were not both served, so there is no speed to compare."
    ratio = int8.throughput_at_slo_per_s / fp32.throughput_at_slo_per_s
    named = sorted(_INTEGER_INSTRUCTIONS & set(_PROCESSOR.read_text().split()))
    rates = f"{int8.throughput_text} against {fp32.throughput_text} requests/s"
    if ratio < _WORTH_IT:
        why = f"although it has {named[0]}" if named else "which has no instructions for it"
        return f"On this processor, {why}, int8 and FP32 are tied: {rates} within the SLO."
    thanks = f" ({named[0]})" if named else ""
    return f"On this processor{thanks} int8 serves {ratio:.1f} times as much as FP32: {rates}."


def _counts(workspace: Workspace) -> dict[str, int]:
    """What the store holds of each kind."""
    return {
        "ONNX models": len(list(workspace.onnx.glob("*/manifest.json"))),
        "engines": len(list(workspace.engines.glob("*/manifest.json"))),
        "verdicts": len(list((workspace.results / "verdicts").glob("*.json"))),
        # An inconclusive benchmark is made again and not kept; what it measured is.
        "measurements": len(list((workspace.results / "latencies").glob("*.npz"))),
        "benchmarks": len(list((workspace.results / "benchmarks").glob("*.json"))),
    }


def _request(data: DataSet) -> dict[str, object]:
    """One sample as a client of Triton's HTTP API writes it (KServe v2)."""
    (name, array), *_ = data.inputs.items()
    values = [round(float(value), 6) for value in array.reshape(-1)]
    return {
        "inputs": [
            {"name": name, "shape": list(array.shape), "datatype": "FP32", "data": values},
        ]
    }


def _posted(command: list[str], url: str, body: Path) -> bytes:
    if shutil.which("curl"):
        return subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603
    with urllib.request.urlopen(url, data=body.read_bytes(), timeout=10) as reply:  # noqa: S310
        content: bytes = reply.read()
    return content
