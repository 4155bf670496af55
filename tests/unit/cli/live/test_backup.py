"""`backup` and `restore` on the command line: what is asked for, printed and refused."""

import json

import pyrage
import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.cli.live.backup import PASSPHRASE
from enginegate.errors import InputError
from tests.fakes.projects import LIVE, published_project

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return published_project(tmp_path_factory.mktemp("published") / "old")


@pytest.fixture
def key(tmp_path):
    """An age identity's file; the recipient is in its comment."""
    made = pyrage.x25519.Identity.generate()
    path = tmp_path / "identity.txt"
    path.write_text(f"# public key: {made.to_public()}\n{made}\n")
    return path, str(made.to_public())


@pytest.fixture
def run(published, monkeypatch):
    """Run a command in a folder, by default the project's."""
    monkeypatch.delenv("ENGINEGATE_HOME", raising=False)
    monkeypatch.delenv(PASSPHRASE, raising=False)

    def command(*words, at=published.root):
        monkeypatch.chdir(at)
        return RUNNER.invoke(app, [str(word) for word in words], catch_exceptions=True)

    return command


def test_backup_and_restore_say_what_they_hold(run, key, tmp_path):
    identity, recipient = key
    file, new = tmp_path / "b", tmp_path / "new"

    made = run("backup", file, "--recipient", recipient)
    assert made.exit_code == 0, made.exception
    assert f"live repository {LIVE}: digits" in made.stdout
    assert "left out  .enginegate/mlflow.db" in made.stdout
    assert f"enginegate restore {file} --check" in " ".join(made.stdout.split())

    done = run("restore", file, "--to", new, "--identity", identity)
    assert done.exit_code == 0, done.exception
    assert str(new / ".enginegate") in done.stdout
    assert (new / LIVE / "digits" / "2" / "engine.bin").read_text() == "2.0"


def test_json_has_the_digest_that_restore_takes(run, key, tmp_path):
    identity, recipient = key
    file = tmp_path / "b"

    made = json.loads(run("backup", file, "--recipient", recipient, "--json").stdout)
    begin = made["sha256"][:16]
    words = ("restore", file, "--identity", identity, "--check", "--json", "--sha256", begin)
    checked = json.loads(run(*words).stdout)

    assert (made["keys"], made["repositories"]) == (2, [LIVE])
    assert (checked["sha256"], checked["restored"], checked["keys"]) == (made["sha256"], [], 2)
    assert checked["files"] == made["files"]


def test_without_a_terminal_the_ways_to_give_a_passphrase_are_named(run, tmp_path):
    """A job must not hang on a question."""
    done = run("backup", tmp_path / "b")

    assert isinstance(done.exception, InputError)
    assert PASSPHRASE in str(done.exception)
    assert "--passphrase-file" in str(done.exception)
    assert not (tmp_path / "b").exists()


def test_what_opens_keys_must_fit_how_they_were_encrypted(run, key, tmp_path):
    """Asked before gigabytes are read; a backup without keys was never expected to have none."""
    identity, recipient = key
    file, bare, word = tmp_path / "b", tmp_path / "bare", tmp_path / "word"
    word.write_text("correct horse battery\n")
    run("backup", file, "--recipient", recipient)
    run("backup", bare, "--without-keys")

    for words, message in (
        (("restore", file, "--passphrase-file", word), "--identity FILE"),
        (("restore", bare, "--identity", identity), "no encrypted part"),
        (("restore", file, "--identity", tmp_path / "none"), "cannot be read"),
    ):
        done = run(*words, "--to", tmp_path / "new")
        assert message in str(done.exception)
    assert not (tmp_path / "new").exists()


def test_backup_whose_encrypted_part_was_taken_out_is_noticed(run, tmp_path, monkeypatch):
    """Nothing else ties its bytes to whoever knows the passphrase."""
    bare, new = tmp_path / "bare", tmp_path / "new"
    made = json.loads(run("backup", bare, "--without-keys", "--json").stdout)

    told = run("restore", bare, "--check")
    known = run("restore", bare, "--check", "--sha256", made["sha256"])
    monkeypatch.setenv(PASSPHRASE, "correct horse battery")
    refused = RUNNER.invoke(app, ["restore", str(bare), "--to", str(new)])
    meant = RUNNER.invoke(app, ["restore", str(bare), "--check", "--without-keys"])

    assert "only --sha256 can show" in " ".join(told.stdout.split())
    assert "only --sha256" not in known.stdout
    assert "no encrypted part" in str(refused.exception)
    assert not new.exists()
    assert meant.exit_code == 0


def test_repository_elsewhere_is_restored_where_somebody_says(run, tmp_path, published):
    """An absolute target.repository; policies go on naming the old folder."""
    root = tmp_path / "project"
    old = tmp_path / "srv" / "models"
    (root / "policies").mkdir(parents=True)
    text = (published.root / "policies" / "digits.toml").read_text().replace(LIVE, str(old))
    (root / "policies" / "digits.toml").write_text(text)
    (old / "digits" / "1").mkdir(parents=True)
    (old / "digits" / "1" / "engine.bin").write_text("1.0")

    file, new = tmp_path / "b", tmp_path / "new"
    run("backup", file, at=root)
    refused = run("restore", file, "--to", new, at=root)
    moved = run("restore", file, "--to", new, "--repository", f"{old}={tmp_path}/other", at=root)

    assert f"--repository {old}" in str(refused.exception)
    assert moved.exit_code == 0, moved.exception
    assert (tmp_path / "other" / "digits" / "1" / "engine.bin").read_text() == "1.0"


def test_policies_of_two_projects_are_no_backup(run, tmp_path, published):
    other = tmp_path / "other"
    (other / ".enginegate").mkdir(parents=True)
    policy = other / "digits.toml"
    policy.write_text((published.root / "policies" / "digits.toml").read_text())

    done = run("backup", tmp_path / "b", "policies/digits.toml", policy)

    assert "another project" in str(done.exception)


def test_private_key_that_a_policy_names_is_encrypted_too(run, key, tmp_path, published):
    """Its public half is in the backup as it is; what lies outside of the project is named."""
    identity, recipient = key
    root = tmp_path / "project"
    (root / "policies").mkdir(parents=True)
    (root / "secrets").mkdir()
    (root / "secrets" / "release.pem").write_text("private half")
    (tmp_path / "release.pub").write_text("public half")
    signing = (
        f'[signing]\nprivate_key = "secrets/release.pem"\npublic_key = "{tmp_path}/release.pub"'
    )
    text = (published.root / "policies" / "digits.toml").read_text()
    assert "[signing]" not in text
    (root / "policies" / "digits.toml").write_text(f"{text}\n{signing}\n")
    (root / ".enginegate").mkdir()

    file, new = tmp_path / "b", tmp_path / "new"
    made = run("backup", file, "--recipient", recipient, at=root)
    done = run("restore", file, "--to", new, "--identity", identity, at=root)

    assert f"{tmp_path}/release.pub" in " ".join(made.stdout.split())
    assert b"private half" not in file.read_bytes()
    assert done.exit_code == 0, done.exception
    assert (new / "secrets" / "release.pem").read_text() == "private half"
