"""How often a server is started whose port somebody else took meanwhile."""

import pytest

from enginegate.errors import ServerError
from enginegate.triton.install import TritonInstall
from enginegate.triton.server import start


@pytest.mark.parametrize(
    ("said", "starts"),
    [
        pytest.param("Unavailable - Socket '127.0.0.1:1' already in use", 3, id="stolen"),
        pytest.param("failed to load 'absent'", 1, id="another-reason"),
    ],
)
def test_a_port_that_was_stolen_is_tried_again(tmp_path, said, starts):
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
