"""The whole pipeline on this GPU, by its commands, with every engine kind that is here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from enginegate.engines import availability, cuda

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_pipeline.py"
# Minutes: qualifying two versions is most of it, and Prefect's first start alone takes half of one.
LIMIT_S = 540
STEPS = (
    *("qualify 1", "approve 1", "serve", "promote 1", "call 1"),
    *("qualify 2", "approve 2", "promote 2", "call 2", "rollback", "call 3", "verify", "watch"),
)


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """Rows of the drive by step; a small network, so that builds take seconds."""
    if cuda.gpu() is None:
        pytest.skip("no NVIDIA GPU with a driver here")
    kinds = {each.kind for each in availability() if each.can_build and each.can_run}
    candidates = {kind: ["fp32", "fp16"] for kind in sorted(kinds)}
    if not candidates:
        pytest.skip("no engine kind builds and runs here: enginegate doctor says what is missing")
    folder = tmp_path_factory.mktemp("drive")
    command = [sys.executable, str(SCRIPT), "--network", "tiny", "--search-s", "30", "--rows", "1"]
    command += ["--home", str(folder / "home"), "--out", str(folder), "--limit-s", str(LIMIT_S)]
    command += ["--candidates", json.dumps(candidates), "--epochs", "12"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = folder / "gpu_pipeline_tiny.json"
    assert found.is_file(), ended.stdout[-2000:] + ended.stderr[-2000:]
    return {row["step"]: row for row in json.loads(found.read_text())["rows"]}


@pytest.mark.parametrize("step", STEPS)
def test_step_succeeds(drive, step):
    """Each step of the drive was reached and ended well."""
    assert step in drive, f"the drive ended before, at {list(drive)[-1]}: {drive}"
    assert "error" not in drive[step]


@pytest.mark.parametrize("step", ["promote 2", "rollback"])
def test_no_request_fails_while_the_release_changes(drive, step):
    """Requests go on during a promotion and a rollback, and each of them is answered."""
    assert drive[step]["sent"] > 0
    assert drive[step]["failed"] == 0


def test_watch_comes_to_a_conclusion(drive):
    """The promise is found kept or broken, from requests that came meanwhile."""
    assert drive["watch"]["exit"] in {0, 3}
    assert drive["watch"]["failed"] == 0


def test_rollback_brings_back_the_first_release(drive):
    """The version that answers after the rollback is the one before the promotion."""
    assert drive["call 2"]["version"] != drive["call 1"]["version"]
    assert drive["call 3"]["version"] == drive["call 1"]["version"]
