"""`enginegate init`: look at a model and its data, and write a first policy for them."""

import math
import shlex
import sys
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import typer
from rich.console import Console

from enginegate.atomic_io import write_file
from enginegate.candidate import Precision
from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.records import FirstPolicyDocument
from enginegate.cli.policy.first_data import (
    ColumnFlags,
    data_tables,
    described_source,
    loaded,
    path_below,
    set_aside_samples,
)
from enginegate.cli.policy.first_policy import (
    FirstPolicy,
    TaskGuess,
    guess_task,
    name_for,
    parity_for,
    round_up,
)
from enginegate.cli.policy.model_address import expected_inputs, model_uri
from enginegate.data import DataSet
from enginegate.engines import open_onnx, this_machine, undecidable
from enginegate.errors import InputError
from enginegate.messages import counted, short_number
from enginegate.policy import parse_policy
from enginegate.policy.gates import Task
from enginegate.policy.hooks import importable_from
from enginegate.policy.model_source import ModelSource
from enginegate.policy.paths import ROOT, WORKSPACE, project_of
from enginegate.preflight import check_policy
from enginegate.report.tables import print_hanging
from enginegate.sources.inspection import ModelFacts, inspect_source
from enginegate.workspace import Workspace

# Wanted of every machine; those that a machine cannot decide are left out.
_WANTED = {
    "onnxruntime": (Precision.FP32, Precision.FP16, Precision.INT8),
    "tensorrt": (Precision.FP32, Precision.FP16, Precision.INT8),
}
_TASKS = tuple(get_args(Task))
# Twenty times one sample's time is room for batching, queueing and a busy moment.
_ROOM = 20.0
_LEAST_P99_MS = 100.0
_RATE_PER_S = 50.0


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What a person gave on the command line; None where it is to be found out or asked.

    Attributes:
        data: labelled samples that training never saw: a path, or an address of data.
        calibration: other samples, for int8 scales; None: some of the data are set aside.
        set_aside: how many; 0: none.
        columns: what the data's columns are.
        output: the file to write.
        ask: whether somebody may be asked, where there is a terminal.
    """

    model: str
    data: str
    calibration: str | None = None
    set_aside: int | None = None
    columns: ColumnFlags = field(default_factory=ColumnFlags)
    task: str | None = None
    name: str | None = None
    p99_ms: float | None = None
    min_throughput_per_s: float | None = None
    output: Path | None = None
    allow_pickle: bool = False
    allow_code: bool = False
    force: bool = False
    ask: bool = True


def init_command(  # noqa: PLR0913 - one argument for each option
    model: Annotated[
        str, typer.Argument(help="a file (.onnx, .pt2), a folder (Hugging Face), models:/NAME/1, …")
    ],
    *,
    data: Annotated[
        str, typer.Option(help="labelled samples that training never saw (docs/data.md)")
    ],
    calibration: Annotated[
        str | None,
        typer.Option(help="other samples, for int8; default: some of the data are set aside"),
    ] = None,
    set_aside: Annotated[
        int | None, typer.Option(min=0, help="how many of the data; 0: none, and no int8")
    ] = None,
    input_columns: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="NAME=COLUMN", help="of the data; default: guessed"),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="of the data; default: guessed")
    ] = None,
    slice_columns: Annotated[
        list[str] | None,
        typer.Option("--slice", metavar="COLUMN", help="judged by itself; may repeat"),
    ] = None,
    task: Annotated[str | None, typer.Option(help="default: as the data shows it")] = None,
    name: Annotated[
        str | None, typer.Option(help="of the live model; default: from the model's")
    ] = None,
    p99_ms: Annotated[
        float | None, typer.Option("--p99-ms", min=0.001, help="SLO: latency at the client")
    ] = None,
    min_throughput: Annotated[
        float | None, typer.Option(min=0.001, help="SLO: requests a second that traffic needs")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="default: policies/NAME.toml"),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="open formats that can run code")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="import and run Python of yours")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Look at a model and its data, and write a first policy for them.

    Opens the model as a qualification would, with the same permissions, and runs a few samples.
    Asks for what neither shows (the SLO, sometimes the task), or takes it from flags. Everything
    that the policy leaves out has a default: `enginegate policy show FILE`.
    """
    options = InitOptions(
        model=model,
        data=data,
        calibration=calibration,
        set_aside=set_aside,
        columns=ColumnFlags(input_columns or (), label, slice_columns or ()),
        task=task,
        name=name,
        p99_ms=p99_ms,
        min_throughput_per_s=min_throughput,
        output=output,
        allow_pickle=allow_pickle,
        allow_code=allow_code,
        force=force,
    )
    with printing(as_json=as_json) as printed:
        write_first_policy(options, printed)


def write_first_policy(options: InitOptions, output: Printer) -> None:
    """Look at model and data, ask for what they do not show, and write and check the policy.

    Raises:
        InputError: the model or the data cannot be used, or something must be said that nobody can
            be asked for; each message names the flag.
    """
    out = output.console
    uri = model_uri(options.model, Path.cwd())
    name = options.name or name_for(uri)
    path = options.output or project_of(Path.cwd()) / "policies" / f"{name}.toml"
    if path.exists() and not options.force:
        raise InputError(
            f"{path} is there already. Edit it, name another file with --output, or replace it "
            "with --force."
        )
    root = _project(path)
    importable_from(root)
    workspace = Workspace.of_project(root)
    source = _source_below(uri, root, options)
    described = described_source(options.data, root, options.columns, expected_inputs(source))
    data = loaded(described.source)
    facts = inspect_source(source, data, tracking_uri=workspace.tracking_uri, open_onnx=open_onnx)
    evaluation = described.labelling(facts.outputs[0].name)
    data = loaded(evaluation) if described.numbers else data
    _print_facts(source, facts, data, out)
    for sentence in described.unread:
        print_hanging(out, sentence, "note    ")
    guess = _task(options, _with_unread(guess_task(facts, data), described.unread), out)
    p99_ms, rate = _slo(options, facts, out)
    calibration = None
    if options.calibration is not None:
        named = described_source(options.calibration, root, options.columns, facts.inputs)
        calibration = named.source
    elif facts.quantisable:
        evaluation, calibration = set_aside_samples(
            evaluation, data, root / WORKSPACE / "data" / name, wanted=options.set_aside, out=out
        )
    assert guess.task is not None  # noqa: S101 - asked for above
    draft = FirstPolicy(
        name=name,
        task=guess.task,
        uri=source.uri,
        data=data_tables(evaluation, calibration),
        candidates={"onnxruntime": (Precision.FP32,)},
        p99_ms=p99_ms,
        min_throughput_per_s=rate,
        outputs=guess.outputs,
        allow_pickle=options.allow_pickle,
        allow_code=options.allow_code,
        parity=parity_for(facts.largest),
    )
    int8 = calibration is not None and facts.quantisable > 0
    _write(_with_candidates(draft, facts, data, root, int8=int8), path, root, output)


def _write(draft: FirstPolicy, path: Path, root: Path, output: Printer) -> None:
    """Check the policy as `policy check` does, write its file, and show it."""
    out, shown = output.console, _shown(path)
    text = draft.toml(shown)
    policy = parse_policy(tomllib.loads(text), shown, root)
    found = check_policy(policy)
    found.refuse(path)
    write_file(path, text.encode())
    out.print()
    out.print(text, markup=False, soft_wrap=True)
    for note in found.notes:
        print_hanging(out, note, "note    ")
    print_hanging(out, f"{shown} is written, and valid.")
    commands = (f"enginegate qualify {shlex.quote(shown)}",)
    out.print(f"Next: {commands[0]}", markup=False, soft_wrap=True)
    output.document(
        FirstPolicyDocument(
            policy=shown,
            model=policy.name,
            model_uri=policy.model.uri,
            task=policy.task,
            candidates=tuple(str(candidate) for candidate in policy.candidates.all()),
            notes=found.notes,
            next=commands,
        )
    )


def _project(policy: Path) -> Path:
    """The project of the policy to be written, which the current folder becomes if it has none."""
    policy.parent.mkdir(parents=True, exist_ok=True)
    folder = policy.parent.resolve()
    here = Path.cwd()
    root = project_of(folder)
    if root == folder and folder != here and here in folder.parents:
        (here / WORKSPACE).mkdir(exist_ok=True)
        root = here
    return root


def _source_below(uri: str, root: Path, options: InitOptions) -> ModelSource:
    """The model's source with its path as the policy will have it."""
    scheme, _, location = uri.partition(":")
    if scheme in {"file", "hf"}:
        uri = f"{scheme}:{path_below(Path(location), root)}"
    stated = {
        "uri": uri,
        "allow_pickle": options.allow_pickle,
        "allow_code": options.allow_code,
    }
    return ModelSource.model_validate(stated, context={ROOT: root})


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _print_facts(source: ModelSource, facts: ModelFacts, data: DataSet, out: Console) -> None:
    labels = "no labels"
    if data.labels is not None:
        labels = counted(len(np.unique(data.labels)), "class", "classes")
    elif data.targets:
        labels = f"labels of {', '.join(sorted(data.targets))}"
    columns = f", slices by {', '.join(sorted(data.slices))}" if data.slices else ""
    lines = [
        ("model", source.uri),
        *(("input", str(spec)) for spec in facts.inputs),
        *(("output", str(spec)) for spec in facts.outputs),
        ("data", f"{counted(len(data), 'sample')}, {labels}{columns}"),
        (
            "speed",
            f"{short_number(facts.sample_ms)} ms for one sample here, at FP32 in ONNX Runtime",
        ),
    ]
    for name, text in lines:
        print_hanging(out, text, f"{name:<7} ")


def _with_unread(guess: TaskGuess, unread: tuple[str, ...]) -> TaskGuess:
    """Why no task shows, with the columns that would have shown it."""
    if guess.task is not None or not unread:
        return guess
    return replace(guess, why="; ".join((guess.why, *(each.rstrip(".") for each in unread))))


def _task(options: InitOptions, guess: TaskGuess, out: Console) -> TaskGuess:
    if options.task is not None:
        if options.task not in _TASKS:
            raise InputError(f"--task {options.task}: must be one of {', '.join(_TASKS)}.")
        wanted: Task = options.task  # type: ignore[assignment]
        outputs = guess.outputs if wanted == guess.task else {}
        return replace(guess, task=wanted, outputs=outputs)
    if guess.task is not None:
        print_hanging(out, f"{guess.task}: {guess.why}", "task    ")
        return guess
    if not (options.ask and sys.stdin.isatty()):
        raise InputError(
            f"Model and data do not show the task: {guess.why}. Say it with --task: one of "
            f"{', '.join(_TASKS)} (docs/tasks.md)."
        )
    print_hanging(out, f"not shown: {guess.why}", "task    ")
    answer = ""
    while answer not in _TASKS:
        answer = _answer(f"Task, one of {', '.join(_TASKS)}: ", out)
    return TaskGuess(answer, guess.why)  # type: ignore[arg-type]


def _slo(options: InitOptions, facts: ModelFacts, out: Console) -> tuple[float, float]:
    """What serving must deliver: given, or asked for with a suggestion; nothing else shows it."""
    wanted_ms = round_up(max(_LEAST_P99_MS, _ROOM * facts.sample_ms))
    asked = None in {options.p99_ms, options.min_throughput_per_s}
    if asked and not (options.ask and sys.stdin.isatty()):
        given = options.p99_ms or wanted_ms, options.min_throughput_per_s or _RATE_PER_S
        raise InputError(
            "What serving must deliver is not stated, and neither model nor data show it. Give "
            f"both, for example: --p99-ms {given[0]:g} --min-throughput {given[1]:g}\n"
            "p99-ms is the 99th percentile of latency at the client, min-throughput the requests a "
            "second that traffic needs."
        )
    p99_ms = options.p99_ms or _number(
        "SLO: 99th percentile of latency at the client, in ms", wanted_ms, out
    )
    rate = options.min_throughput_per_s or _number(
        "SLO: requests a second that traffic needs", _RATE_PER_S, out
    )
    return p99_ms, rate


def _number(question: str, suggestion: float, out: Console) -> float:
    """A positive number; Enter takes the suggestion."""
    while True:
        answer = _answer(f"{question} [{suggestion:g}]: ", out) or str(suggestion)
        try:
            number = float(answer)
        except ValueError:
            continue
        if math.isfinite(number) and number > 0:
            return number


def _answer(question: str, out: Console) -> str:
    try:
        return out.input(question, markup=False, emoji=False).strip()
    except EOFError:
        message = "Nobody answered. Give the answers as flags: enginegate init --help"
        raise InputError(message) from None


def _with_candidates(
    draft: FirstPolicy, facts: ModelFacts, data: DataSet, root: Path, *, int8: bool
) -> FirstPolicy:
    """The candidates that this machine can decide, and the sizes that their engines must know."""
    wanted = {
        kind: tuple(each for each in precisions if int8 or each is not Precision.INT8)
        for kind, precisions in _WANTED.items()
    }
    whole = replace(draft, candidates=wanted)
    tables = parse_policy(whole.tables(), "the first policy", root).engine_tables
    obstacles = {str(candidate) for candidate in undecidable(tables, this_machine(tables))}
    candidates = {
        kind: tuple(each for each in precisions if f"{kind}-{each}" not in obstacles)
        for kind, precisions in wanted.items()
    }
    candidates = {kind: precisions for kind, precisions in candidates.items() if precisions}
    longest = [data.inputs[name].shape[at] for places in facts.axes.values() for name, at in places]
    sequence = (1, max(longest), max(longest)) if longest and "tensorrt" in candidates else None
    return replace(draft, candidates=candidates, sequence=sequence)
