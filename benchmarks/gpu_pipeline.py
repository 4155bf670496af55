"""The whole pipeline on a GPU, as its user drives it: ``python benchmarks/gpu_pipeline.py``.

Trains a ResNet-50 on scikit-learn's digits at 224 x 224 (a minute on a GPU), registers it in
MLflow, and runs the commands: ``qualify``, ``approve``, ``serve``, ``promote``, a call, a second
version promoted under load, ``rollback``, ``watch``. Candidates of every engine kind. How long each
step took, its exit code and its last lines are in a JSON file, written after each step; a step that
fails ends the drive. With ``--network encoder`` the model is the encoder of all-MiniLM-L6-v2 with
random weights. ``--device cpu`` tries the script with a small network.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlflow.pytorch
import numpy as np
import torch
from gpu_report import Report, table
from mlflow.models import ModelSignature
from mlflow.types import Schema, TensorSpec
from networks import Encoder
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional

from enginegate.data import DataSet, read_data, write_data
from enginegate.engines import cuda
from enginegate.errors import ExitCode
from enginegate.loadgen.background_load import BackgroundLoad
from enginegate.loadgen.traffic import Traffic
from enginegate.measuring.p99 import nearest_rank
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace

_NAME = "drive"
_CLASSES, _TRAINING, _EVALUATION, _CALIBRATION = 10, 1200, 500, 64
_IMAGE, _TOKENS = "image", ("input_ids", "attention_mask")
_DATATYPES = {"FP32": "float32", "INT64": "int64", "INT32": "int32"}
_PATIENCE_S = 60.0
_SETTLE_S = 1.0
_TAIL = 60
_CANDIDATES = {
    "cuda": {
        "tensorrt": ["fp16", "tf32", "fp32"],
        "torch_inductor": ["fp16", "tf32"],
        "onnxruntime": ["fp32", "tf32", "fp16"],
    },
    "cpu": {"onnxruntime": ["fp32", "int8"], "torch_inductor": ["fp32"]},
}
_POLICY = """
schema_version = 1
name = "{name}"
task = "{task}"

[model]
uri = "models:/{name}/1"
parity_max_abs_error = 1e-2

[data]
evaluation = "{home}/evaluation.npz"
calibration = "{home}/calibration.npz"

[shapes]
batch = {{ min = 1, best = {largest}, max = {largest} }}

[candidates]
{candidates}

[calibration]
method = "max"
max_samples = 64

[repair]
max_builds = 0

[tensorrt]
workspace_mib = 4096
timeout_s = {build_s}
when_slow = "lower"

[torch_inductor]
timeout_s = {build_s}
batch_buckets = {buckets}

[onnxruntime]
batch_buckets = {buckets}

{gates}

[benchmark]
engine_alone_s = 3.0

[slo]
p99_ms = {slo_ms}
min_throughput_per_s = {least}
confidence = 0.95
confirmations = 2
confirm_requests = 1200

[load]
rows = {rows}
shared_memory = "{shared_memory}"

[search]
max_batch_sizes = [{largest}]
queue_delays_us = [0, 500, 2000]
instances = [1, 2]
min_rate_per_s = {least}
max_rate_per_s = {most}
measurement_s = 2
budget_s = {search_s}
max_measurements = 20

[target]
repository = "{home}/live"
load_timeout_s = 300

[approval]
approvers = []
expires_hours = 72

[watch]
"""
_GATES = {
    "classification": """
[gates.default]
confidence = 0.95
min_samples = 400
max_accuracy_loss = 0.02
min_slice_samples = 60
max_slice_accuracy_loss = 0.1
min_top1_agreement = 0.97
max_kl_p99_nats = 0.2
max_abs_error = 2.0
""",
    "embedding": """
[gates.default]
confidence = 0.95
min_samples = 400
min_slice_samples = 60
min_cosine_p1 = 0.99
max_abs_error = 0.1
""",
}


def main() -> None:
    """Drive, print and write."""
    given = _arguments()
    if given.device == "cuda" and cuda.gpu() is None:
        print("No NVIDIA GPU here: nothing is measured.")
        return
    home = given.home.absolute()
    os.environ |= {"ENGINEGATE_HOME": str(home)}
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[1]))
    report = Report(given.out / f"gpu_pipeline_{given.network}.json", limit_s=given.limit_s)
    try:
        _Drive(given, home, report).run()
    finally:
        _show(report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--home", type=Path, help="the workspace; kept from run to run")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--network", default="resnet50", choices=["resnet50", "encoder", "tiny"])
    parser.add_argument("--candidates", help='JSON, e.g. {"tensorrt": ["fp16"]}')
    parser.add_argument("--again", help="candidates of the second version; none: the same")
    parser.add_argument("--rows", type=int, default=8, help="of a request")
    parser.add_argument("--slo-ms", type=float, default=50.0)
    parser.add_argument("--search-s", type=float, default=30.0, help="of each candidate")
    parser.add_argument("--build-s", type=float, default=150.0, help="limit of one build")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--shared-memory", default="cuda", choices=["none", "system", "cuda"])
    parser.add_argument("--swap-rate", type=float, default=50.0, help="requests/s while promoting")
    parser.add_argument("--limit-s", type=float, default=570.0, help="of the whole drive")
    parser.add_argument("--until", default="watch", help="the last step, e.g. qualify")
    given = parser.parse_args()
    given.home = given.home or Path(tempfile.mkdtemp(prefix="enginegate-drive-"))
    if given.device == "cpu":
        given.network = "tiny" if given.network == "resnet50" else given.network
        given.shared_memory = "system" if given.shared_memory == "cuda" else given.shared_memory
    return given


class _EndedError(Exception):
    """The drive is over, as asked or because a step failed."""


@dataclass
class _Drive:
    given: argparse.Namespace
    home: Path
    report: Report

    def __post_init__(self) -> None:
        self.policy = self.home / "policies" / "drive.toml"
        self.model: nn.Module | None = None
        self.task = ""

    def run(self) -> None:
        """Step after step."""
        with suppress(_EndedError):
            self._step("train 1", lambda row: self._train(row, seed=1))
            self._step("register 1", self._register)
            self._command("policy check", "policy", "check", str(self.policy))
            first = self._command("qualify 1", "qualify", str(self.policy))
            self._command("explain 1", "explain", self._digest(first))
            self._approve("approve 1", first)
            with self._serving() as address:
                self._command("promote 1", "promote", str(self.policy), self._digest(first))
                self._step("call 1", lambda row: self._call(row, address))
                self._step("train 2", lambda row: self._train(row, seed=2))
                self._step("register 2", self._register)
                if self.given.again:
                    self.policy.write_text(self._policy(self.task, self.given.again))
                second = self._command(
                    "qualify 2", "qualify", str(self.policy), "--model", f"models:/{_NAME}/2"
                )
                self._approve("approve 2", second)
                self._under_load(
                    "promote 2", address, "promote", str(self.policy), self._digest(second)
                )
                self._step("call 2", lambda row: self._call(row, address))
                self._under_load("rollback", address, "rollback", str(self.policy))
                self._step("call 3", lambda row: self._call(row, address))
                self._command("verify", "verify", str(self.policy))
                self._command("status", "status", str(self.policy))
                # At a fraction of the promised rate batches are small and clocks low, so that a
                # promise may be found broken: here it counts that watch comes to a conclusion.
                self._under_load(
                    "watch",
                    address,
                    *("watch", str(self.policy), "--once"),
                    accepted=(ExitCode.OK, ExitCode.GATES_FAILED),
                )

    @property
    def _named(self) -> tuple[str, str]:
        return ("--policy", str(self.policy))

    def _step(self, name: str, measure: Any) -> dict[str, Any]:
        self.report.part({"step": name}, measure)
        row = self.report.rows[-1]
        if "error" in row or name.split(maxsplit=1)[0] == self.given.until:
            raise _EndedError(name)
        return row

    def _command(self, name: str, *arguments: str) -> str:
        """Run a command of the program; what it printed."""
        printed: list[str] = []

        def measure(row: dict[str, Any]) -> None:
            row["command"] = "enginegate " + " ".join(arguments)
            told, code = self._run(arguments, row)
            printed.append(told)
            if code:
                raise RuntimeError(f"exit code {code}: {told[-1500:]}")

        self._step(name, measure)
        return printed[0]

    def _run(self, arguments: tuple[str, ...], row: dict[str, Any]) -> tuple[str, int]:
        left_s = max(10.0, self.report.left_s)
        log = self.home / "commands.log"
        with subprocess.Popen(  # noqa: S603 - the program itself
            [*_program(), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as running:
            timer = threading.Timer(left_s, os.killpg, (running.pid, signal.SIGTERM))
            timer.start()
            try:
                told = "".join(self._echoed(running))
            finally:
                timer.cancel()
        with log.open("a") as file:
            file.write(f"$ enginegate {' '.join(arguments)}\n{told}\n")
        row |= {"exit": running.returncode, "detail": told.splitlines()[-_TAIL:]}
        return told, running.returncode

    @staticmethod
    def _echoed(running: subprocess.Popen[str]) -> Iterator[str]:
        for line in running.stdout or ():
            print(f"    {line.rstrip()}", flush=True)
            yield line

    @staticmethod
    def _digest(printed: str) -> str:
        found = re.search(r"enginegate approve ([0-9a-f]{8,64})", printed)
        if found is None:
            raise RuntimeError(f"qualify named no scorecard to approve: {printed[-800:]}")
        return found.group(1)

    def _approve(self, name: str, printed: str) -> None:
        digest = self._digest(printed)
        reason = ("--reason", "seen on the bench, all gates passed", "--approver", "benchmark")
        self._command(name, "approve", digest, *reason, *self._named)

    @contextmanager
    def _serving(self) -> Iterator[dict[str, str]]:
        """``enginegate serve`` in the background; where it listens."""
        state = self.home / "live" / ".enginegate-server.json"
        log = (self.home / "serve.log").open("w")
        command = [*_program(), "serve", str(self.policy)]
        address: dict[str, str] = {}
        with subprocess.Popen(  # noqa: S603 - the program itself
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as running:
            try:

                def wait(row: dict[str, Any]) -> None:
                    ends = time.monotonic() + _PATIENCE_S
                    while not state.is_file():
                        if running.poll() is not None or time.monotonic() > ends:
                            raise RuntimeError((self.home / "serve.log").read_text()[-1500:])
                        time.sleep(0.1)
                    address.update(json.loads(state.read_text()))
                    row["listens"] = dict(address)

                self._step("serve", wait)
                yield address
            finally:
                running.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(timeout=30)
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
                log.close()

    def _call(self, row: dict[str, Any], address: dict[str, str]) -> None:
        """One request as any client of Triton sends it."""
        data = self._as_served(address, 1)
        words = {word: name for name, word in _DATATYPES.items()}
        inputs = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": words[str(array.dtype)],
                "data": array.reshape(-1).tolist(),
            }
            for name, array in data.inputs.items()
        ]
        url = f"http://{address['http']}/v2/models/{_NAME}/infer"
        body = json.dumps({"inputs": inputs}).encode()
        with urllib.request.urlopen(url, data=body, timeout=30) as reply:
            told = json.loads(reply.read())
        row["version"] = told["model_version"]
        answer = np.asarray(told["outputs"][0]["data"])
        row["answers"] = int(answer.argmax())
        row["label"] = None if data.labels is None else int(data.labels[0])
        with urllib.request.urlopen(
            f"http://{address['http']}/v2/models/{_NAME}/config", timeout=30
        ) as reply:
            config = json.loads(reply.read())
        row["served_by"] = config.get("backend") or config.get("platform")

    def _as_served(self, address: dict[str, str], count: int) -> DataSet:
        """Samples in the types that the live model takes: a plan of TensorRT 8 takes INT32."""
        data = read_data(self.home / "evaluation.npz").head(count)
        url = f"http://{address['http']}/v2/models/{_NAME}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            served = {each["name"]: each["datatype"] for each in json.loads(reply.read())["inputs"]}
        inputs = {
            name: array.astype(_DATATYPES[served[name]]) for name, array in data.inputs.items()
        }
        return replace(data, inputs=inputs)

    def _under_load(
        self,
        name: str,
        address: dict[str, str],
        *arguments: str,
        accepted: tuple[int, ...] = (ExitCode.OK,),
    ) -> None:
        """A command while requests go on; not one may fail."""
        data = self._as_served(address, 64)
        traffic = Traffic.from_data(_NAME, data, timeout_s=_PATIENCE_S)

        def measure(row: dict[str, Any]) -> None:
            row["command"] = "enginegate " + " ".join(arguments)
            rate = self.given.swap_rate
            with BackgroundLoad(address["grpc"], traffic, rate_per_s=rate) as load:
                time.sleep(_SETTLE_S)
                told, code = self._run(arguments, row)
                time.sleep(_SETTLE_S)
            found = load.report()
            row |= {"sent": found.sent, "failed": found.failed, "versions": found.versions}
            row["p99_ms"] = round(1e3 * nearest_rank(load.result.latency_s), 2)
            if code not in accepted or found.failed:
                raise RuntimeError(
                    f"exit code {code}, {found.failed} failed requests: {told[-1500:]}"
                )

        self._step(name, measure)

    def _train(self, row: dict[str, Any], *, seed: int) -> None:
        made = _MAKERS[self.given.network](self.given, seed, row)
        self.model, self.task = made.network, made.task
        self.policy.parent.mkdir(parents=True, exist_ok=True)
        if seed == 1:
            write_data(made.evaluation, self.home / "evaluation.npz")
            write_data(made.calibration, self.home / "calibration.npz")
            self.policy.write_text(self._policy(made.task, self.given.candidates))

    def _policy(self, task: str, wanted: str | None) -> str:
        given, gpu = self.given, self.given.device == "cuda"
        candidates = json.loads(wanted) if wanted else _CANDIDATES[given.device]
        lines = "\n".join(f"{kind} = {json.dumps(value)}" for kind, value in candidates.items())
        return _POLICY.format(
            name=_NAME,
            task=task,
            home=self.home,
            candidates=lines,
            gates=_GATES[task],
            largest=128 if gpu else 8,
            buckets=[1, 8, 32, 128] if gpu else [1, 8],
            build_s=given.build_s,
            slo_ms=given.slo_ms,
            rows=given.rows,
            shared_memory=given.shared_memory,
            search_s=given.search_s,
            least=20 if gpu else 5,
            most=20_000 if gpu else 200,
        )

    def _register(self, row: dict[str, Any]) -> None:
        """As any training job registers: a program that opens without pickle."""
        if self.model is None:
            raise RuntimeError("nothing was trained")
        workspace = Workspace(self.home)
        tracker = Tracker(workspace.tracking_uri, workspace.artifacts)
        data = read_data(self.home / "evaluation.npz").head(2)
        example = tuple(torch.from_numpy(array) for array in data.inputs.values())
        with torch.no_grad():
            answer = self.model(*example).numpy()
        experiment = tracker.connection.experiment("training/drive")
        with tempfile.TemporaryDirectory() as folder:
            mlflow.pytorch.save_model(
                self.model,
                Path(folder, "model"),
                serialization_format="pt2",
                input_example=example,
                signature=ModelSignature(
                    inputs=Schema([_spec(name, array) for name, array in data.inputs.items()]),
                    outputs=Schema([_spec("output", answer)]),
                ),
                pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
            )
            with tracker.connection.run(experiment, "train", {}) as run:
                model = tracker.client.create_logged_model(
                    experiment, name=_NAME, source_run_id=run
                )
                tracker.client.log_model_artifacts(model.model_id, str(Path(folder, "model")))
                tracker.client.finalize_logged_model(model.model_id, "READY")
            row["version"] = tracker.register(_NAME, model.model_id, run_id=run, tags={})


def _program() -> list[str]:
    beside = Path(sys.executable).with_name("enginegate")
    return [sys.executable, str(beside)] if beside.is_file() else ["enginegate"]


def _spec(name: str, array: Any) -> TensorSpec:
    return TensorSpec(array.dtype, (-1, *array.shape[1:]), name)


@dataclass(frozen=True)
class _Made:
    network: nn.Module
    evaluation: DataSet
    calibration: DataSet
    task: str


class _Images(nn.Module):
    """A classifier whose argument has the name that clients send."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` (N, 3, H, W) in 0..1 -> logits."""
        logits: torch.Tensor = self.network(image)
        return logits


class _Small(nn.Module):
    """Two convolutions, for a machine without a GPU; (N, 3, H, W) -> logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 32, 3, stride=2)
        self.norm, self.head = nn.BatchNorm2d(32), nn.Linear(32 * 9, _CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``image`` in 0..1."""
        features = functional.relu(self.norm(self.second(functional.relu(self.first(image)))))
        logits: torch.Tensor = self.head(functional.adaptive_avg_pool2d(features, 3).flatten(1))
        return logits


def _resnet(given: argparse.Namespace, seed: int, row: dict[str, Any]) -> _Made:
    from torchvision.models import resnet50  # noqa: PLC0415 - only here, and slow

    torch.manual_seed(seed)
    return _trained(_Images(resnet50(num_classes=_CLASSES)), 224, given, row)


def _tiny(given: argparse.Namespace, seed: int, row: dict[str, Any]) -> _Made:
    torch.manual_seed(seed)
    return _trained(_Small(), 32, given, row)


def _trained(
    network: nn.Module, size: int, given: argparse.Namespace, row: dict[str, Any]
) -> _Made:
    training, evaluation, calibration = _digits()
    images, labels = training.inputs[_IMAGE], training.labels
    assert labels is not None  # noqa: S101 - digits have labels
    on = given.device
    x = torch.from_numpy(images).to(on)
    y = torch.from_numpy(labels).to(on)
    network = network.to(on, memory_format=torch.channels_last).train()
    batch, steps = 64, len(images) // 64
    optimiser = torch.optim.AdamW(network.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, 2e-3, total_steps=given.epochs * steps
    )
    for _ in range(given.epochs):
        order = torch.randperm(len(images), device=on)[: steps * batch]
        for rows in order.split(batch):
            shift = tuple(int(s) for s in torch.randint(-1, 2, (2,)))
            moved = torch.roll(x[rows], shift, (2, 3))
            optimiser.zero_grad()
            with torch.autocast(on, torch.bfloat16, enabled=on == "cuda"):
                loss = functional.cross_entropy(
                    network(_resized(moved, size)), y[rows], label_smoothing=0.05
                )
            loss.backward()
            optimiser.step()
            schedule.step()
    network = network.eval()
    row["loss"] = round(float(loss.detach()), 4)
    evaluation = _enlarged(evaluation, size)
    right, shown = 0, torch.from_numpy(evaluation.inputs[_IMAGE])
    with torch.no_grad():
        for at in range(0, len(shown), 100):
            guessed = network(shown[at : at + 100].to(on)).argmax(1).cpu().numpy()
            right += int((guessed == evaluation.labels[at : at + 100]).sum())
    row["accuracy"] = right / len(shown)
    network = network.to("cpu", memory_format=torch.contiguous_format)
    calibration = _enlarged(calibration, size)
    return _Made(network, evaluation, calibration, "classification")


def _digits() -> list[DataSet]:
    """Training, evaluation and calibration: scikit-learn's scans, no image in two of them."""
    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    images, labels = (raw.images / 16.0).astype(np.float32)[:, None], raw.target.astype(np.int64)
    ends = np.cumsum((_TRAINING, _EVALUATION, _CALIBRATION))
    cut = np.split(order, ends)[:3]
    return [
        DataSet(origin, {_IMAGE: images[rows]}, labels[rows], np.char.mod("digit-%d", rows), {})
        for origin, rows in zip(("training", "evaluation", "calibration"), cut, strict=True)
    ]


def _resized(images: torch.Tensor, size: int) -> torch.Tensor:
    wide = functional.interpolate(images, (size, size), mode="bilinear", align_corners=False)
    return wide.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


def _enlarged(data: DataSet, size: int) -> DataSet:
    small = torch.from_numpy(data.inputs["image"])
    images = _resized(small, size).contiguous().numpy()
    return DataSet(data.origin, {_IMAGE: images}, data.labels, data.ids, {})


def _encoder(given: argparse.Namespace, seed: int, row: dict[str, Any]) -> _Made:
    del row
    torch.manual_seed(seed)
    small = given.device == "cpu"
    network = Encoder(layers=1, hidden=32, heads=2) if small else Encoder()
    random, length = np.random.default_rng(0), 16 if small else 128

    def texts(origin: str, count: int) -> DataSet:
        ids = random.integers(1000, 30000, (count, length))
        inputs = dict(zip(_TOKENS, (ids, np.ones_like(ids)), strict=True))
        names = np.array([f"{origin}-{number}" for number in range(count)])
        return DataSet(origin, inputs, None, names, {})

    return _Made(network.eval(), texts("evaluation", 500), texts("calibration", 64), "embedding")


_MAKERS = {"resnet50": _resnet, "tiny": _tiny, "encoder": _encoder}


def _show(report: Report) -> None:
    """Print the table: one line a step."""
    columns = ["step", "seconds", "exit", "what was seen"]
    keys = ("accuracy", "version", "served_by", "answers", "label", "sent", "failed", "p99_ms")
    lines = []
    for row in report.rows:
        seen = ", ".join(f"{key} {row[key]}" for key in keys if row.get(key) is not None)
        problem = row.get("error", "").splitlines()
        lines.append(
            [row["step"], row.get("took_s"), row.get("exit"), problem[0] if problem else seen]
        )
    table(columns, lines)


if __name__ == "__main__":
    main()
