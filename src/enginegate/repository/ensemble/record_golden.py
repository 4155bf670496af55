"""An ensemble's answers before anybody depends on it: its models on a server of our own.

The engine inside is held to its validated answers when it is published; what the steps around it
make of them is recorded here, and held to from then on.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from enginegate.atomic_io import write_file
from enginegate.data import Tensors
from enginegate.errors import DataError, ServerError
from enginegate.repository.ensemble.composition import Composed
from enginegate.repository.store.golden import Golden
from enginegate.triton.client import TritonClient
from enginegate.triton.config import Config, config_text
from enginegate.triton.ensemble_config import config_for_versions
from enginegate.triton.install import find_triton
from enginegate.triton.server import Server, start
from enginegate.workspace import Workspace

_VERSION = 1


def record_golden(
    server: Server, composed: Composed, samples: Tensors, *, load_timeout_s: float = 120.0
) -> Golden:
    """Serve an ensemble on an embedded server and record its answers.

    Args:
        server: started on an empty repository of its own, which is cleared afterwards.
        composed: the ensemble and its models.
        samples: inputs by name, first axis the samples; others than the ensemble's are left out.
        load_timeout_s: limit on the load of one composing model.

    Raises:
        DataError: the samples lack an input of the ensemble.
        ServerError: a composing model does not load, or does not answer.
    """
    inputs = _inputs(composed, samples)
    root = server.repository
    if root is None:
        raise ServerError(
            f"The server at {server.grpc} was not started here: nothing is put on it."
        )
    with server.client(timeout_s=load_timeout_s) as client:
        try:
            for part in composed.parts:
                _place(root, part.config, part.files)
                _load(client, part.config, load_timeout_s)
            _place(root, composed.config, {})
            _load(client, composed.config, load_timeout_s)
            return Golden(inputs, _ask(client, composed.config.name, inputs))
        finally:
            for name in (composed.config.name, *(part.name for part in composed.parts)):
                shutil.rmtree(root / name, ignore_errors=True)


def record_golden_on_own_server(
    composed: Composed, given: Tensors, workspace: Workspace, *, load_timeout_s: float
) -> Golden:
    """The same on a server that is started for it.

    Raises:
        DataError: the samples lack an input of the ensemble.
        ServerError: there is no Triton here, a composing model does not load, or does not answer.
    """
    workspace.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rehearsal-", dir=workspace.scratch) as folder:
        repository = Path(folder) / "repository"
        repository.mkdir()
        install = find_triton(workspace.root / "triton")
        with start(install, repository, folder=Path(folder) / "server") as server:
            return record_golden(server, composed, given, load_timeout_s=load_timeout_s)


def _inputs(composed: Composed, samples: Tensors) -> Tensors:
    wanted = [spec.name for spec in composed.config.inputs]
    missing = sorted(set(wanted) - set(samples))
    if missing:
        raise DataError(
            f"The ensemble {composed.config.name} takes {', '.join(wanted)}, and the samples have "
            f"{', '.join(sorted(samples))}: {missing[0]!r} is missing. Name samples of its own "
            "inputs with ensemble.samples in the policy."
        )
    return {name: samples[name] for name in wanted}


def _place(root: Path, config: Config, files: Mapping[str, Path]) -> None:
    folder = root / config.name
    (folder / str(_VERSION)).mkdir(parents=True)
    for name, source in files.items():
        target = folder / str(_VERSION) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    write_file(folder / "config.pbtxt", config_text(_pinned(config)).encode())


def _load(client: TritonClient, config: Config, timeout_s: float) -> None:
    client.load(config.name, config=_pinned(config), timeout_s=timeout_s)


def _pinned(config: Config) -> Config:
    return config_for_versions(config, (_VERSION,), {})


def _ask(client: TritonClient, model: str, inputs: Tensors) -> Tensors:
    """One sample at a time, as they will be replayed."""
    rows = len(next(iter(inputs.values())))
    replies = [
        client.infer(model, {name: array[row : row + 1] for name, array in inputs.items()})
        for row in range(rows)
    ]
    return {
        name: np.concatenate([reply.outputs[name] for reply in replies])
        for name in replies[0].outputs
    }
