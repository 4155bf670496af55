"""`enginegate init`: look at a model and its data, and write a first policy for them."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
import typer
from rich.console import Console

from enginegate.atomic_io import write_file
from enginegate.candidate import Precision
from enginegate.cli.output.json_output import Printer
from enginegate.cli.output.records import FirstPolicyDocument
from enginegate.cli.policy.first_policy import (
    FirstPolicy,
    TaskGuess,
    guess_task,
    name_for,
    parity_for,
    round_up,
    samples_to_set_aside,
)
from enginegate.data import DataSet, read_data, write_data
from enginegate.engines import open_onnx, this_machine, undecidable
from enginegate.errors import InputError, ModelError
from enginegate.messages import counted, short_number
from enginegate.policy import parse_policy, read_policy
from enginegate.policy.gates import Task
from enginegate.policy.hooks import importable_from
from enginegate.policy.model_source import FORMS, ModelSource
from enginegate.policy.paths import ROOT, WORKSPACE, project_of
from enginegate.preflight import check_policy
from enginegate.report.tables import print_hanging
from enginegate.sources.inspection import ModelFacts, inspect_source
from enginegate.workspace import Workspace

T = TypeVar("T")

# Wanted of every machine; those that a machine cannot decide are left out.
_WANTED = {
    "onnxruntime": (Precision.FP32, Precision.FP16, Precision.INT8),
    "tensorrt": (Precision.FP32, Precision.FP16, Precision.INT8),
}
_TASKS = tuple(get_args(Task))
# Twenty times one sample's time is room for batching, queueing and a busy moment.
_ROOM = 20.0
_LEAST_P99_MS = 20.0
_RATE_PER_S = 50.0
_SCHEMES = ("models:/", "runs:/", "file:", "hf:", "python:")


@dataclass(frozen=True, slots=True)
class InitOptions:
    """What a person gave on the command line; None where it is to be found out or asked.

    Attributes:
        data: labelled samples that training never saw.
        calibration: other samples, for int8 scales; None: some of the data are set aside.
        set_aside: how many; 0: none.
        output: the file to write.
    """

    model: str
    data: Path
    calibration: Path | None = None
    set_aside: int | None = None
    task: str | None = None
    name: str | None = None
    p99_ms: float | None = None
    min_throughput_per_s: float | None = None
    output: Path | None = None
    allow_pickle: bool = False
    allow_code: bool = False
    force: bool = False


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
    source = ModelSource.model_validate(
        {
            "uri": _below(uri, root),
            "allow_pickle": options.allow_pickle,
            "allow_code": options.allow_code,
        },
        context={ROOT: root},
    )
    data = read_data(options.data)
    workspace = Workspace(root / WORKSPACE)
    facts = _looked_at(source, data, workspace)
    _print_facts(source, facts, data, out)
    guess = _task(options, guess_task(facts, data), out)
    p99_ms, rate = _slo(options, facts)
    evaluation, calibration = options.data, options.calibration
    if calibration is None and facts.quantisable:
        evaluation, calibration = _set_aside(options, data, workspace, name, out)
    draft = FirstPolicy(
        name=name,
        task=guess.task or "classification",
        uri=source.uri,
        evaluation=_written(evaluation, root),
        calibration=_written(calibration, root) if calibration else None,
        candidates={"onnxruntime": (Precision.FP32,)},
        p99_ms=p99_ms,
        min_throughput_per_s=rate,
        outputs=guess.outputs,
        allow_pickle=options.allow_pickle,
        allow_code=options.allow_code,
        parity=parity_for(facts.largest),
    )
    draft = _with_candidates(draft, facts, data, root)
    shown = _shown(path)
    write_file(path, draft.toml(shown).encode())
    policy = read_policy(path)
    found = check_policy(policy)
    found.refuse(path)
    out.print()
    out.print(path.read_text(), markup=False, soft_wrap=True)
    for note in found.notes:
        print_hanging(out, note, "note  ")
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


def model_uri(given: str, folder: Path) -> str:
    """The address of a model that a person named in their own words.

    Args:
        given: an address as policies have it, a path, or MODULE:FUNCTION.
        folder: where relative paths start.

    Raises:
        ModelError: it is none of them, or a file that cannot be opened safely; says how to save
            that model instead.
    """
    if given.startswith(_SCHEMES):
        scheme, _, location = given.partition(":")
        if scheme in {"file", "hf"} and not Path(location).is_absolute():
            return f"{scheme}:{folder / location}"
        return given
    path = folder / given
    if path.is_dir() and (path / "config.json").is_file():
        return f"hf:{path}"
    if path.is_dir() and (path / "MLmodel").is_file():
        raise ModelError(
            f"{given} is a model as MLflow saves it. Register it, and name the version:\n"
            f"  python -c \"import mlflow; mlflow.register_model('file://{path}', 'NAME')\"\n"
            "  enginegate init models:/NAME/1 --data FILE"
        )
    if path.is_file() and path.suffix in {".onnx", ".pt2"}:
        return f"file:{path}"
    if path.is_file():
        raise ModelError(f"{given} is not a form that opens without running code. {_instead(path)}")
    module, colon, function = given.partition(":")
    if colon and function.isidentifier() and all(p.isidentifier() for p in module.split(".")):
        return f"python:{given}"
    raise ModelError(f"There is no model {given}. Name a file or folder, or one of {FORMS}.")


_SAVE = {
    "sklearn": "Log it in MLflow, and name the version:\n"
    "  mlflow.sklearn.log_model(model, name='model', serialization_format='skops', "
    "registered_model_name='NAME')\n"
    "  enginegate init models:/NAME/1 --data FILE",
    "torch": "Save the program instead of weights or a pickle:\n"
    "  batch = torch.export.Dim('batch', max=1024)\n"
    "  program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))\n"
    "  torch.export.save(program, 'model.pt2')  # example: two rows or more",
    "weights": "Weights alone are no model: name the folder that save_pretrained wrote (with "
    "config.json), or save a program with torch.export.save(program, 'model.pt2').",
    "keras": "Convert it to ONNX (tf2onnx, or keras' model.export(..., format='onnx')), and name "
    "that file.",
}
_ENDINGS = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".skops"), "sklearn"),
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
    ".safetensors": "weights",
    **dict.fromkeys((".h5", ".keras", ".pb"), "keras"),
}


def _instead(path: Path) -> str:
    kind = _ENDINGS.get(path.suffix.lower())
    return _SAVE[kind] if kind else f"Name one of {FORMS}."


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


def _below(uri: str, root: Path) -> str:
    """A model's address with its path as the policy will have it."""
    scheme, _, location = uri.partition(":")
    return f"{scheme}:{_written(Path(location), root)}" if scheme in {"file", "hf"} else uri


def _written(path: Path, root: Path) -> str:
    """A path as the policy will have it: from its project, or absolute outside of it."""
    whole = Path.cwd() / path
    inside = whole.is_relative_to(root) and ".." not in whole.relative_to(root).parts
    return whole.relative_to(root).as_posix() if inside else whole.resolve().as_posix()


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _looked_at(source: ModelSource, data: DataSet, workspace: Workspace) -> ModelFacts:
    return inspect_source(source, data, tracking_uri=workspace.tracking_uri, open_onnx=open_onnx)


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
    answer = _asked(
        f"task ({', '.join(_TASKS)})",
        "--task",
        lambda text: text if text in _TASKS else None,
        why=guess.why,
    )
    return TaskGuess(answer, guess.why)  # type: ignore[arg-type]


def _slo(options: InitOptions, facts: ModelFacts) -> tuple[float, float]:
    """What serving must deliver: given, or asked for with a suggestion; nothing else shows it."""
    wanted_ms = round_up(max(_LEAST_P99_MS, _ROOM * facts.sample_ms))
    if None in {options.p99_ms, options.min_throughput_per_s} and not sys.stdin.isatty():
        given = options.p99_ms or wanted_ms, options.min_throughput_per_s or _RATE_PER_S
        raise InputError(
            "What serving must deliver is not stated, and neither model nor data show it. Give "
            f"both, for example: --p99-ms {given[0]:g} --min-throughput {given[1]:g}\n"
            "p99-ms is the 99th percentile of latency at the client, min-throughput the requests a "
            "second that traffic needs."
        )
    p99_ms = options.p99_ms or _number("99th percentile of latency at the client, ms", wanted_ms)
    rate = options.min_throughput_per_s or _number(
        "requests a second that traffic needs", _RATE_PER_S
    )
    return p99_ms, rate


def _number(question: str, suggestion: float) -> float:
    while True:
        answer: float = typer.prompt(question, default=suggestion, type=float, err=True)
        if answer > 0:
            return answer


def _asked(question: str, flag: str, read: Callable[[str], T | None], *, why: str) -> T:
    if not sys.stdin.isatty():
        raise InputError(f"{why}. Say it: {flag} ({question}).")
    typer.echo(f"{why}.", err=True)
    while True:
        answer = read(typer.prompt(question, err=True).strip())
        if answer is not None:
            return answer


def _set_aside(
    options: InitOptions, data: DataSet, workspace: Workspace, name: str, out: Console
) -> tuple[Path, Path | None]:
    """Split the data where int8 needs samples and none were named; the files, and what was done."""
    count = samples_to_set_aside(len(data)) if options.set_aside is None else options.set_aside
    if not 0 <= count < len(data):
        raise InputError(f"--set-aside {count}: the data holds {len(data)} samples.")
    if not count:
        print_hanging(
            out,
            "int8 is left out: it needs samples for its scales, and the data are too few to spare "
            "any. Name others with --calibration FILE.",
            "note    ",
        )
        return options.data, None
    # Evenly spaced, so that data that is sorted by class gives some of each.
    chosen = np.zeros(len(data), bool)
    chosen[np.linspace(0, len(data) - 1, count).round().astype(int)] = True
    folder = workspace.root / "data" / name
    paths = folder / "evaluation.npz", folder / "calibration.npz"
    for path, rows in zip(paths, (~chosen, chosen), strict=True):
        write_data(data.only(rows), path)
    print_hanging(
        out,
        f"{counted(int(chosen.sum()), 'sample')}, evenly spaced, are set aside for int8 scales; "
        f"the other {int((~chosen).sum()):,} judge candidates. Both are copies in "
        f"{_shown(folder)}. "
        "Name samples of your own with --calibration FILE.",
        "note    ",
    )
    return paths


def _with_candidates(
    draft: FirstPolicy, facts: ModelFacts, data: DataSet, root: Path
) -> FirstPolicy:
    """The candidates that this machine can decide, and the sizes that their engines must know."""
    wanted = {
        kind: tuple(p for p in precisions if p is not Precision.INT8 or _quantises(draft, facts))
        for kind, precisions in _WANTED.items()
    }
    whole = replace(draft, candidates=wanted)
    tables = parse_policy(whole.tables(), "the first policy", root).engine_tables
    obstacles = {str(candidate) for candidate in undecidable(tables, this_machine(tables))}
    candidates = {
        kind: tuple(p for p in precisions if f"{kind}-{p}" not in obstacles)
        for kind, precisions in wanted.items()
    }
    candidates = {kind: precisions for kind, precisions in candidates.items() if precisions}
    longest = [data.inputs[name].shape[at] for places in facts.axes.values() for name, at in places]
    sequence = (1, max(longest), max(longest)) if longest and "tensorrt" in candidates else None
    return replace(draft, candidates=candidates, sequence=sequence)


def _quantises(draft: FirstPolicy, facts: ModelFacts) -> bool:
    return draft.calibration is not None and facts.quantisable > 0
