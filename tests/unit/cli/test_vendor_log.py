"""What other libraries write to the error output while a command runs."""

import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app

_DIGITS = Path(__file__).parents[3] / "policies" / "digits.toml"

# ONNX Runtime is asked for what it warns and complains about from C++, as Python does by warnings
# and logging, and a child process by its own output.
_NOISE = """
import logging, os, subprocess, sys, warnings
from pathlib import Path
import numpy as np, onnx, onnxruntime as ort
from onnx import TensorProto, helper
from enginegate.cli.terminal import err, log_to_terminal
from enginegate.cli.vendor_log import vendors_logged
from enginegate.workspace import Workspace

def noise():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [5])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    ort.set_default_logger_severity(0)
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    warnings.warn("an exporter warns", UserWarning)
    logging.getLogger("urllib3.util.retry").warning("Retrying: %s", "/?token=t0ken")
    subprocess.run([sys.executable, "-c", "import sys; print('a child', file=sys.stderr)"])

log_to_terminal()
with vendors_logged(Workspace(Path(sys.argv[1]))) as log:
    logging.getLogger("enginegate.test").info("progress of ours")
    noise()
    err.print("a message of ours")
print(log.used)
raise RuntimeError("a fault of ours")
"""


@pytest.mark.parametrize("there", [True, False], ids=["workspace", "no workspace"])
def test_the_terminal_shows_our_own_lines_only(tmp_path, there):
    """The rest is in the file; no workspace is made for it, and a crash is seen again."""
    workspace = tmp_path / "workspace"
    if there:
        workspace.mkdir()

    command = [sys.executable, "-c", textwrap.dedent(_NOISE), str(workspace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    said = done.stderr.partition("Traceback")
    assert said[0].splitlines()[0].endswith(" progress of ours")
    assert said[0].splitlines()[1:] == ["a message of ours"]
    assert "RuntimeError: a fault of ours" in said[2]
    assert done.stdout == "True\n"
    if not there:
        assert not workspace.exists()
        return
    path = workspace / "logs" / "vendors.log"
    kept = path.read_text()
    assert all(line in kept for line in ("onnxruntime", "an exporter warns", "a child"))
    assert "Retrying: /?token=***" in kept
    assert "ours" not in kept.replace("`enginegate` ran; its own", "")
    assert path.stat().st_mode & 0o077 == 0


def test_every_command_runs_so(monkeypatch):
    """Also one of a group."""
    said = []

    @contextmanager
    def vendors_logged(_):
        said.append("begins")
        yield
        said.append("ends")

    monkeypatch.setattr("enginegate.cli.app.vendors_logged", vendors_logged)
    monkeypatch.setattr("enginegate.cli.app.print_check", lambda *_: said.append("runs"))

    assert CliRunner().invoke(app, ["policy", "check", str(_DIGITS)]).exit_code == 0
    assert said == ["begins", "runs", "ends"]


_TOLD = """
import logging, sys
from pathlib import Path
from enginegate.cli.terminal import err, log_to_terminal, out
from enginegate.cli.vendor_log import vendors_logged
from enginegate.workspace import Workspace

log_to_terminal()
with vendors_logged(Workspace(Path(sys.argv[1]))):
    logging.getLogger("enginegate.test").info("progress of ours")
    err.print("a message of ours")
    opened = open(Path(sys.argv[1]).parent / "opened", "w")
    print("a word for whoever reads")
err.print("the last message of ours")
opened.close()
assert not Path(opened.name).read_text()
sys.exit(6)
"""


@pytest.mark.parametrize("given", ["2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_where_nothing_can_be_told_the_exit_code_still_says_it(tmp_path, given):
    """A closed output, as services have it, is not given to the next file that is opened."""
    run = f'"$0" -c "$1" "$2" {given}'
    command = ["sh", "-c", run, sys.executable, _TOLD, str(tmp_path / "workspace")]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 6, done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_the_command_is_loaded_is_no_traceback(tmp_path):
    """Loading takes a second, and an impatient hand is quicker."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    run = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import enginegate.cli as c; c.main()"

    done = subprocess.run(
        [sys.executable, "-c", run], capture_output=True, text=True, check=False, timeout=60
    )

    assert (done.returncode, done.stderr) == (130, "\nInterrupted. Nothing was begun.\n")
