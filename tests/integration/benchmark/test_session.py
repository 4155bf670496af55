"""One candidate's benchmark on a real server: a death, a resumption, a model that never loads."""

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from enginegate.benchmark.session import BenchmarkPaths, BenchmarkSession, BenchmarkTarget
from enginegate.candidate import Candidate, Engine, FileDigest, PrecisionProof
from enginegate.data import DataSet
from enginegate.errors import ModelError, ServerError
from enginegate.evidence import Outcome
from enginegate.policy import parse_policy, read_policy
from enginegate.records import sha256_file
from enginegate.serving import ServingOptions
from tests.fakes.evidence import sha

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("stage")]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def rules():
    """One configuration at one rate, and a limit that no machine misses."""
    raw = read_policy(ROOT / "policies" / "digits.toml").model_dump()
    raw["slo"] |= {"p99_ms": 4000, "confidence": 0.9}
    raw["slo"] |= {"confirmations": 1, "confirm_requests": 240}
    raw["search"] |= {"queue_delays_us": [0], "instances": [1], "measurement_s": 1.0}
    raw["search"] |= {"min_rate_per_s": 200, "max_rate_per_s": 200}
    raw["load"]["rows"] = None
    return parse_policy(raw, "test")


@pytest.fixture
def session(rules, install, tmp_path):
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    data = DataSet("test", {"x": x}, None, np.arange(50).astype(np.str_), {})
    paths = BenchmarkPaths(tmp_path / "repository", tmp_path / "logs", tmp_path / "results")
    return BenchmarkSession(rules.benchmark_tables, install, paths, data, data.sha256)


def engine():
    """A manifest; what is served is a Python model that needs none."""
    return Engine(
        candidate=Candidate.parse("onnxruntime-fp32"),
        filename="model.onnx",
        file=FileDigest(sha256=sha("e"), size_bytes=1),
        onnx_sha256=sha("0"),
        converted_sha256=sha("1"),
        converter="none",
        calibration_sha256=None,
        builder="test",
        target="cpu",
        inputs=(),
        outputs=(),
        max_batch_size=8,
        build_s=0.0,
        proof=PrecisionProof(
            weighted_layers={}, quantised_layers=0, device="cpu", proven=True, detail=""
        ),
    )


def target(model):
    files = {name: sha256_file(path) for name, path in model.files.items()}
    return BenchmarkTarget(model, files, ServingOptions())


def server_of(repository):
    """The process id of the server on that repository; None when there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if command[0].endswith(b"tritonserver") and any(
                part.endswith(os.fsencode(repository)) for part in command
            ):
                return int(folder.name)
    return None


@pytest.mark.parametrize(
    ("number", "within_s"),
    [
        pytest.param(signal.SIGKILL, 30.0, id="dies"),
        pytest.param(signal.SIGSTOP, 60.0, id="stops", marks=pytest.mark.long),
    ],
)
def test_server_that_is_lost_is_replaced_and_the_measurement_repeated(
    session, scale_model, number, within_s
):
    """The search goes on as if nothing had been; each valid measurement is kept for the next.

    One that only stopped is given up in seconds, though it still accepts what is sent to it. What
    is only shown and cannot be found out changes nothing about what was.
    """
    said, killers, at_s = [], [], []

    def kill_once(_):
        if not killers:
            pid = server_of(session.paths.repository)
            at_s.append(time.monotonic())
            killers.append(threading.Timer(0.3, os.kill, (pid, number)))
            killers[0].start()

    def say(text):
        said.append(text)
        at_s.append(time.monotonic())

    watched = replace(session, warn=say)

    def broken(_):
        raise ModelError("its graph cannot be read")

    found = watched.benchmark(
        engine(),
        target(scale_model("staged")),
        roofline=broken,
        progress=kill_once,
    )

    killers[0].join()
    valid = {m.load.digest for m in found.measurements if not m.invalid}
    assert "starting another (restart 1 of 3)" in said[0]
    assert at_s[1] - at_s[0] < within_s
    assert said[-1] == "left out of what is shown: its graph cannot be read"
    assert found.roofline is None
    assert found.outcome is Outcome.PASSED
    assert found.p99_at_slo.samples >= 240
    assert found.cold_start_s > 0
    assert len(list(session.paths.cache.folder.iterdir())) == len(valid)
    assert not list(session.paths.repository.iterdir())


def test_model_that_never_becomes_ready_is_an_error_with_its_reason(session, scale_model, tmp_path):
    """It says what Triton said, starts no second server, and leaves nothing behind."""
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('weights are missing')\n")
    model = replace(scale_model("broken"), files={"model.py": broken})
    said = []
    watched = replace(session, warn=said.append)

    with pytest.raises(ServerError, match="weights are missing"):
        watched.benchmark(engine(), target(model))

    assert said == []
    assert server_of(session.paths.repository) is None
