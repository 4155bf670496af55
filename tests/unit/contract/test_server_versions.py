"""A server's machine says what it has loaded, and what it will load when it starts again."""

from types import SimpleNamespace

import pytest

from enginegate.contract import server_versions
from enginegate.contract.server_versions import ServerVersions, read_versions
from enginegate.triton.endpoint import LiveAddresses

LIBRARIES = "usr/lib/x86_64-linux-gnu"
NVRM = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 2026\nGCC version: 12\n"
)


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A server that only says which Triton it is."""

    class Client:
        def __init__(self, address):
            self.address = address

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def metadata(self):
            return SimpleNamespace(version="2.69.0")

    monkeypatch.setattr(server_versions, "TritonClient", Client)
    monkeypatch.setattr(server_versions, "GpuDriver", SimpleNamespace(open=lambda: None))


def machine(root, *, mapped=f"/{LIBRARIES}/libnvinfer.so.10.16.1", libraries=(), pids=(41,)):
    """A file system with processes, libraries, and a driver."""
    for pid in pids:
        process = root / "proc" / str(pid)
        process.mkdir(parents=True)
        (process / "comm").write_text("tritonserver\n")
        lines = ["7f00-7f01 r-xp 0 08:01 1 /usr/bin/tritonserver", "7f02-7f03 rw-p 0 00:00 0"]
        lines += [f"7f04-7f05 r-xp 0 08:01 2                          {mapped}"] if mapped else []
        (process / "maps").write_text("\n".join(lines) + "\n")
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(NVRM)
    (root / LIBRARIES).mkdir(parents=True)
    for name in libraries:
        (root / LIBRARIES / name).touch()
    return root


def read(root, **addresses):
    return read_versions(LiveAddresses(**{"grpc": "127.0.0.1:8001", **addresses}), root=root)


def test_running_and_installed_versions_are_told_apart(tmp_path):
    """An upgrade beneath a running server: its own library is gone from the disk."""
    root = machine(
        tmp_path,
        mapped=f"/{LIBRARIES}/libnvinfer.so.10.16.1 (deleted)",
        libraries=("libnvinfer.so.11", "libnvinfer.so.11.0.0", "libcuda.so.1", "libcuda.so.580.95"),
    )

    assert read(root) == ServerVersions(
        address="127.0.0.1:8001",
        triton="2.69.0",
        tensorrt="10.16.1",
        installed_tensorrt="11.0.0",
        driver="580.82.07",
        installed_driver="580.95",
    )


def test_container_has_files_of_its_own(tmp_path):
    """At the same path the machine itself may have another TensorRT, which is not the server's."""
    root = machine(tmp_path, libraries=("libnvinfer.so.11.0.0",))
    container = tmp_path / "container"
    (container / LIBRARIES).mkdir(parents=True)
    (container / LIBRARIES / "libnvinfer.so.10.16.1").touch()
    (root / "proc" / "41" / "root").symlink_to(container)

    assert read(root).installed_tensorrt == "10.16.1"


def test_newest_of_several_installed_versions_is_the_one_that_loads(tmp_path):
    """Numbers are compared as numbers: 10.9 is older than 10.16."""
    libraries = ("libnvinfer.so.10.9.0", "libnvinfer.so.10.16.1", "libnvinfer.so.10")

    assert read(machine(tmp_path, libraries=libraries)).installed_tensorrt == "10.16.1"


@pytest.mark.parametrize(
    "found",
    [
        pytest.param({"mapped": ""}, id="no-plan-loaded"),
        pytest.param({"pids": ()}, id="no-process"),
        pytest.param({"pids": (41, 42)}, id="several-servers"),
    ],
)
def test_library_that_no_process_of_its_own_shows_is_not_known(tmp_path, found):
    """Nothing is guessed from another process, or from what lies about on the disk."""
    root = machine(tmp_path, libraries=("libnvinfer.so.11.0.0",), **found)

    versions = read(root)

    assert (versions.tensorrt, versions.installed_tensorrt) == ("", "")
    assert versions.usual_tensorrt == "10.16.1.11"


def test_process_of_a_server_that_was_started_here_is_known(tmp_path):
    """Its number is, so other servers on the machine do not matter."""
    root = machine(tmp_path, pids=(41, 42))

    assert read(root, pid=42).tensorrt == "10.16.1"


def test_other_machines_are_not_looked_for_here(tmp_path):
    """A library on this machine says nothing about another one."""
    assert read(machine(tmp_path), grpc="gpu-7:8001") == ServerVersions("gpu-7:8001", "2.69.0")


def test_driver_that_opens_is_the_one_that_is_installed(tmp_path, monkeypatch):
    """An image's own libraries say nothing where a new process gets a GPU."""
    opened = SimpleNamespace(version=lambda: "580.82.07")
    monkeypatch.setattr(server_versions, "GpuDriver", SimpleNamespace(open=lambda: opened))
    root = machine(tmp_path, libraries=("libcuda.so.535.54.03",))

    assert read(root).installed_driver == "580.82.07"


def test_link_alone_is_no_driver_version(tmp_path):
    """Every machine has libcuda.so.1, whatever its driver."""
    assert read(machine(tmp_path, libraries=("libcuda.so.1",))).installed_driver == ""


def test_machine_without_any_of_it_says_nothing(tmp_path):
    """Neither a driver nor a process table."""
    assert read(tmp_path) == ServerVersions("127.0.0.1:8001", "2.69.0")
