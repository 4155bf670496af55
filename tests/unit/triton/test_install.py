import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from enginegate.errors import ServerError
from enginegate.triton.install import find_triton

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("pytriton") is None, reason="nvidia-pytriton is not installed"
)


@pytest.fixture
def empty_path(monkeypatch, tmp_path):
    """No tritonserver on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_the_one_on_path_comes_first(monkeypatch, tmp_path):
    """An executable tritonserver on PATH is used as it is, with this Python's folder in front."""
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin")

    install = find_triton(tmp_path / "cache")

    assert install.binary == binary
    assert install.backends is None
    assert install.environment() == {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{tmp_path}{os.pathsep}/usr/bin"
    }
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("empty_path")
def test_none_at_all(monkeypatch, tmp_path):
    """Without a server every way to get one is named, with the command."""
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()

    with pytest.raises(ServerError, match=r"(?s)no Triton server.*pip install --no-deps nvidia-py"):
        find_triton(tmp_path)


@needs_wheel
@pytest.mark.usefixtures("empty_path")
def test_the_wheel_is_put_together_once(tmp_path):
    """The wheel's backend and the stub of this Python make a folder that is reused."""
    first = find_triton(tmp_path / "cache")
    written = (first.backends / "python" / "triton_python_backend_stub").stat()

    again = find_triton(tmp_path / "cache")

    assert again == first
    assert (again.backends / "python" / "triton_python_backend_stub").stat() == written
    assert written.st_mode & 0o111
    assert os.access(first.binary, os.X_OK)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.backends.name]
    assert str(first.libraries[-1]) in first.environment()["LD_LIBRARY_PATH"]


@needs_wheel
@pytest.mark.usefixtures("empty_path")
def test_no_stub_for_this_python(monkeypatch, tmp_path):
    """A Python that the wheel has no stub for is named, with those it has."""
    monkeypatch.setattr("enginegate.triton.install._python", lambda: "3.99")

    with pytest.raises(ServerError, match=r"(?s)no Python-backend stub for Python 3\.99.*3\.11"):
        find_triton(tmp_path)


@needs_wheel
@pytest.mark.usefixtures("empty_path")
def test_no_shared_python_library(monkeypatch, tmp_path):
    """A Python without its shared library is told how to get it, and nothing is left."""
    monkeypatch.setattr("sysconfig.get_config_var", lambda _name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: None)

    with pytest.raises(ServerError, match=r"(?s)libpython3\.\d+\.so\.1\.0.*apt-get install"):
        find_triton(tmp_path / "cache")
