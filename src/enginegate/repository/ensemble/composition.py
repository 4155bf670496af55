"""From a policy's ``[ensemble]`` to the Triton models of one release.

The engine becomes one composing model among others. Tensors are named as the policy says; which of
them the ensemble itself takes and gives depends on the models that take and give them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from enginegate.candidate import FileDigest, TensorSpec
from enginegate.decision import ComposingModel, Release, ReleasedEngine
from enginegate.engine_kinds import is_fixed_batch
from enginegate.errors import EnginegateError, ModelError
from enginegate.policy.operating import Ensemble, EnsembleStep
from enginegate.records import sha256_bytes
from enginegate.repository.store.golden import Golden
from enginegate.repository.store.layout import ENSEMBLE_FILE, Layout, part_config
from enginegate.repository.store.package import Package, PartPackage
from enginegate.triton.config import Config, config_text, model_config, read_config
from enginegate.triton.ensemble_config import (
    Wiring,
    composing_config,
    composing_obstacle,
    ensemble_config,
)

ENGINE = "engine"
_CONFIG = "config.pbtxt"
_BYTECODE = "__pycache__"


@dataclass(frozen=True, slots=True)
class Composed:
    """An ensemble that fits together: its own configuration, and its models in running order."""

    config: Config
    parts: tuple[PartPackage, ...]


@dataclass(slots=True)
class _Tensors:
    """Tensors of the ensemble as the steps are gone through in order."""

    inputs: dict[str, tuple[TensorSpec, str]] = field(default_factory=dict)
    given: dict[str, tuple[TensorSpec, str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def take(self, spec: TensorSpec, who: str) -> None:
        """A step needs a tensor: somebody before it gives it, else whoever asks the ensemble."""
        self.taken.add(spec.name)
        found = self.given.get(spec.name) or self.inputs.get(spec.name)
        if found is None:
            self.inputs[spec.name] = (spec, who)
        elif not _alike(found[0], spec):
            raise ModelError(
                f"The ensemble does not fit together: {found[1]} has {found[0]}, and {who} needs "
                f"{spec}. Correct the configuration of one of them."
            )

    def give(self, spec: TensorSpec, who: str) -> None:
        """A step makes a tensor that nobody before it made or needed."""
        found = self.given.get(spec.name) or self.inputs.get(spec.name)
        if found is not None:
            done = "made" if spec.name in self.given else "needed"
            raise ModelError(
                f"Tensor {spec.name!r} of the ensemble is {done} by {found[1]}, and made by {who} "
                "after it. Give one of them another name under [ensemble] in the policy."
            )
        self.given[spec.name] = (spec, who)


def compose(model: str, rules: Ensemble, engine: PartPackage) -> Composed:
    """The ensemble of a policy around one engine.

    Args:
        model: the ensemble's name; its composing models are named after it.
        rules: its steps.
        engine: the engine as a composing model, under `part_name` of `engine_step`.

    Raises:
        ModelError: a folder is not a Triton model of this kind, a tensor does not fit where it
            goes (both sides are named), or a name is taken twice.
    """
    _check_names(model, rules, engine)
    steps = [_read(model, step) for step in (*rules.before, *rules.after)]
    before, after = steps[: len(rules.before)], steps[len(rules.before) :]
    parts = (*before, engine, *after)
    by_name = {part_name(model, step.name): step for step in (*rules.before, *rules.after)}
    tensors, wirings = _Tensors(), []
    for part in parts:
        wiring = _wiring(part, by_name.get(part.name))
        _connect(part, wiring, tensors)
        wirings.append(wiring)
    outputs = [spec for name, (spec, _) in tensors.given.items() if name not in tensors.taken]
    config = ensemble_config(
        model,
        tuple(wirings),
        inputs=tuple(spec for spec, _ in tensors.inputs.values()),
        outputs=tuple(outputs),
        max_batch_size=min(part.config.serving.max_batch_size for part in parts),
    )
    return Composed(config, parts)


def part_name(model: str, step: str) -> str:
    """The name that Triton knows a composing model by."""
    return f"{model}.{step}"


def engine_step(made: Package | ReleasedEngine) -> str:
    """What the engine is called among the steps, e.g. ``engine`` or ``engine-onnxruntime``.

    Both versions of a composing model serve while the ensemble goes over, with one configuration.
    So engines that no configuration can load together are named apart: of another backend, for
    another kind of device, with and without TF32, and plans, each loaded for one largest batch.
    """
    words = [ENGINE]
    words += [made.backend] if made.backend != "python" else []
    words += ["gpu"] if made.gpu else []
    words += ["tf32"] if made.settings.cuda_provider.get("use_tf32") == "1" else []
    words += [f"b{made.serving.max_batch_size}"] if is_fixed_batch(made.backend) else []
    return "-".join(words)


def _check_names(model: str, rules: Ensemble, engine: PartPackage) -> None:
    own = {ENGINE, engine.name.removeprefix(f"{model}.")}
    names = [step.name for step in (*rules.before, *rules.after)]
    twice = sorted({name for name in names if names.count(name) > 1 or name in own})
    if twice:
        raise ModelError(
            f"Two composing models of the ensemble are named {twice[0]!r} ({ENGINE!r} is the "
            "engine's own name). Rename one of them in the policy."
        )


def _read(model: str, step: EnsembleStep) -> PartPackage:
    """A team's model folder as a composing model."""
    path = step.folder / _CONFIG
    if not path.is_file() or path.is_symlink():
        raise ModelError(
            f"{path} is not there, or is no regular file. The step {step.name!r} of the ensemble "
            "needs a folder with config.pbtxt and the model's files."
        )
    try:
        config = read_config(path.read_text(), str(path))
        inputs = config.inputs
    except (EnginegateError, OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is not a Triton configuration of a composing model: {error}"
        ) from error
    unfit = composing_obstacle(config)
    if unfit or not inputs or not config.outputs:
        raise ModelError(
            f"{path} {unfit or 'lists no inputs or no outputs'}, so it cannot be a step of an "
            "ensemble. Correct it."
        )
    files = dict(_files(step.folder))
    opened = config.opened_file
    if opened and not any(name == opened or name.startswith(f"{opened}/") for name in files):
        raise ModelError(f"{step.folder} has no {opened}: Triton's load of it would never end.")
    return PartPackage(
        name=part_name(model, step.name),
        config=composing_config(config, part_name(model, step.name)),
        files=files,
    )


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file of a composing model but its configuration, by path in the version folder."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ModelError(f"{path} is not a regular file or folder; a release holds only those.")
        if path.is_dir() and len(name.parts) == 1 and path.name.isdigit():
            raise ModelError(
                f"{path} looks like a version. Versions are numbered when they are published: put "
                "the files beside config.pbtxt."
            )
        if path.is_file() and str(name) != _CONFIG and _BYTECODE not in name.parts:
            yield name.as_posix(), path


def _wiring(part: PartPackage, step: EnsembleStep | None) -> Wiring:
    """Which tensor each input and output is; the engine's keep their names."""
    inputs = [spec.name for spec in part.config.inputs]
    outputs = [spec.name for spec in part.config.outputs]
    if step is None:
        return Wiring(part.name, {n: n for n in inputs}, {n: n for n in outputs})
    for kind, mapped, known in (("input", step.inputs, inputs), ("output", step.outputs, outputs)):
        strangers = sorted(set(mapped) - set(known))
        if strangers:
            raise ModelError(
                f"Step {step.name!r} of the ensemble names {kind} {strangers[0]!r}; its "
                f"config.pbtxt has {', '.join(known)}."
            )
    missing = sorted(set(inputs) - set(step.inputs))
    if missing or not step.outputs:
        what = f"a tensor for its input {missing[0]!r}" if missing else "any of its outputs"
        raise ModelError(f"Step {step.name!r} of the ensemble does not name {what}.")
    return Wiring(part.name, step.inputs, step.outputs)


def _connect(part: PartPackage, wiring: Wiring, tensors: _Tensors) -> None:
    for spec in part.config.inputs:
        tensor = wiring.inputs[spec.name]
        tensors.take(spec.model_copy(update={"name": tensor}), part.name)
    for spec in part.config.outputs:
        if spec.name in wiring.outputs:
            tensor = wiring.outputs[spec.name]
            tensors.give(spec.model_copy(update={"name": tensor}), part.name)


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    """As Triton compares them: -1 stands for any size."""
    return (
        one.dtype == other.dtype
        and len(one.shape) == len(other.shape)
        and all(-1 in {a, b} or a == b for a, b in zip(one.shape, other.shape, strict=True))
    )


def as_ensemble(
    package: Package, rules: Ensemble, answers: Callable[[Composed], Golden]
) -> Package:
    """The package of an ensemble around a packaged engine.

    Args:
        package: of the engine alone, with its validated answers.
        rules: the steps around it.
        answers: finds the whole ensemble's samples and answers; their tolerance is the engine's,
            relative to the largest answer.

    Raises:
        ModelError: the steps do not fit together.
    """
    name = part_name(package.model, engine_step(package))
    engine = PartPackage(
        name=name,
        config=model_config(
            name=name,
            inputs=package.inputs,
            outputs=package.outputs,
            serving=package.serving,
            backend=package.backend,
            parameters={},
            gpu=package.gpu,
            options=package.options,
            settings=package.settings,
        ),
        files=package.files,
        approved=package.approved,
        golden=package.golden,
        golden_max_abs_error=package.golden_max_abs_error,
    )
    composed = compose(package.model, rules, engine)
    golden = answers(composed)
    share = package.golden_max_abs_error / package.golden.largest if package.golden.largest else 0.0
    return replace(
        package,
        inputs=composed.config.inputs,
        outputs=composed.config.outputs,
        files={},
        approved={},
        golden=golden,
        golden_max_abs_error=golden.largest * share,
        ensemble=composed.config,
        parts=composed.parts,
    )


def composes(layout: Layout, release: Release, rules: Ensemble | None) -> bool:
    """Whether a release is made of the very steps that a policy names now.

    Raises:
        ModelError: the policy's steps are not there any more, or do not fit the release's engine.
        TamperedError: the release's own files are not what was published.
    """
    if rules is None or not release.engine.parts:
        return rules is None and not release.engine.parts
    published = {part.name: part for part in release.engine.parts}
    name = part_name(release.model, engine_step(release.engine))
    engine = part_config(layout, release.version, published[name])
    composed = compose(release.model, rules, PartPackage(name, engine, {}))
    own = release.engine.files[ENSEMBLE_FILE].sha256
    return own == _text_digest(composed.config) and all(
        part.name == name or _is_published(part, published.get(part.name))
        for part in composed.parts
    )


def _is_published(part: PartPackage, published: ComposingModel | None) -> bool:
    if published is None or published.config.sha256 != _text_digest(part.config):
        return False
    was = {n: d for n, d in published.files.items() if PurePath(n).name != _BYTECODE}
    return was == {name: FileDigest.of(path) for name, path in part.files.items()}


def _text_digest(config: Config) -> str:
    return sha256_bytes(config_text(config).encode())
