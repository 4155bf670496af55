"""NVIDIA's Model Analyzer as a peer: installs it beside us, runs it, reads what it measured.

It runs on the server binary that we run on, through a script that sets that server's environment.
It restarts the server for each configuration and drives it with perf_analyzer. Its quick mode was
seen to spin without measuring, so it is stopped after a time; what it had measured then counts.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import venv
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from enginegate.triton.install import TritonInstall

VERSION = "1.58.0"
_CLIENT = "tritonclient==2.51.0"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
_STOP_S = 120.0
_SPINNING = 2000
_POLL_S = 2.0


@dataclass(frozen=True)
class Claim:
    """What it says is best: a configuration in a closed loop of so many clients."""

    instances: int
    max_batch_size: int
    clients: int
    throughput_per_s: float
    p99_ms: float


@dataclass(frozen=True)
class Outcome:
    """One run of it. ``stopped``: why it had to be; else empty."""

    mode: str
    measurements: int
    seconds: float
    stopped: str
    winner: Claim | None

    def json(self) -> dict[str, Any]:
        """For the results file."""
        return asdict(self)


@dataclass(frozen=True)
class Analyzer:
    """The programs it takes, made ready in a folder."""

    program: Path
    perf_analyzer: Path
    libraries: Path
    server: Path

    @classmethod
    def prepared(
        cls, folder: Path, install: TritonInstall, *, program: Path | None = None
    ) -> "Analyzer":
        """Install what is missing: its own virtual environment, and perf_analyzer's libraries."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(
            program=program or _installed(folder / "venv"),
            perf_analyzer=_perf_analyzer(folder),
            libraries=_libraries(folder / "lib", install),
            server=_server(folder / "tritonserver", install),
        )

    def run(
        self, repository: Path, folder: Path, *, mode: str, p99_ms: float, within_s: float
    ) -> Outcome:
        """Profile the only model of a repository.

        Args:
            repository: Triton model repository.
            folder: for everything it writes.
            mode: quick or brute.
            p99_ms: its constraint.
            within_s: it is stopped after that long.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "profile.yaml"
        config.write_text(yaml.safe_dump(self._config(repository, folder, mode, p99_ms)))
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.libraries),
            "PATH": f"{self.perf_analyzer.parent}{os.pathsep}{os.environ['PATH']}",
        }
        started = time.monotonic()
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own arguments
                [self.program, "profile", "-f", config],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
            stopped = _wait(process, folder / "log.txt", within_s)
        claims = _claims(folder)
        held = [claim for claim in claims if claim.p99_ms <= p99_ms]
        return Outcome(
            mode=mode,
            measurements=len(claims),
            seconds=time.monotonic() - started,
            stopped=stopped,
            winner=max(held, key=lambda claim: claim.throughput_per_s, default=None),
        )

    def _config(self, repository: Path, folder: Path, mode: str, p99_ms: float) -> dict[str, Any]:
        (model,) = [path.name for path in repository.iterdir() if path.is_dir()]
        return {
            "model_repository": str(repository),
            "checkpoint_directory": str(folder / "checkpoints"),
            "export_path": str(folder / "export"),
            "output_model_repository_path": str(folder / "repository"),
            "override_output_model_repository": True,
            "triton_launch_mode": "local",
            "triton_server_path": str(self.server),
            "triton_output_path": str(folder / "triton.log"),
            "client_protocol": "grpc",
            "triton_http_endpoint": "localhost:18000",
            "triton_grpc_endpoint": "localhost:18001",
            "triton_metrics_url": "http://localhost:18002/metrics",
            "triton_server_flags": {
                "http_port": 18000,
                "grpc_port": 18001,
                "metrics_port": 18002,
            },
            "perf_analyzer_path": str(self.perf_analyzer),
            "perf_analyzer_cpu_util": 1000,
            "run_config_search_mode": mode,
            "run_config_search_max_instance_count": 4,
            "run_config_search_max_model_batch_size": 32,
            "run_config_search_max_concurrency": 512,
            "skip_summary_reports": True,
            "skip_detailed_reports": True,
            "profile_models": {
                model: {
                    "cpu_only": True,
                    "objectives": ["perf_throughput"],
                    "constraints": {"perf_latency_p99": {"max": p99_ms}},
                }
            },
        }


def _wait(process: subprocess.Popen[bytes], log: Path, within_s: float) -> str:
    """Wait until it ends, spins or is out of time; then stop it. Returns why it was stopped."""
    deadline = time.monotonic() + within_s
    while process.poll() is None:
        spins = log.read_text(errors="replace").count("Skipping profile") > _SPINNING
        if spins or time.monotonic() > deadline:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            return "it found the same measurements again without end" if spins else "out of time"
        time.sleep(_POLL_S)
    return ""


def _claims(folder: Path) -> list[Claim]:
    """Every measurement in its latest checkpoint, which it also writes when it is stopped."""
    found = sorted((folder / "checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem))
    if not found:
        return []
    results = json.loads(found[-1].read_text())["ResultManager.results"]["_results"]
    return [
        _claim(run["_model_run_configs"][0]["_model_config_variant"]["model_config"], key, measured)
        for variants in results.values()
        for run, measurements in variants.values()
        for key, measured in measurements.items()
    ]


def _claim(config: Any, key: str, measured: Any) -> Claim:
    numbers = measured["_model_config_measurements"][0]["_non_gpu_data_from_tag"]
    clients = re.search(r"--concurrency-range=(\d+)", key)
    return Claim(
        instances=int(config.get("instanceGroup", [{"count": 1}])[0]["count"]),
        max_batch_size=int(config.get("maxBatchSize", 1)),
        clients=int(clients.group(1)) if clients else 1,
        throughput_per_s=float(numbers["perf_throughput"][1]["_value"]),
        p99_ms=float(numbers["perf_latency_p99"][1]["_value"]),
    )


def _installed(folder: Path) -> Path:
    program = folder / "bin" / "model-analyzer"
    if not program.is_file():
        venv.create(folder, with_pip=True)
        _pip(folder / "bin" / "python", "install", f"triton-model-analyzer=={VERSION}")
    return program


def _perf_analyzer(folder: Path) -> Path:
    named = os.environ.get("PERF_ANALYZER")
    if named:
        return Path(named)
    program = folder / "bin" / "perf_analyzer"
    if program.is_file():
        return program
    _pip(Path(sys.executable), "download", "--no-deps", "--dest", str(folder), _CLIENT)
    (wheel,) = folder.glob("tritonclient-*.whl")
    program.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("bin/perf_analyzer")]
        program.write_bytes(archive.read(name))
    program.chmod(0o755)
    return program


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "-q", *arguments], check=True)  # noqa: S603


def _libraries(folder: Path, install: TritonInstall) -> Path:
    """What perf_analyzer links to, under the names it looks for: the server's wheel has them."""
    folder.mkdir(exist_ok=True)
    for name, pattern in _LIBRARIES.items():
        for library in install.libraries:
            for found in library.glob(pattern):
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(found)
    return folder


def _server(script: Path, install: TritonInstall) -> Path:
    """A ``tritonserver`` that needs no environment: Model Analyzer starts it by its path alone."""
    exports = "\n".join(
        f"export {name}='{value}'" for name, value in sorted(install.environment().items())
    )
    backends = f"--backend-directory='{install.backends}'" if install.backends else ""
    script.write_text(f"#!/bin/sh\n{exports}\nexec '{install.binary}' {backends} \"$@\"\n")
    script.chmod(0o755)
    return script
