"""Which backends doctor lists: of the server that is installed, and of one that runs."""

import io
from contextlib import contextmanager

import pytest
from rich.console import Console
from typer.testing import CliRunner

from enginegate.cli import doctor
from enginegate.cli.app import app
from enginegate.cli.output.json_output import Printer
from enginegate.contract.server_versions import ServerVersions
from enginegate.errors import InputError
from enginegate.repository.deploy.upgrades import UpgradeFinding
from enginegate.triton import backends
from tests.fakes.answering import ABSENT, DAMAGED, POLLING, AnsweringClient


@pytest.fixture(autouse=True)
def _nothing_known():
    backends._known.clear()


class RunningServer:
    """A server that somebody runs; ``says`` is what it complains about when a probe is loaded."""

    def __init__(self, says):
        self.says = says

    @contextmanager
    def client(self):
        yield AnsweringClient(self.says)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (DAMAGED, "Own backends for engines: onnxruntime, tensorrt; it lacks pytorch."),
        (ABSENT, "Own backends for engines: none; it lacks onnxruntime and pytorch and tensorrt."),
        (POLLING, "Which backends it has cannot be asked: explicit model load"),
    ],
)
def test_running_server_is_asked(says, words):
    """A server that takes no load calls cannot say; that is no error."""
    assert doctor._backend_words(RunningServer(says)).startswith(words)


@pytest.mark.parametrize("found", [True, False])
def test_the_installed_server_is_looked_into(monkeypatch, tmp_path, found):
    """The folder is named with what is in it, so that a wrong one is seen."""
    binary = tmp_path / "bin" / "tritonserver"
    library = tmp_path / "backends" / "onnxruntime" / "libtriton_onnxruntime.so"
    for path in (binary, library) if found else (binary,):
        path.parent.mkdir(parents=True)
        path.write_text("")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(binary.parent))
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("enginegate.triton.install._BUILT_IN", tmp_path / "no")

    (part,) = [each for each in doctor.parts() if each.name == "Triton server"]

    said = f"backends onnxruntime in {tmp_path}/backends" if found else "backends were not found"
    assert part.found.startswith(str(binary))
    assert said in part.found


def test_program_named_by_its_variable_is_found(monkeypatch, tmp_path):
    """Perf Analyzer comes in a wheel of its own, which is seldom on the path."""
    monkeypatch.setenv("PERF_ANALYZER", str(tmp_path / "perf_analyzer"))

    (part,) = [each for each in doctor.parts() if each.name == "perf_analyzer"]

    assert part.found == str(tmp_path / "perf_analyzer")


def test_asking_what_is_here_leaves_nothing_behind(monkeypatch, tmp_path):
    """Also with the wheel's server, whose backends a promotion puts together in the workspace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)

    assert len(list(doctor.parts())) > len(doctor._PACKAGES)
    assert not list(tmp_path.iterdir())


def test_repository_without_server_is_refused():
    """Nothing would be tried out in it, and the table would look as if it had been."""
    told = CliRunner().invoke(app, ["doctor", "--repository", "/srv/models"])

    assert isinstance(told.exception, InputError)
    assert "goes with --server" in str(told.exception)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_long_path_is_shown_whole(monkeypatch, width):
    """Somebody copies it."""
    path = "/srv/" + "x" * 200 + "/end"
    monkeypatch.setattr(doctor, "parts", lambda: iter([doctor.DoctorPart("Triton", path, "", "")]))
    console = Console(width=width, file=io.StringIO())

    doctor.print_parts(Printer(console))

    said = "".join(c for c in console.file.getvalue() if c.isalnum() or c == "/")
    assert path in said.replace("Triton", "")


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"triton": "2.69.0"}, "Images of Triton 2.69.0 had TensorRT 10.16.1.11, as far as"),
        ({"triton": "2.51.0"}, "Which TensorRT it has is not known"),
        (
            {"tensorrt": "10.16.1", "installed_tensorrt": "11.0.0"},
            "TensorRT 10.16.1 is loaded there; 11.0.0 is installed, and loads when it starts again",
        ),
        (
            {"driver": "580.82.07", "installed_driver": "580.95.05"},
            "NVIDIA driver 580.82.07; of which 580.95.05 is installed.",
        ),
    ],
)
def test_versions_of_a_running_server_are_said(versions, words):
    """What is loaded, and what comes when it starts again."""
    assert words in doctor._version_words(ServerVersions("127.0.0.1:8001", **versions))


@pytest.mark.parametrize("breaks", [True, False])
def test_upgrade_beneath_a_live_release_fails_the_doctor(monkeypatch, tmp_path, breaks):
    """The releases are those of the folder that is named; each sentence is printed."""
    finding = UpgradeFinding(certain=breaks, words="release 3 will not load")
    monkeypatch.setattr(doctor, "models", lambda _: ("digits",))
    monkeypatch.setattr(doctor, "find_upgrades", lambda *_, **__: (finding,))
    console = Console(file=io.StringIO(), width=200)

    found = doctor._print_upgrades(ServerVersions("127.0.0.1:8001"), tmp_path, console)

    assert [each.certain for each in found] == [breaks]
    assert "release 3 will not load" in console.file.getvalue()


def messages():
    return next(part for part in doctor.parts() if part.name == "messages")


def test_doctor_says_who_gets_messages(monkeypatch):
    """By place and kind, never by address; nobody, and addresses that are none, are missing."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("ENGINEGATE_NOTIFY", "slack://t0ken mailto://u:pw@host")
    assert messages().found == "1 (slack), 2 (mailto), of ENGINEGATE_NOTIFY"

    monkeypatch.setenv("ENGINEGATE_NOTIFY", "t0ken")
    assert (messages().found, "t0ken" in messages().remedy) == ("", False)

    monkeypatch.delenv("ENGINEGATE_NOTIFY")
    assert messages().found == ""
    assert "enginegate notify test" in messages().remedy
