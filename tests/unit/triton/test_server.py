"""How often a server is started whose port somebody else took meanwhile."""

import pytest

from enginegate.errors import InputError, ServerError
from enginegate.triton.install import TritonInstall
from enginegate.triton.server import Ports, connect, start


@pytest.mark.parametrize(
    ("said", "starts"),
    [
        pytest.param("Unavailable - Socket '127.0.0.1:1' already in use", 3, id="stolen"),
        pytest.param("failed to load 'absent'", 1, id="another-reason"),
    ],
)
def test_port_that_was_stolen_is_tried_again(tmp_path, said, starts):
    """Also when it is free again by the time we look: the log says that it was taken."""
    binary, began = tmp_path / "tritonserver", tmp_path / "began"
    binary.write_text(f'#!/bin/sh\necho >> {began}\necho "{said}"\nexit 1\n')
    binary.chmod(0o700)
    install = TritonInstall(binary, None, (), "a test")

    with (
        pytest.raises(ServerError, match="ended while starting, with status 1"),
        start(install, tmp_path, folder=tmp_path),
    ):
        pass

    assert began.read_text() == "\n" * starts


@pytest.mark.parametrize("address", ["host", ":8001", "host:", "host:99999", "http://host:8001"])
def test_malformed_address_is_refused(address):
    """gRPC would take the port 99999 for 34463, where somebody else may answer."""
    with pytest.raises(InputError, match="is no address of a Triton: write HOST:PORT"):
        connect(address)


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        (Ports(http=99_999), "99999 is no port"),
        (Ports(grpc=-1), "-1 is no port"),
        (Ports(http=8000, grpc=8000), "each need a port of their own"),
    ],
)
def test_malformed_port_is_refused(ports, said):
    """Before a server is started, and by the number that was asked for."""
    with pytest.raises(InputError, match=said):
        ports.chosen()
