"""Writing a backup: what is in it, that others go on meanwhile, and that none is half-written."""

import fcntl
import os
import resource
import signal
import tarfile
import threading

import pytest

from enginegate.backup import SealingKey, restore_backup, write_backup
from enginegate.errors import EnginegateError, InputError, RepositoryError
from enginegate.repository import Layout
from enginegate.repository.lock import hold_lock
from tests.fakes.projects import LIVE, restored_to


def place_large_model(project):
    """Another team's model, whose bytes come first and are written while others change things."""
    other = project.repository.root / "another" / "1"
    other.mkdir(parents=True)
    (other / "model.bin").write_bytes(bytes(5 << 20))


def names(path):
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_backup_holds_what_cannot_be_made_again(backup):
    """An ordinary tar archive, so that a person can look into it without this program."""
    found = set(names(backup))

    assert {
        "project/policies/digits.toml",
        "repositories/0000/.enginegate-audit.jsonl",
        "repositories/0000/.enginegate-current.digits.json",
        "repositories/0000/digits/2/engine.bin",
        f"workspace/store/engines/{'e' * 64}/engine.bin",
    } <= found
    assert any(name.startswith("workspace/scorecards/") for name in found)
    assert any(name.startswith("workspace/decisions/") for name in found)
    assert not [name for name in found if name.endswith(".lock") or "mlflow" in name]


def test_private_keys_are_in_it_only_encrypted(project, backup):
    """Nor are the requests of users, unless somebody asks for them."""
    key = (project.workspace.keys / "release.pem").read_bytes()
    found = names(backup)

    assert key.splitlines()[1] not in backup.read_bytes()
    assert [name for name in found if "keys" in name] == ["workspace/keys", "keys.age"]
    assert not [name for name in found if "shadow" in name]


def test_keys_in_a_folder_among_the_keys_are_encrypted_too(project, sealing, opening, tmp_path):
    """Where people keep the ones before a rotation."""
    old = project.workspace.keys / "2025" / "release.pem"
    old.parent.mkdir(mode=0o700)
    old.write_text("private half of last year")
    old.chmod(0o600)

    write_backup(tmp_path / "b", project.places, sealing)
    restore_backup(tmp_path / "b", restored_to(tmp_path / "new"), opening)

    assert b"of last year" not in (tmp_path / "b").read_bytes()
    there = tmp_path / "new" / ".enginegate" / "keys" / "2025" / "release.pem"
    assert there.read_text() == "private half of last year"
    assert [p.stat().st_mode & 0o777 for p in (there, there.parent)] == [0o600, 0o700]


@pytest.mark.parametrize(
    "place",
    [
        f"{LIVE}/.enginegate-audit-index.db",
        f"{LIVE}/.enginegate-server.json",
        ".enginegate/verified/a.json",
        ".enginegate/keys/verified.key",
        ".enginegate/running/a.json",
        ".enginegate/mlflow.db-wal",
    ],
)
def test_what_counts_on_this_disk_or_process_only_is_left_out(project, tmp_path, place):
    """It would be wrong on another: what was verified here was not verified there."""
    path = project.root / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("of this disk")

    write_backup(tmp_path / "b", project.places, None)

    assert not [name for name in names(tmp_path / "b") if name.endswith(path.name)]


def test_what_is_left_out_is_named_with_its_reason(project, sealing, tmp_path):
    made = write_backup(tmp_path / "b", project.places, sealing)
    without = write_backup(tmp_path / "c", project.places, None, shadow=True)

    reasons = {each.what: each.why for each in made.header.left_out}
    assert made.path.stat().st_mode & 0o777 == 0o600
    assert "docs/backup.md" in reasons[".enginegate/mlflow.db"]
    assert "--shadow" in reasons[".enginegate/shadow"]
    reasons = {each.what: each.why for each in without.header.left_out}
    assert "--without-keys" in reasons["workspace/keys/release.pem"]
    assert "workspace/shadow/requests.npz" in names(tmp_path / "c")


def test_backup_waits_for_a_change_of_the_repository(project, tmp_path):
    """A promotion that holds the lock ends first; the backup has the repository before or after."""
    root, began, ended = project.repository.root, threading.Event(), threading.Event()

    def promote():
        with hold_lock(root):
            began.set()
            ended.wait(10.0)
            (root / "digits" / "config.pbtxt").write_text("changed under the lock")

    other = threading.Thread(target=promote)
    other.start()
    began.wait(10.0)
    writing = threading.Thread(
        target=write_backup, args=(tmp_path / "b", project.places, None), daemon=True
    )
    writing.start()
    ended.set()
    other.join()
    writing.join()

    with tarfile.open(tmp_path / "b") as archive:
        config = archive.extractfile("repositories/0000/digits/config.pbtxt").read()
    assert config == b"changed under the lock"


def test_promotion_while_files_are_copied_leaves_the_backup_as_it_was_listed(project, tmp_path):
    """The lock is free meanwhile: pointer, logs and bytes are those of one moment."""
    place_large_model(project)
    promoted = []

    def progress(_done, _total):
        if not promoted:
            promoted.append(True)
            project.repository.bring_up("digits")
            project.publish(3.0)

    audit = project.repository.root / ".enginegate-audit.jsonl"
    before = audit.read_bytes()
    write_backup(tmp_path / "b", project.places, None, progress=progress)

    assert Layout(project.repository.root, "digits").current().version == 3
    with tarfile.open(tmp_path / "b") as archive:
        log = archive.extractfile("repositories/0000/.enginegate-audit.jsonl").read()
    assert log == before
    assert "repositories/0000/digits/3" not in names(tmp_path / "b")


def test_release_that_retention_takes_meanwhile_makes_the_backup_start_anew(project, tmp_path):
    """Three times; then it is said, and nothing is left."""
    place_large_model(project)
    engines = project.repository.root / "digits"
    calls = []

    def progress(_done, _total):
        if not calls:
            calls.append("gone")
            (engines / "1" / "engine.bin").unlink()

    made = write_backup(tmp_path / "b", project.places, None, progress=progress)
    assert "repositories/0000/digits/1/engine.bin" not in names(made.path)

    def always(_done, _total):
        path = engines / "2" / "engine.bin"
        path.write_text(path.read_text() + "1")

    with pytest.raises(RepositoryError, match="changed or removed while the backup"):
        write_backup(tmp_path / "c", project.places, None, progress=always)
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.glob(".enginegate-backup-*"))


def test_full_disk_leaves_nothing(project, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, before[1]))
    try:
        with pytest.raises(EnginegateError, match="cannot be written") as raised:
            write_backup(tmp_path / "b", project.places, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    assert "Nothing of it is left" in str(raised.value)
    assert not list(tmp_path.glob("b")) + list(tmp_path.glob(".enginegate-backup-*"))


def test_file_that_is_there_is_never_replaced(project, backup):
    """Last night's backup may be the only good one."""
    before = backup.read_bytes()

    with pytest.raises(InputError, match="replaces no other"):
        write_backup(backup, project.places, None)

    assert backup.read_bytes() == before


def test_file_inside_of_what_is_backed_up_is_refused(project):
    with pytest.raises(InputError, match="lost with it"):
        write_backup(project.workspace.root / "b", project.places, None)


def test_links_are_refused_by_name(project, tmp_path):
    """What they lead to would be missing after a restore, and nobody would know."""
    link = project.workspace.root / "store" / "more"
    link.symlink_to("/srv/store")

    with pytest.raises(InputError, match=r"store/more is a symbolic link"):
        write_backup(tmp_path / "b", project.places, None)


def test_fifo_does_not_hold_the_backup_up(project, tmp_path):
    os.mkfifo(project.repository.root / "digits" / "3")

    with pytest.raises(InputError, match=r"digits/3 is no regular file"):
        write_backup(tmp_path / "b", project.places, None)


def test_short_passphrase_is_refused_before_anything_is_read(project, tmp_path):
    with pytest.raises(InputError, match="at least 12 characters"):
        write_backup(tmp_path / "b", project.places, SealingKey("hunter2"))


def test_repository_where_nothing_was_published_is_no_fault(project, tmp_path):
    """It is not made either."""
    root = project.root / "elsewhere"
    place = project.places.repositories[0]
    places = type(project.places)(
        project=project.root,
        workspace=project.workspace,
        repositories=(type(place)("elsewhere", root),),
        files={},
        private_keys={},
    )

    made = write_backup(tmp_path / "b", places, None)

    assert "elsewhere" in {each.what for each in made.header.left_out}
    assert made.header.repositories == ()
    assert not root.exists()


def test_part_of_a_killed_backup_is_removed_and_a_running_ones_stays(project, tmp_path):
    """A killed one leaves gigabytes on a disk that has none to spare."""
    killed, running = (tmp_path / f".enginegate-backup-{name}" for name in ("killed", "running"))
    killed.write_bytes(b"half")
    with running.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_backup(tmp_path / "b", project.places, None)

    assert not killed.exists()
    assert running.exists()
