"""Ctrl-C on the terminal: what is running is taken down, and then it ends."""

import signal
import subprocess
import sys

# A library that swallows Ctrl-C and waits for a server that is gone, as Prefect's client does.
_STUBBORN = """
import time
from enginegate.cli import terminal

terminal._UNWIND_S = 0.2
with terminal.interruptible(terminal.out):
    while True:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""


def test_ctrl_c_ends_what_does_not_want_to_end():
    """With the exit code of an interruption, and a word about what is kept."""
    command = [sys.executable, "-c", _STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)

        said, _ = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "What was finished is kept" in said
