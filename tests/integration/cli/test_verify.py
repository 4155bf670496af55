"""`verify` for those who may only read, and where a server should answer and does not."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from enginegate.errors import ExitCode
from enginegate.repository import Layout, LiveRepository
from tests.fakes.live_triton import FakeTriton, package_in

ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path):
    """A folder with a repository in which release 1 is live."""
    folder = tmp_path
    root = folder / "live"
    root.mkdir()
    LiveRepository(root, FakeTriton(root), load_timeout_s=1.0).publish(
        package_in(folder, 1.0), expected=None
    )
    text = (ROOT / "policies" / "digits.toml").read_text()
    policy = re.sub(r'repository = ".*"', f'repository = "{root}"', text)
    (folder / "digits.toml").write_text(policy)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def verify(place):
    """Run the command there, with no more rights than a file's permissions give."""
    command = [str(Path(sys.executable).with_name("enginegate")), "verify", "digits.toml"]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", *command]
    settings = {"PATH": os.environ["PATH"], "HOME": str(place), "ENGINEGATE_HOME": f"{place}/none"}
    done = subprocess.run(
        command, cwd=place, env=settings, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, " ".join(done.stdout.split()), " ".join(done.stderr.split())


def seen(root):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}


def only_readable(place, *, but=()):
    """As a read-only mount shows it; files in ``but`` may not even be read."""
    for path in (place, *place.rglob("*")):
        path.chmod(0o000 if path in but else 0o555 if path.is_dir() else 0o444)


def test_read_only_verify_checks_everything(place):
    """Nothing is written, twice; that no lock was taken is said, and a changed byte is found."""
    root = place / "live"
    only_readable(place)
    before = seen(root)

    for _ in range(2):
        code, said, err = verify(place)
        assert (code, err) == (ExitCode.OK, "")
        assert "may only be read from here, so it was read without its lock; nobody changed" in said
        assert "ok digits release 1" in said
    assert seen(root) == before

    engine = root / "digits" / "1" / "engine.bin"
    engine.chmod(0o644)
    engine.write_text("9.0")
    code, said, _ = verify(place)
    assert (code, "1/engine.bin is not the file" in said) == (ExitCode.GATES_FAILED, True)


def test_unreadable_files_are_unknown_not_failed(place):
    """Golden samples hold users' data and are their owner's: the auditor is told, and code 5."""
    golden = Layout(place / "live", "digits").golden_file(1)

    only_readable(place, but=(golden,))
    code, said, _ = verify(place)

    assert code == ExitCode.COULD_NOT_FIND_OUT
    assert "unknown digits release 1 it may not be read by this user" in said


def test_silent_server_is_not_success(place):
    """Nor is it a failure of what was published; without any server known, the folder is all."""
    code, said, _ = verify(place)
    assert (code, "No server is named or known" in said) == (ExitCode.OK, True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    policy = place / "digits.toml"
    text = policy.read_text()
    policy.write_text(text.replace("[target]", f'[target]\nendpoint = "{address}"'))

    code, said, _ = verify(place)

    assert code == ExitCode.COULD_NOT_FIND_OUT
    assert f"The live server {address} does not answer" in said
