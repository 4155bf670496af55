"""An engine's speed without a server: opened once, swept over batch sizes, kept by content."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from enginegate import __version__
from enginegate.candidate import Engine, OnnxModel, Precision, Sha256
from enginegate.data import DataSet, Tensors
from enginegate.engines import Runner, cuda, open_engine
from enginegate.engines.engine_sweep import Sweep, sweep_batches, sweep_sizes
from enginegate.engines.torch_inductor.eager import EagerBaseline
from enginegate.engines.torch_inductor.library import torch_version
from enginegate.errors import tool_errors
from enginegate.evidence import EagerSpeed, EngineSpeed
from enginegate.records import Record, canonical_json, sha256_bytes
from enginegate.workspace import remembered


@dataclass(frozen=True, slots=True)
class EngineMeter:
    """How every engine of a qualification is measured alone.

    Attributes:
        samples: real inputs; a batch repeats them from the start where they are fewer.
        samples_sha256: of what decides them.
        sizes: batch sizes that matter besides the usual ones: those that serving may form.
        limit_s: for one engine.
        machine: that the numbers are valid for.
        folder: where they are kept.
    """

    samples: DataSet
    samples_sha256: Sha256
    sizes: tuple[int, ...]
    limit_s: float
    machine: str
    folder: Path

    def measure(self, engine: Engine, folder: Path) -> EngineSpeed:
        """The speed of an engine of the store; what was measured on this machine is kept.

        Raises:
            EnginegateError: it cannot be opened, or not one batch size could be measured.
        """
        deciding = {
            "enginegate": __version__,
            "engine": engine.digest,
            "samples": self.samples_sha256,
            "sizes": self.sizes,
            "limit_s": self.limit_s,
            "machine": self.machine,
        }
        return remembered(
            self.folder / f"{sha256_bytes(canonical_json(deciding))}.json",
            EngineSpeed,
            lambda: self._measured(engine, folder),
            worth_keeping=lambda made: bool(made.batches),
        )

    def measure_eager(
        self, onnx: OnnxModel, folder: Path, largest: int, precisions: tuple[Precision, ...]
    ) -> tuple[EagerSpeed, ...]:
        """The source's own PyTorch model, by the same sweep; nothing where it is none.

        Args:
            onnx: the model, with its program beside it.
            folder: where both are.
            largest: batch that engines take.
            precisions: of the candidates.

        Raises:
            EnginegateError: PyTorch cannot run it.
        """
        if onnx.program is None:
            return ()
        deciding = {
            "enginegate": __version__,
            "program": onnx.program.file.sha256,
            "torch": torch_version(),
            "largest": largest,
            "precisions": sorted(precisions),
            "samples": self.samples_sha256,
            "sizes": self.sizes,
            "limit_s": self.limit_s,
            "machine": self.machine,
        }
        baseline = EagerBaseline(self.rows, sweep_sizes(largest, self.sizes), self.limit_s)
        return remembered(
            self.folder / f"eager-{sha256_bytes(canonical_json(deciding))}.json",
            EagerSpeeds,
            lambda: EagerSpeeds(speeds=baseline.measure(onnx, folder, precisions)),
            worth_keeping=lambda made: any(speed.batches for speed in made.speeds),
        ).speeds

    def _measured(self, engine: Engine, folder: Path) -> EngineSpeed:
        with ExitStack() as stack:
            stack.enter_context(tool_errors(f"{engine.candidate}, measured alone"))
            on_gpu = engine.target != "cpu"
            memory = _Memory(stack.enter_context(cuda.used_memory()) if on_gpu else lambda: None)
            memory.note()
            runner = stack.enter_context(open_engine(engine, folder))
            memory.note()
            found = self.sweep(runner, engine.max_batch_size, memory.note)
            return EngineSpeed(
                candidate=engine.candidate,
                engine_sha256=engine.file.sha256,
                device=runner.device,
                inputs_on="device" if on_gpu else "host",
                graphs=_graphs(engine),
                batches=found.batches,
                unmeasured=found.unmeasured,
                opened_mib=memory.since_start(1),
                largest_batch_mib=memory.since_start(-1),
            )

    def sweep(
        self, runner: Runner, largest: int, at_largest: Callable[[], None] = lambda: None
    ) -> Sweep:
        """One opened model, over the batch sizes up to its largest."""
        return sweep_batches(
            runner.bound,
            self.rows,
            sweep_sizes(largest, self.sizes),
            limit_s=self.limit_s,
            at_largest=at_largest,
        )

    def rows(self, count: int) -> Tensors:
        """So many samples, from the first one on."""
        places = np.arange(count) % len(self.samples)
        return {n: np.ascontiguousarray(a[places]) for n, a in self.samples.inputs.items()}


class EagerSpeeds(Record):
    """The sweeps of one source's PyTorch model."""

    speeds: tuple[EagerSpeed, ...]


@dataclass(slots=True)
class _Memory:
    """Readings of the device memory in use, in MiB, in the order they were taken."""

    read: Callable[[], float | None]
    readings: list[float | None] = field(default_factory=list)

    def note(self) -> None:
        self.readings.append(self.read())

    def since_start(self, place: int) -> float | None:
        """One reading minus the first; others that give memory back never make it negative."""
        first, then = self.readings[0], self.readings[place]
        return None if first is None or then is None else round(max(0.0, then - first), 1)


def _graphs(engine: Engine) -> bool | None:
    told = engine.flags.get("cuda_graphs")
    return None if told is None else told == "on"


def fastest_first(
    speeds: Sequence[EngineSpeed | None],
) -> tuple[int, ...]:
    """Places of engines in the order they are served: the fastest alone first, unknown last.

    The first to be served is the likeliest winner, so that a run that is stopped has measured it.
    """
    best = [speed.best.samples_per_s if speed and speed.best else 0.0 for speed in speeds]
    return tuple(sorted(range(len(speeds)), key=lambda place: (-best[place], place)))
