"""deploy/compose.yaml: what it names is there, nothing is open to others, no secret is in it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"
# Of the compose specification: what a service here may have.
KEYS = {
    *("image", "build", "command", "restart", "environment", "secrets", "volumes", "depends_on"),
    *("healthcheck", "ports", "shm_size", "deploy", "entrypoint"),
}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_services_have_keys_of_the_specification_only(compose):
    for name, service in compose["services"].items():
        assert set(service) <= KEYS, name
        assert "image" in service


def test_docker_compose_reads_it():
    """Its own check needs the plugin, and no Docker engine."""
    docker = shutil.which("docker")
    plugin = docker and subprocess.run(
        [docker, "compose", "version"], capture_output=True, check=False
    )
    if not plugin or plugin.returncode:
        pytest.skip("docker compose is not installed")
    done = subprocess.run(
        [docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


def test_what_services_name_is_there(compose):
    services = compose["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"]), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            there = (DEPLOY / source).exists() if source.startswith(".") else True
            assert there, volume
            assert source.startswith(".") or source in compose["volumes"], volume


def test_ports_are_open_to_this_machine_only(compose):
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name}: {port}"


def test_secrets_are_files_that_git_ignores(compose):
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()

    assert "deploy/secrets/" in ignored
    for secret in compose["secrets"].values():
        assert secret["file"].startswith("secrets/")
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            secret = any(word in name for word in ("PASSWORD", "SECRET", "KEY"))
            assert not secret or str(value).startswith("/run/secrets/"), name


def test_workers_image_copies_what_the_wheel_is_made_of():
    """A folder that it forgot would be missing in the installed package."""
    text = (DEPLOY / "worker.Dockerfile").read_text()
    copied = {
        line.split()[1]
        for line in text.splitlines()
        if line.startswith("COPY ") and "/src/" in line
    }

    assert {"src", "flows", "tasks", "validation", "examples", "automations"} <= copied
    for folder in copied:
        assert (DEPLOY.parent / folder.split()[0]).exists()


def test_mlflow_answers_to_the_name_that_workers_use(compose):
    """It refuses names that it was not told, but for private addresses."""
    command = compose["services"]["mlflow"]["command"][-1]
    used = compose["services"]["worker"]["environment"]["MLFLOW_TRACKING_URI"]

    assert used.removeprefix("http://") in command.split("--allowed-hosts ")[1].split()[0].split(
        ","
    )
