"""A Triton in memory that serves a folder, for faults that a real one cannot be made to have.

Its models add the number in their ``engine.bin``, as those of the integration tests do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from enginegate.candidate import FileDigest, TensorSpec
from enginegate.decision import Promise
from enginegate.errors import ServerError
from enginegate.repository import Golden, Package
from enginegate.triton.config import Config
from enginegate.triton.gpu_memory import GpuMemory
from enginegate.triton.types import IndexRow, Reply, Statistics
from tests.fakes.evidence import INT8, SERVING, decision, scorecard

X = TensorSpec(name="x", dtype="float32", shape=(-1, 2))
Y = TensorSpec(name="y", dtype="float32", shape=(-1, 2))


@dataclass
class FakeTriton:
    """Loads what it is told to; ``refuses`` are versions that do not load.

    A version whose folder lacks the file of the backend keeps the model's loads for ever, as
    Triton 2.51 does with a Python model; ``stuck`` are these versions by model.

    With ``gpu_bytes`` every version takes ``version_bytes`` of a GPU's memory; as Triton does, it
    loads new versions before it unloads those that go.
    """

    root: Path
    loaded: dict[str, Config] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    refuses: set[int] = field(default_factory=set)
    stuck: dict[str, set[int]] = field(default_factory=dict)
    gpu_bytes: int = 0
    version_bytes: int = 0
    unloads: list[str] = field(default_factory=list)
    dead: bool = False
    address: str = "fake:1"

    def live(self) -> bool:
        return not self.dead

    def load(self, model: str, config: Config, *, timeout_s: float = 0.0) -> None:
        self._check(model)
        if self.refuses & set(config.versions or ()):
            raise ServerError("it does not load")
        folder, opened = self.root / model, config.opened_file
        lacking = {v for v in config.versions or () if not (folder / str(v) / opened).exists()}
        if lacking or model in self.stuck:
            self.stuck.setdefault(model, set()).update(lacking)
            raise ServerError(f"the load of {model} did not end in {timeout_s:g} s")
        together = {*self._versions(model), *(config.versions or ())}
        if self.gpu_bytes and len(together) * self.version_bytes > self.gpu_bytes:
            raise ServerError(f"CUDA out of memory with versions {sorted(together)}")
        self.loaded[model] = config

    def memory(self) -> tuple[GpuMemory, ...]:
        """Its GPU's, as the driver would tell of it; none where it has no GPU."""
        used = self.version_bytes * sum(len(self._versions(model)) for model in self.loaded)
        return (GpuMemory(0, self.gpu_bytes, used),) if self.gpu_bytes else ()

    def _versions(self, model: str) -> tuple[int, ...]:
        return (self.loaded[model].versions or ()) if model in self.loaded else ()

    def unload(self, model: str) -> None:
        self._check(model)
        self.unloads.append(model)
        self.loaded.pop(model, None)
        self.foreign.discard(model)

    def model_ready(self, model: str, version: str = "") -> bool:  # noqa: ARG002
        return not self.dead and (model in self.loaded or model in self.foreign)

    def index(self) -> tuple[IndexRow, ...]:
        self._check("")
        ours = [(name, v) for name, config in self.loaded.items() for v in config.versions or ()]
        rows = [*ours, *((name, 1) for name in self.foreign)]
        loading = [(name, v) for name, versions in self.stuck.items() for v in sorted(versions)]
        return (
            *(IndexRow(name, version, "READY", "") for name, version in rows),
            *(IndexRow(name, version, "LOADING", "") for name, version in loading),
        )

    def config(self, model: str, version: str = "") -> Config:  # noqa: ARG002
        self._check(model)
        return self.loaded[model]

    def infer(self, model: str, inputs: Mapping[str, np.ndarray], *, version: str = "") -> Reply:
        self._check(model)
        which = int(version) if version else max(self.loaded[model].versions or ())
        offset = np.float32((self.root / model / str(which) / "engine.bin").read_text())
        return Reply({"y": inputs["x"] + offset}, str(which))

    def statistics(self, model: str, version: str = "") -> Statistics:  # noqa: ARG002
        self._check(model)
        return Statistics()

    def _check(self, model: str) -> None:
        if self.dead:
            raise ServerError(f"{self.address} does not answer about {model}")


def package_in(folder: Path, offset: float, **changes: object) -> Package:
    """What a release is made of, below ``folder``; the model adds ``offset``."""
    built = folder / "built" / str(offset)
    built.mkdir(parents=True, exist_ok=True)
    (built / "engine.bin").write_text(str(offset))
    (built / "model.py").write_text("# a real server would run it\n")
    x, card = np.arange(8, dtype=np.float32).reshape(4, 2), scorecard()
    made = Package(
        model="digits",
        model_uri="models:/digits/1",
        candidate=INT8,
        engine_sha256=FileDigest.of(built / "engine.bin").sha256,
        approved={"engine.bin": FileDigest.of(built / "engine.bin")},
        files={name: built / name for name in ("engine.bin", "model.py")},
        backend="python",
        gpu=False,
        inputs=(X,),
        outputs=(Y,),
        serving=SERVING,
        golden=Golden({"x": x}, {"y": x + np.float32(offset)}),
        golden_max_abs_error=1e-4,
        scorecard_sha256=card.digest,
        decision=decision(card),
        promise=Promise(p99_ms=9.0, throughput_per_s=400.0, slo_p99_ms=25.0),
    )
    return replace(made, **changes)
