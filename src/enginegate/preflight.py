"""A policy against what is here: its files, functions and types, and this machine's devices.

Quick, and before anything is built: no model is opened, no code of the user's is run. What is
missing makes a bad policy; what no device or data here can decide is reported, and allowed.
"""

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from enginegate.candidate import Candidate, Precision
from enginegate.data import DataHeader
from enginegate.data_sources import read_source_header
from enginegate.engines import DecisionObstacle, cuda, this_machine, undecidable
from enginegate.engines.made_elsewhere import CODE_REFUSED
from enginegate.errors import InputError, ModelError, PolicyError, TrackingError
from enginegate.loadgen.schedule import load_pattern
from enginegate.policy import Policy
from enginegate.policy.data import DataSource, data_source
from enginegate.policy.gates import Gates, gates_for
from enginegate.policy.hooks import why_missing
from enginegate.records import sha256_file
from enginegate.shadow.store import is_sample, latest_sample, sample_info
from enginegate.shadow.trace_reader import UNREADABLE
from enginegate.triton.codec import triton_type
from enginegate.workspace import Workspace


@dataclass(frozen=True, slots=True)
class PolicyCheck:
    """What was found.

    Attributes:
        problems: why the policy cannot be qualified: key, value, what is wrong, what to do.
        undecidable: candidates that will be inconclusive here, and why.
        notes: what else will be inconclusive, or will not work later.
    """

    problems: tuple[str, ...]
    undecidable: Mapping[Candidate, DecisionObstacle]
    notes: tuple[str, ...]

    def refuse(self, origin: Path) -> None:
        """Raise what is wrong with the policy, if anything is.

        Raises:
            PolicyError: it cannot be qualified; every problem is listed.
        """
        if self.problems:
            listed = "\n".join(f"  {problem}" for problem in self.problems)
            raise PolicyError(f"{origin} asks for what is not there:\n{listed}")


def check_policy(policy: Policy, *, pinned: bool = False) -> PolicyCheck:
    """Look for everything that a policy names, and for what can decide its candidates.

    Args:
        policy: what is asked.
        pinned: whether files that something else made need their sha256 in the policy, as they do
            where it names kinds of device.
    """
    files, tables = _Files.of(policy), policy.engine_tables
    problems = (
        *files.problems(),
        *_folders(policy),
        *_model(policy),
        *_made(policy, pinned=pinned or bool(policy.devices)),
        *_functions(policy),
        *_scorers(policy),
        *_runner(policy),
        *_arrivals(policy),
        *_unservable(files.evaluation),
        *_uneven(files),
        *_no_sample(policy, files.evaluation),
    )
    notes = (*_unjudged(policy, files.evaluation), *_later(policy, files.evaluation))
    return PolicyCheck(problems, undecidable(tables, this_machine(tables)), notes)


@dataclass(frozen=True, slots=True)
class _Files:
    """The headers of the policy's data sets by key, and what is wrong with the rest."""

    headers: Mapping[str, DataHeader]
    unreadable: Mapping[str, str]

    @classmethod
    def of(cls, policy: Policy) -> "_Files":
        """Read the header of every set that the policy names."""
        named = {
            "data.evaluation": policy.data.evaluation,
            "data.calibration": policy.data.calibration,
            "data.shadow": policy.data.shadow,
            "shadow.traffic": policy.shadow.traffic if policy.shadow else None,
            "ensemble.samples": _plain_source(policy),
        }
        headers, unreadable = {}, {}
        for key, source in named.items():
            if source is None:
                continue
            try:
                if key == "data.shadow" and source.path is not None and is_sample(source.path):
                    sample_info(source.path)
                elif (header := read_source_header(source)) is not None:
                    headers[key] = header
            except (InputError, TrackingError) as error:
                unreadable[_said(key, source)] = str(error)
        return cls(headers, unreadable)

    @property
    def evaluation(self) -> DataHeader | None:
        """Of the evaluation data; None where it cannot be read."""
        return self.headers.get("data.evaluation")

    def problems(self) -> Iterator[str]:
        """Why sets cannot be read."""
        for said, why in self.unreadable.items():
            yield f"{said}: {why} Correct the path, or put the file there."


def _plain_source(policy: Policy) -> DataSource | None:
    """What an ensemble's first step takes is no input of the model: [data] says nothing of it."""
    samples = policy.ensemble.samples if policy.ensemble else None
    return data_source(samples) if samples is not None else None


def _folders(policy: Policy) -> Iterator[str]:
    """Folders that must be there, and places where no file may be."""
    if policy.ensemble is not None:
        for table, steps in (("before", policy.ensemble.before), ("after", policy.ensemble.after)):
            for step in steps:
                if not (step.folder / "config.pbtxt").is_file():
                    yield (
                        f"{_said(f'ensemble.{table}.{step.name}.folder', step.folder)}: there is "
                        f"no {step.folder / 'config.pbtxt'}. Correct the path."
                    )
    repository = policy.target.repository
    if repository.exists() and not repository.is_dir():
        yield (
            f"{_said('target.repository', repository)}: {repository} is a file. Name a folder; it "
            "need not be there yet."
        )


def _model(policy: Policy) -> Iterator[str]:
    """A model that is a file, a folder or a function must be there."""
    source = policy.model
    said = f'model.uri = "{source.uri}"'
    if source.scheme == "file" and not source.path.is_file():
        yield f"{said}: there is no file {source.path.absolute()}. Correct the path."
    if source.scheme == "hf" and not (source.path / "config.json").is_file():
        yield f"{said}: there is no {(source.path / 'config.json').absolute()}. Correct the path."
    if source.scheme != "python":
        return
    if not source.allow_code:
        yield (
            f"{said}: its module is imported and run, and allow_code is false. If you trust that "
            "code, set allow_code = true under [model]."
        )
    elif why := why_missing(source.location, _root(policy)):
        yield f"{said}: {why}. Correct the name, or install the module."


def _made(policy: Policy, *, pinned: bool) -> Iterator[str]:
    """Candidates that something else made must be there, and code be allowed."""
    for each in policy.candidates.made:
        said = _said("candidates.made.file", each.file)
        if not each.file.is_file():
            yield f"{said}: there is no file {each.file.absolute()}. Correct the path."
            continue
        if each.is_code and not each.allow_code:
            yield f"{said}: it {CODE_REFUSED}"
        if pinned and each.sha256 is None:
            yield (
                f"{said}: it has no sha256. Evidence from several kinds of device is found again "
                "by the policy's digest, which has to say which file it is about. If this file is "
                f'the one you mean, set beside it: sha256 = "{sha256_file(each.file)}".'
            )


def _functions(policy: Policy) -> Iterator[str]:
    """Functions of the user's own."""
    shadow = policy.shadow
    named = {
        f"metrics.{name}.kind": metric.kind
        for name, metric in policy.metrics.items()
        if ":" in metric.kind
    }
    for key in ("redactor", "slicer", "embedder"):
        hook = getattr(shadow, key) if shadow is not None else None
        if hook is not None:
            named[f"shadow.{key}"] = hook
    for key, source in policy.data.sources.items():
        if source.scheme == "python":
            yield from _function_of_data(f"data.{key}", source, _root(policy))
    for key, hook in named.items():
        if why := why_missing(hook, _root(policy)):
            yield f'{key} = "{hook}": {why}. Correct the name, or install the module.'


def _function_of_data(key: str, source: DataSource, root: Path) -> Iterator[str]:
    """A function that gives data must be there and allowed; it is not called."""
    if not source.allow_code:
        yield (
            f"{_said(key, source)}: its module is imported and run, and allow_code is false. If "
            "you trust that code, set allow_code = true under [data]."
        )
    elif why := why_missing(source.location, root):
        yield f"{_said(key, source)}: {why}. Correct the name, or install the module."


def _scorers(policy: Policy) -> Iterator[str]:
    """Boxes are matched by a library that is an extra."""
    detects = policy.task == "detection" or any(
        output.task == "detection" for output in policy.outputs.values()
    )
    if detects and importlib.util.find_spec("pycocotools") is None:
        yield (
            'task = "detection": pycocotools is not installed. Run: '
            "pip install 'enginegate[detection]'."
        )


def _runner(policy: Policy) -> Iterator[str]:
    runner = policy.evaluation.runner
    if runner != "threads" and importlib.util.find_spec(f"prefect_{runner}") is None:
        yield (
            f'evaluation.runner = "{runner}": prefect-{runner} is not installed. Run: pip install '
            f"'enginegate[{runner}]', or set runner = \"threads\"."
        )


def _arrivals(policy: Policy) -> Iterator[str]:
    """A load pattern must be installed, and take the policy's parameters."""
    try:
        load_pattern(policy.load.arrivals)
    except InputError as error:
        yield f"load.arrivals: {error}"


def _unservable(evaluation: DataHeader | None) -> Iterator[str]:
    """Types that no Triton takes."""
    for spec in evaluation.inputs.values() if evaluation else ():
        try:
            triton_type(spec.dtype)
        except ModelError as error:
            why = " ".join(str(error).split())
            yield f"data.evaluation: input.{spec.name} is {spec.dtype}: {why}"


def _uneven(files: _Files) -> Iterator[str]:
    """Sets for the same model hold the same inputs."""
    wanted = files.evaluation
    if wanted is None:
        return
    for key in ("data.calibration", "shadow.traffic", "data.shadow"):
        if key not in files.headers:
            continue
        given = files.headers[key].inputs
        for name in sorted(set(wanted.inputs) ^ set(given)):
            yield f"{key}: only one of it and data.evaluation has input.{name}. Name inputs alike."
        for name in sorted(set(wanted.inputs) & set(given)):
            ours, theirs = wanted.inputs[name], given[name]
            if (ours.dtype, len(ours.shape)) != (theirs.dtype, len(theirs.shape)):
                yield f"{key}: it holds {theirs}, and data.evaluation {ours}. Convert one of them."


def _no_sample(policy: Policy, evaluation: DataHeader | None) -> Iterator[str]:
    """A sample of live requests must have been recorded, where the policy counts on one."""
    if not _counts_on_live(policy):
        return
    home = Workspace.of(policy).shadow
    try:
        if latest_sample(home, policy.name) is not None:
            return
    except InputError as error:
        yield f"shadow: a recorded sample cannot be read: {error}"
        return
    if untraceable := _untraceable(evaluation):
        yield (
            "shadow.traffic is not set, so live requests are to be recorded, and Triton's traces "
            f"cannot hold {untraceable}. Name inputs to send in [shadow] traffic, or import a "
            "sample that something else recorded: enginegate shadow import."
        )
    else:
        yield (
            f"shadow.traffic is not set, and {home} holds no sample of {policy.name}. Record one "
            "with `enginegate shadow record`, name one in [data] shadow, or name inputs to send in "
            "[shadow] traffic."
        )


def _counts_on_live(policy: Policy) -> bool:
    wanted = policy.shadow
    return wanted is not None and wanted.traffic is None and policy.data.shadow is None


def _untraceable(evaluation: DataHeader | None) -> str:
    specs = evaluation.inputs.values() if evaluation else ()
    return ", ".join(str(spec) for spec in specs if spec.dtype in UNREADABLE)


def _unjudged(policy: Policy, evaluation: DataHeader | None) -> Iterator[str]:
    """Gates that the evaluation data is too small for, or has no labels for."""
    if evaluation is None or not evaluation.samples:
        return
    asked = {c.precision: gates_for(policy.gates, c.precision) for c in policy.candidates.all()}
    most = max(gates.min_samples for gates in asked.values())
    if evaluation.samples < most:
        short = [p for p, gates in asked.items() if gates.min_samples > evaluation.samples]
        yield (
            f"{', '.join(short)}: data.evaluation holds {evaluation.samples} samples, and "
            f"min_samples is {most}. Add samples."
        )
    judged = any(gates.max_accuracy_loss is not None for gates in asked.values())
    scored = ", ".join(policy.metrics)
    for needed, precisions in _too_strict(asked, evaluation.samples).items():
        limit = asked[precisions[0]].max_accuracy_loss
        yield (
            f"{', '.join(precisions)}: data.evaluation holds {evaluation.samples} samples, and "
            f"max_accuracy_loss = {limit:g} is settled by {needed} at the least, where nothing "
            "differs. Add samples, or state a wider margin."
        )
    labelled = any(name == "label" or name.startswith("label.") for name in evaluation.arrays)
    if not labelled and scored:
        yield (
            f"max_metric_loss: data.evaluation has no labels, so {scored} is not measured. Add the "
            "array label, or label.OUTPUT (docs/tasks.md)."
        )
    if judged and not labelled and policy.task == "classification":
        yield (
            "max_accuracy_loss: data.evaluation has no labels, so accuracy is not measured. Add "
            "the array label."
        )


def _too_strict(asked: Mapping[Precision, Gates], samples: int) -> dict[int, tuple[Precision, ...]]:
    """Precisions whose accuracy margin so few samples cannot settle, by how many could.

    Where no answer differs, the lower end of Tango's interval is -z^2 / (n + z^2).
    """
    found: dict[int, tuple[Precision, ...]] = {}
    for precision, gates in asked.items():
        margin = gates.max_accuracy_loss
        if not margin or samples < gates.min_samples:
            continue
        z = NormalDist().inv_cdf(0.5 + gates.confidence / 2.0)
        needed = math.ceil(z * z * (1.0 - margin) / margin)
        if samples < needed:
            found[needed] = (*found.get(needed, ()), precision)
    return found


def _later(policy: Policy, evaluation: DataHeader | None) -> Iterator[str]:
    """What a benchmark, a promotion or the watch will miss."""
    if policy.load.shared_memory == "cuda" and cuda.gpu() is None:
        yield (
            'load.shared_memory = "cuda": this machine has no NVIDIA GPU with a driver, so nothing '
            'can be benchmarked here. Qualify on one that has, or set "system".'
        )
    untraceable = _untraceable(evaluation)
    if _counts_on_live(policy) and untraceable:
        yield (
            f"live agreement: Triton's traces cannot hold {untraceable}, so the watch compares "
            "with FP32 only samples that are imported (enginegate shadow import)."
        )
    for key in ("private_key", "public_key"):
        path = getattr(policy.signing, key)
        if path is not None and not path.is_file():
            yield f"{_said(f'signing.{key}', path)}: there is no such file here; promote needs it."


def _said(key: str, path: Path | DataSource) -> str:
    """A key and its value, as the policy has it."""
    return f'{key} = "{getattr(path, "written", "") or path}"'


def _root(policy: Policy) -> Path:
    return policy.root or Path.cwd()
