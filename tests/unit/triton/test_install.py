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


def test_server_on_path_comes_first(monkeypatch, tmp_path):
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


@pytest.fixture
def on_path(monkeypatch, tmp_path):
    """Put a server with two backends into ``triton``, and what starts it first on PATH."""
    server = tmp_path / "triton" / "bin" / "tritonserver"
    _executable(server, "\x7fELF")
    for name in ("onnxruntime", "python"):
        library = tmp_path / "triton" / "backends" / name / f"libtriton_{name}.so"
        library.parent.mkdir(parents=True)
        library.touch()
    (tmp_path / "triton" / "backends" / "empty").mkdir()
    folder = tmp_path / "first" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PATH", str(folder))
    return folder / "tritonserver"


def _executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_link_leads_to_the_backends(on_path, tmp_path):
    """The server is found by its link, its backends beside what the link leads to."""
    on_path.symlink_to("../../triton/bin/tritonserver")

    found = find_triton(tmp_path / "cache")

    assert (found.binary, found.backends) == (on_path, tmp_path / "triton" / "backends")
    assert found.backend_names() == ("onnxruntime", "python")


@pytest.mark.parametrize(
    "script",
    [
        'exec /usr/bin/tritonserver --backend-directory={backends} "$@"',
        'exec /usr/bin/tritonserver \\\n  --backend-directory "{backends}" "$@"',
        (
            'HERE=$(cd "$(dirname "$0")" && pwd)\n'
            'exec tritonserver "$@" --backend-directory="$HERE/../../triton/backends"'
        ),
        'exec tritonserver --backend-directory=`dirname $0`/../../triton/backends "$@"',
        'exec tritonserver --backend-directory="${{0%/*}}/../../triton/backends" "$@"',
        (
            'export ROOT="${{TRITON_ROOT:-{root}}}"  # where it is\n'
            'exec "$ROOT/bin/tritonserver" --backend-directory=$ROOT/backends "$@"'
        ),
        '# --backend-directory=/elsewhere\nexec {root}/bin/tritonserver "$@"',
    ],
    ids=["plain", "two-words", "own-folder", "backticks", "suffix", "variable", "none-said"],
)
def test_script_says_where_the_backends_are(on_path, tmp_path, script):
    """Scripts that start the server with a folder of backends are read, not run."""
    root = tmp_path / "triton"
    said = script.format(backends=root / "backends", root=root)
    _executable(on_path, f"#!/bin/sh\n{said}\n")

    found = find_triton(tmp_path / "cache")

    assert found.binary == on_path
    assert found.backends.resolve() == root / "backends"
    assert found.backend_names() == ("onnxruntime", "python")


def test_link_to_a_script_is_both(on_path, tmp_path):
    """The folder is meant from where the script really is, if the script says so."""
    script = tmp_path / "triton" / "bin" / "start"
    _executable(
        script,
        '#!/bin/bash\nHERE="$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"\n'
        'exec "$HERE/tritonserver" --backend-directory="$HERE/../backends" "$@"\n',
    )
    on_path.symlink_to(script)

    assert find_triton(tmp_path / "cache").backend_names() == ("onnxruntime", "python")


@pytest.mark.parametrize(
    "script",
    [
        "exec tritonserver --backend-directory=$(find / -name backends)",
        'exec tritonserver --backend-directory="$UNKNOWN_FOLDER/backends"',
        "exec tritonserver --backend-directory=/no/such/folder",
        'exec tritonserver "--backend-directory=',
        "exec $0",
    ],
    ids=["command", "unknown", "missing", "unclosed", "circle"],
)
def test_backend_directory_is_never_guessed(on_path, tmp_path, script, monkeypatch):
    """No backend is believed to be there; the server is started with its own folder."""
    monkeypatch.delenv("UNKNOWN_FOLDER", raising=False)
    monkeypatch.setattr("enginegate.triton.install._BUILT_IN", tmp_path / "no")
    _executable(on_path, f"#!/bin/sh\n{script}\n")

    found = find_triton(tmp_path / "cache")

    assert (found.backends, found.backend_names()) == (None, ())


@pytest.mark.usefixtures("empty_path")
def test_none_at_all(monkeypatch, tmp_path):
    """Without a server every way to get one is named, with the command."""
    monkeypatch.setattr(sys, "path", [])
    importlib.invalidate_caches()

    with pytest.raises(ServerError, match=r"(?s)no Triton server.*pip install --no-deps nvidia-py"):
        find_triton(tmp_path)


@needs_wheel
@pytest.mark.usefixtures("empty_path")
def test_backends_of_the_wheel_are_copied_once(tmp_path):
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
