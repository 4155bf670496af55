"""`--json`: one document on stdout, of the schema that is documented, and nothing else there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.cli.output.records import DOCUMENTS
from enginegate.policy import read_policy
from enginegate.repository import AuditLog, LiveRepository
from enginegate.workspace import Workspace
from tests.fakes.evidence import FP32
from tests.fakes.live_triton import FakeTriton, package_in
from tests.fakes.qualification import qualification

ROOT = Path(__file__).parents[4]
# They end when somebody stops them, or show something that is no report.
SILENT = {"metrics", "demo", "serve", "ui"}


def verbs(command, name=""):
    """Every verb with its click command, groups written out."""
    for each, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            yield from verbs(inner, f"{each} ")
        else:
            yield f"{name}{each}", inner


def test_every_verb_that_reports_has_a_documented_document():
    """A verb that is added must say what it prints for programs."""
    found = dict(verbs(typer.main.get_command(app)))
    with_json = {v for v, c in found.items() if any("--json" in p.opts for p in c.params)}

    assert with_json == {verb.partition(" --")[0] for verb in DOCUMENTS}
    assert set(found) - with_json <= SILENT


def read(verb, text):
    """The document, after it was checked against what is documented."""
    record: type[BaseModel] = DOCUMENTS[verb]
    schema = record.model_json_schema(mode="serialization")
    document = json.loads(text)
    assert set(document) == set(schema["properties"])
    assert document["schema_version"] == 1
    return document


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a policy in whose repository release 1 is live again after release 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    policy = Path(shutil.copy(ROOT / "policies" / "digits.toml", tmp_path))
    root = read_policy(policy).target.repository
    root.mkdir(parents=True)
    repository = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0)
    for before in (None, 1):
        repository.publish(package_in(tmp_path, float(before or 0)), expected=before)
    repository.rollback("digits", None, reason="too slow")
    return policy


def run(*arguments, code=0):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def test_status_tells_releases_apart(project):
    """Live, and rolled back: from the audit log; sentences are not on stdout."""
    document = read("status", run("status", project, "--json"))

    (model,) = document["models"]
    assert model["state"] == "live"
    assert [(r["release"], r["state"]) for r in model["releases"]] == [
        (2, "rolled back"),
        (1, "live"),
    ]
    assert model["promise"]["p99_ms"] > 0
    assert model["measured"] is None


def test_policies_that_cannot_be_read_are_in_the_document(project, tmp_path):
    """The exit code says so too, and the others are shown."""
    broken = tmp_path / "broken.toml"
    broken.write_text("schema_version = ")

    document = read("status", run("status", project, broken, "--json", code=6))

    assert [each["model"] for each in document["models"]] == ["digits"]
    assert "broken.toml is not TOML" in document["errors"][0]


def test_verify_names_each_check(project):
    """What is not as it was published is a problem, and the exit code is unchanged."""
    engine = read_policy(project).target.repository / "digits" / "1" / "model.onnx"
    files = [path for path in engine.parent.iterdir() if path.is_file()]
    files[0].write_bytes(b"other")

    document = read("verify", run("verify", project, "--json", code=3))

    (found,) = document["repositories"]
    assert found["outcome"] == "problem"
    assert any(check["problem"] for check in found["checks"])


def test_audit_is_one_event_a_line(project):
    """In the order of the log."""
    lines = run("audit", project, "--json").splitlines()

    assert [json.loads(line)["event"] for line in lines] == [
        event.event for event in AuditLog(read_policy(project).target.repository).read()
    ]


@pytest.mark.usefixtures("project")
def test_doctor_lists_every_part():
    """With what a missing one costs."""
    document = read("doctor", run("doctor", "--json"))

    assert {"GPU", "Triton server", "prefect"} <= {part["name"] for part in document["parts"]}


@pytest.mark.usefixtures("project")
def test_explain_leaves_out_what_was_not_asked_for():
    """By candidate, and what does not block."""
    card = qualification()
    Workspace.here().save_scorecard(card)

    whole = read("explain", run("explain", card.digest, "--json"))
    one = read("explain", run("explain", card.digest, "--json", "--candidate", FP32.name))
    blocking = read("explain", run("explain", card.digest, "--json", "--only", "blocking"))

    assert whole["scorecard"] == card.digest
    assert len(whole["candidates"]) == len(card.verdicts)
    assert [each["candidate"] for each in one["candidates"]] == [FP32.name]
    findings = [f for each in blocking["candidates"] for f in each["findings"]]
    assert findings
    assert {f["outcome"] for f in findings}.isdisjoint({"passed"})


@pytest.mark.usefixtures("project")
def test_rejection_is_a_document():
    """With the decision as it is kept."""
    card = qualification(policy_sha256="f" * 64)
    Workspace.here().save_scorecard(card)

    document = read(
        "reject", run("reject", card.digest, "--reason", "not yet", "--approver", "ada", "--json")
    )

    assert document["decision"]["approver"] == "ada"
    assert document["in_audit_log"] is False


@pytest.mark.usefixtures("project")
def test_failure_leaves_stdout_empty():
    """A program that reads it sees no half document; the message is on stderr."""
    done = CliRunner().invoke(app, ["explain", "abc", "--json"])

    assert done.stdout == ""
    assert "no scorecard 'abc'" in str(done.exception)


_PRINTING = """
import os, subprocess, sys
from enginegate.cli.output.json_output import printing
from enginegate.cli.output.records import ScanDocument

with printing(as_json=True) as output:
    print("a library")
    os.write(1, b"native code\\n")
    subprocess.run([sys.executable, "-c", "print('a child')"])
    output.console.print("a sentence")
    output.document(ScanDocument(started=("models:/tiny/1",)))
print("afterwards")
"""


def test_what_others_print_is_not_among_the_json():
    """Libraries, native code, child processes and the code of a policy print to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", _PRINTING], capture_output=True, text=True, check=True
    )

    document, _, rest = done.stdout.rpartition("}\n")
    assert read("scan", document + "}")["started"] == ["models:/tiny/1"]
    assert rest == "afterwards\n"
    for said in ("a library", "native code", "a child", "a sentence"):
        assert said in done.stderr
