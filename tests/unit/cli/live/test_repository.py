"""Which server of a policy `serve` starts."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from enginegate.cli.live import repository
from enginegate.errors import ServerError
from enginegate.policy import read_policy
from enginegate.triton.server import Ports
from enginegate.workspace import Workspace

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("endpoint", "port", "server_name"),
    [("127.0.0.1:8011", 8011, "b"), ("127.0.0.1:8011", 8012, ""), ("elsewhere:8011", 8011, "")],
)
def test_policy_port_selects_the_fleet_server(tmp_path, monkeypatch, endpoint, port, server_name):
    """Any other port is the first server's, of which there is one."""
    path = Path(shutil.copy(ROOT / "policies" / "digits.toml", tmp_path))
    path.write_text(f'{path.read_text()}\n[[target.fleet]]\nname = "b"\nendpoint = "{endpoint}"\n')
    started = []

    @contextmanager
    def live_server(*_, server_name):
        started.append(server_name)
        raise ServerError("far enough")
        yield

    monkeypatch.setattr(repository, "live_server", live_server)
    with pytest.raises(ServerError, match="far enough"):
        repository.serve_live(read_policy(path), Workspace(tmp_path), Console(), Ports(grpc=port))

    assert started == [server_name]
