"""pip installs the wheel with its extra, on each Python that it names, and it qualifies a model."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

# Hundreds of megabytes are fetched; the demo's test has a wheel without them.
pytestmark = [pytest.mark.triton, pytest.mark.long]

ROOT = Path(__file__).parents[3]
_SHORT = """
confirmations = 1
confirm_requests = 300

[search]
max_batch_sizes = [8]
queue_delays_us = [0]
instances = [1]
min_rate_per_s = 200
max_rate_per_s = 200
measurement_s = 1
budget_s = 60
"""


def interpreter(version):
    """A Python of that version on this machine."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *sorted(versions.glob(f"{version}.*/bin/python"))]
    for each in filter(None, found):
        asked = subprocess.run([each, "--version"], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and f" {version}." in asked.stdout:
            return str(each)
    pytest.skip(f"there is no Python {version} on this machine")


def pip(environment, *arguments):
    """What pip did in an environment."""
    command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)


def write_model(folder):
    """A linear classifier of four features, and samples of which most are labelled as it says."""
    random = np.random.default_rng(0)
    weight = random.normal(size=(4, 3)).astype(np.float32)
    x = onnx.helper.make_tensor_value_info("features", onnx.TensorProto.FLOAT, ["batch", 4])
    y = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 3])
    node = onnx.helper.make_node("MatMul", ["features", "weight"], ["logits"])
    graph = onnx.helper.make_graph(
        [node], "linear", [x], [y], [onnx.numpy_helper.from_array(weight, "weight")]
    )
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), folder / "m.onnx")
    features = random.normal(size=(2000, 4)).astype(np.float32)
    labels = (features @ weight + random.normal(size=(2000, 3))).argmax(axis=1)
    np.savez(folder / "data.npz", **{"input.features": features, "label": labels})


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_wheel_from_pip_qualifies_a_model(version, wheel, tmp_path):
    """Nothing but `enginegate[cpu]` and the server that ADR 2 names; no checkout, no PyTorch."""
    environment, folder = tmp_path / "environment", tmp_path / "project"
    folder.mkdir()
    subprocess.run([interpreter(version), "-m", "venv", environment], check=True, timeout=120)
    reached = pip(environment, "--no-deps", "--dry-run", "--ignore-installed", "typing-extensions")
    if reached.returncode:
        pytest.skip(f"pip has no packages here: {reached.stderr.strip().splitlines()[-1]}")
    installed = pip(environment, f"{wheel}[cpu]")
    assert installed.returncode == 0, installed.stderr
    server = pip(environment, "--no-deps", "-r", ROOT / "requirements" / "tritonserver.txt")
    assert server.returncode == 0, server.stderr
    write_model(folder)

    def enginegate(*arguments):
        done = subprocess.run(
            [environment / "bin" / "enginegate", *arguments],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )
        return done.returncode, done.stdout

    slo = ("--p99-ms", "2000", "--min-throughput", "50")
    code, printed = enginegate("init", "m.onnx", "--data", "data.npz", "--name", "linear", *slo)
    assert code == 0, printed
    policy = folder / "policies" / "linear.toml"
    policy.write_text(policy.read_text() + _SHORT)
    code, printed = enginegate("qualify", "policies/linear.toml")
    assert code == 0, printed
    digest = re.findall(r"Next: enginegate approve (\w+)", printed)[-1]
    code, printed = enginegate("approve", digest, "--reason", "seen and judged")
    assert code == 0, printed
    code, printed = enginegate("demo")
    assert code == 5, printed
    assert "lacks torch. Install: pip install 'enginegate[torch]'" in " ".join(printed.split())
