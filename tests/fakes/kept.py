"""A project that has been in use for months: a workspace, a live repository, old evidence."""

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from enginegate.candidate import Engine, FileDigest, PrecisionProof, TensorSpec
from enginegate.evidence import Scorecard
from enginegate.policy.operating import (
    Approval,
    LiveTables,
    PromotionTarget,
    Retention,
    Signing,
    Watch,
)
from enginegate.records import sha256_bytes
from enginegate.repository import AuditRecord, LiveRepository, record_act
from enginegate.retention import PruneScope
from enginegate.workspace import Workspace, now
from tests.fakes.evidence import INT8, scorecard, verdict
from tests.fakes.live_triton import FakeTriton, package_in

MONTHS = timedelta(days=90)
UNUSED = timedelta(days=30)


@dataclass
class KeptProject:
    """Everything in it is months old unless a test says otherwise."""

    root: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root / "home")

    @property
    def live(self) -> Path:
        return self.root / "live"

    @property
    def tables(self) -> LiveTables:
        return LiveTables(
            model="digits",
            target=PromotionTarget(repository=self.live),
            signing=Signing(),
            retention=Retention(),
            watch=Watch(),
            approval=Approval(expires_hours=24.0),
        )

    def scope(self, **changes) -> PruneScope:
        """All of it, under one policy; nothing there was made by a registered model."""
        return PruneScope(**({"workspace": self.workspace, "tables": (self.tables,)} | changes))

    def engine(self, content: bytes, key: str = "") -> str:
        """An engine of the store; the digest of its file."""
        folder = self.workspace.engines / (key or sha256_bytes(b"plan of " + content))
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(content)
        engine = engine_of(folder / "model.onnx")
        (folder / "manifest.json").write_bytes(engine.pretty_json())
        age(folder)
        return engine.file.sha256

    def scorecard(self, engine: str, **changes) -> Scorecard:
        """A scorecard that an engine won."""
        judged = verdict().model_copy(update={"engine_sha256": engine})
        benchmarks = scorecard().benchmarks
        measured = tuple(b.model_copy(update={"engine_sha256": engine}) for b in benchmarks)
        fields = {"model_uri": "file:digits.onnx", "verdicts": (judged,), "benchmarks": measured}
        card = scorecard(**(fields | changes))
        age(self.workspace.save_scorecard(card))
        return card

    def cached(self, name: str = "verdicts/old.json") -> Path:
        """A result that nothing refers to."""
        path = self.workspace.results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        return age(path)

    def publish(self, *offsets: float) -> tuple[str, ...]:
        """Releases of scorecards of their own, whose engines are in the store; their digests."""
        self.live.mkdir(exist_ok=True)
        repository = LiveRepository(self.live, FakeTriton(self.live), load_timeout_s=1.0, keep=99)
        digests: list[str] = []
        before = None
        for number, offset in enumerate(offsets, start=1):
            engine = self.engine(str(offset).encode())
            card = self.scorecard(engine, replaces=before)
            package = package_in(self.root, offset, model_uri="file:digits.onnx")
            decided = package.decision.model_copy(update={"scorecard_sha256": card.digest})
            package = replace(package, scorecard_sha256=card.digest, decision=decided)
            repository.publish(package, expected=before)
            digests.append(engine)
            before = number
        return tuple(digests)

    def note(self, card: Scorecard, event: str) -> None:
        """Let the audit log say that something happened to a scorecard."""
        self.live.mkdir(exist_ok=True)
        record_act(
            self.live,
            AuditRecord(
                event=event,
                model="digits",
                who="ada",
                why="a test",
                origin="here",
                scorecard=card.digest,
            ),
        )


def engine_of(path: Path) -> Engine:
    """The manifest of an engine of one file."""
    spec = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
    proof = PrecisionProof(
        weighted_layers={}, quantised_layers=0, device="CPU", proven=True, detail="int8"
    )
    return Engine(
        candidate=INT8,
        filename=path.name,
        file=FileDigest.of(path),
        onnx_sha256="0" * 64,
        converted_sha256="1" * 64,
        converter="none",
        calibration_sha256=None,
        builder="onnxruntime 1",
        target="cpu",
        inputs=(spec,),
        outputs=(spec,),
        max_batch_size=8,
        build_s=1.0,
        proof=proof,
    )


def age(path: Path, by: timedelta = MONTHS) -> Path:
    """Let a path look as if it was used that long ago."""
    stamp = (now() - by).timestamp()
    os.utime(path, (stamp, stamp))
    return path
