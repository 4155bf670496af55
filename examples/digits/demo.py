"""The demo: two versions of a real model go through the whole path, and one comes back out.

Everything is real: training, ONNX, engines, Triton, MLflow, Prefect. What a person would answer is
answered by ``--approve``; with ``ask`` it is asked on the terminal.
"""

import json
import shutil
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.prompt import Prompt

from enginegate.data import read_data
from enginegate.decision import Decision, Release
from enginegate.errors import EnginegateError, ExitCode
from enginegate.evidence import Scorecard
from enginegate.policy import Policy, read_policy
from enginegate.report import print_approval, print_scorecard
from enginegate.triton.live import LiveServer, live_server
from enginegate.triton.steady import SteadyTraffic
from enginegate.workspace import Workspace, now
from examples.digits.register import prepare
from flows.promote import promote
from flows.qualify import qualify
from flows.rollback import rollback

Answer = Literal["yes", "no", "ask"]
POLICY = Path("policies/digits.toml")
_RATE_PER_S = 50.0
