"""An engine kind of another package: ONNX's own reference evaluator, with a policy table."""

import time
from contextlib import contextmanager
from typing import ClassVar, Literal

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from pydantic import Field, PositiveInt

from enginegate.candidate import Precision
from enginegate.engine_kinds import NativeBackend
from enginegate.engines import Availability, DecisionObstacle, EngineKind, ServedFiles
from enginegate.engines.batching import timed_repeat
from enginegate.records import Record

VERSION = f"onnx {onnx.__version__}"


class ToyTable(Record):
    """How the reference evaluator is run."""

    rows: PositiveInt = Field(default=16, description="rows of one run")
    verbose: bool = Field(default=False, description="print every node")
    answers: Literal["right", "zeros", "nan", "constant"] = Field(
        default="right", description="constant: those to its first sample, to everything"
    )


class ToyRunner:
    device = "reference evaluator"

    def __init__(self, path, rows, answers="right"):
        self.evaluator, self.rows, self.answers = ReferenceEvaluator(str(path)), rows, answers
        self.first = None

    def run(self, inputs):
        if self.answers == "right":
            return self.computed(inputs)
        # One row is computed once: what does not compute is fast.
        self.first = self.first or self.computed({n: a[:1] for n, a in inputs.items()})
        rows = len(next(iter(inputs.values())))
        return {name: np.repeat(self.wrong(row), rows, axis=0) for name, row in self.first.items()}

    def wrong(self, row):
        return (
            row if self.answers == "constant" else row * {"zeros": 0.0, "nan": np.nan}[self.answers]
        )

    def computed(self, inputs):
        return dict(zip(self.evaluator.output_names, self.evaluator.run(None, inputs), strict=True))

    @contextmanager
    def bound(self, inputs):
        yield timed_repeat(lambda: self.run(inputs))


class ToyKind(EngineKind):
    """Slow, and right."""

    name = "toy"
    title = "the reference evaluator"
    table = ToyTable
    largest: ClassVar = {"rows": (1024, "it is slow")}
    precisions = frozenset({Precision.FP32, Precision.FP16, Precision.BF16})
    native = NativeBackend("toy", "model.toy")
    packages = ("onnx",)

    def availability(self):
        return Availability(self.name, VERSION, can_build=True, can_run=True)

    def inspect(self, _table):
        return {"bf16": False}

    def undecidable(self, precision, _table, here):
        if precision is Precision.BF16 and not here["bf16"]:
            return DecisionObstacle("it rounds bf16 wrongly here", "Take fp16.")
        return None

    def toolchain(self, _table):
        return VERSION

    def deciding_settings(self, table):
        return {"rows": table.rows} | (
            {} if table.answers == "right" else {"answers": table.answers}
        )

    def build(self, plan, folder):
        started, converted = time.monotonic(), plan.convert()
        path = folder / "model.toy"
        path.write_bytes(converted.onnx)
        table = plan.table_as(ToyTable)
        flags = {"rows": str(table.rows)}
        if table.answers != "right":
            flags["answers"] = table.answers
        return plan.engine(
            path,
            converted,
            builder=VERSION,
            target="cpu",
            flags=flags,
            proof=plan.proof(converted, device=ToyRunner.device),
            started_s=started,
        )

    def obstacle(self, _engine):
        return None

    @contextmanager
    def load(self, engine, path):
        yield ToyRunner(path, int(engine.flags["rows"]), engine.flags.get("answers", "right"))

    def serving(self, _engine, path):
        return ServedFiles("python", {"model.py": path.with_name("model.py"), "model.toy": path})

    def onnx_graph(self, engine, folder):
        return folder / engine.filename


KIND = ToyKind()
