"""An engine kind of another package: ONNX's own reference evaluator, with a policy table."""

import time
from contextlib import contextmanager
from typing import ClassVar

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


class ToyRunner:
    device = "reference evaluator"

    def __init__(self, path, rows):
        self.evaluator, self.rows = ReferenceEvaluator(str(path)), rows

    def run(self, inputs):
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
        return {"rows": table.rows}

    def build(self, plan, folder):
        started, converted = time.monotonic(), plan.convert()
        path = folder / "model.toy"
        path.write_bytes(converted.onnx)
        return plan.engine(
            path,
            converted,
            builder=VERSION,
            target="cpu",
            flags={"rows": str(plan.table_as(ToyTable).rows)},
            proof=plan.proof(converted, device=ToyRunner.device),
            started_s=started,
        )

    def obstacle(self, _engine):
        return None

    @contextmanager
    def load(self, engine, path):
        yield ToyRunner(path, int(engine.flags["rows"]))

    def serving(self, _engine, path):
        return ServedFiles("python", {"model.py": path.with_name("model.py"), "model.toy": path})

    def onnx_graph(self, engine, folder):
        return folder / engine.filename


KIND = ToyKind()
