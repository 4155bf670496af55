"""Restoring: the same bytes and modes elsewhere, all of it or none, and never over anything."""

import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import replace

import pytest

from enginegate.backup import RestorePlaces, restore_backup, write_backup
from enginegate.backup.places import RepositoryPlace, is_of_the_moment, why_left_out
from enginegate.errors import EnginegateError, InputError, TamperedError
from enginegate.repository import Layout, verify
from enginegate.workspace import Workspace
from tests.fakes.projects import LIVE, Project, contents, restored_to


def is_backed_up(root):
    """Whether a file of a project is one that its backup holds."""

    def wanted(path):
        place = path.relative_to(root)
        if place.is_relative_to(LIVE) and place.as_posix() != LIVE:
            return not is_of_the_moment(place.relative_to(LIVE))
        if not place.is_relative_to(".enginegate"):
            return True
        below = place.relative_to(".enginegate")
        parts = [below, *below.parents][:-1]
        return all(why_left_out(part, shadow=False) is None for part in parts)

    return wanted


def rewritten(path, change):
    """A backup made anew by somebody who keeps manifest and archive consistent with each other."""
    target = path.with_name("forged.backup")
    lines = []
    with tarfile.open(path) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for info in old:
            content = old.extractfile(info).read() if info.isreg() else b""
            if info.name == "manifest.jsonl":
                content = b"".join(lines)
            content = change(info, content)
            if content is None:
                continue
            info.size = len(content)
            new.addfile(info, io.BytesIO(content) if info.isreg() else None)
            line = {"mode": info.mode, "name": info.name}
            if info.isreg():
                line["sha256"] = hashlib.sha256(content).hexdigest()
                line |= {"size_bytes": len(content)} if content else {}
            lines.append(json.dumps(line, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return target


def nothing_at(place):
    return not place.exists() and not list(place.parent.glob(".enginegate-restore-*"))


class TestWholeRestore:
    def test_every_byte_and_mode_is_as_it_was(self, project, sealing, opening, tmp_path):
        """At another path; keys are readable by their owner only, as they were."""
        (project.repository.root / "digits" / "1").chmod(0o555)
        path = tmp_path / "again"
        write_backup(path, project.places, sealing)

        done = restore_backup(path, restored_to(tmp_path / "new"), opening)

        old, new = project.root, tmp_path / "new"
        assert contents(new, is_backed_up(new)) == contents(old, is_backed_up(old))
        assert (new / ".enginegate/keys/release.pem").stat().st_mode & 0o777 == 0o600
        assert (done.keys, done.places[0]) == (2, new / ".enginegate")
        assert not list(new.rglob(".enginegate-restore-*"))
        (project.repository.root / "digits" / "1").chmod(0o755)

    def test_releases_verify_and_roll_back_there(self, project, backup, opening, tmp_path):
        """Signatures verify with the restored key, and the older release can be live again."""
        restore_backup(backup, restored_to(tmp_path / "new"), opening)

        there = Project.at(tmp_path / "new").repository
        there.bring_up("digits")
        project.repository.bring_up("digits")
        checks, old = verify(there), verify(project.repository)
        assert [(c.subject, c.problem, c.note) for c in checks] == [
            (c.subject, c.problem, c.note) for c in old
        ]
        there.rollback("digits", 1, reason="a drill")
        assert Layout(there.root, "digits").current().version == 1
        assert not any(check.problem for check in verify(there))

    def test_empty_folders_of_a_platform_are_filled_and_stay(self, backup, opening, tmp_path):
        """A volume is mounted there: the folder itself cannot be replaced."""
        root = tmp_path / "new" / ".enginegate"
        root.mkdir(parents=True)
        (root / "logs").mkdir()
        (root / "mlflow.db").write_bytes(b"restored before, by its own tools")
        inode = root.stat().st_ino

        restore_backup(backup, restored_to(tmp_path / "new"), opening)

        assert root.stat().st_ino == inode
        assert (root / "mlflow.db").read_bytes() == b"restored before, by its own tools"
        assert (root / "live/digits/digits/2/engine.bin").read_text() == "2.0"
        assert not list(root.glob(".enginegate-restore-*"))

    def test_disks_own_folder_is_no_obstacle_and_in_no_backup(
        self, project, sealing, opening, tmp_path
    ):
        """Workspace and live repository are often file systems of their own."""
        for root in (project.root, tmp_path / "new"):
            (root / LIVE / "lost+found").mkdir(parents=True)
            (root / ".enginegate" / "lost+found").mkdir(mode=0)
        write_backup(tmp_path / "again", project.places, sealing)

        with pytest.raises(InputError, match="'live'"):
            restore_backup(tmp_path / "again", restored_to(tmp_path / "new"), opening)
        shutil.rmtree(tmp_path / "new" / ".enginegate" / "live")
        restore_backup(tmp_path / "again", restored_to(tmp_path / "new"), opening)

        assert not (tmp_path / "new" / LIVE / "lost+found").exists()

    def test_policies_of_a_checkout_stay(self, project, backup, opening, tmp_path):
        """The very file is no obstacle."""
        policy = tmp_path / "new" / "policies" / "digits.toml"
        policy.parent.mkdir(parents=True)
        policy.write_bytes((project.root / "policies" / "digits.toml").read_bytes())

        done = restore_backup(backup, restored_to(tmp_path / "new"), opening)

        assert policy not in done.places

    def test_check_alone_writes_nothing(self, backup, opening, tmp_path):
        before = set(tmp_path.rglob("*"))

        done = restore_backup(backup, None, opening)

        assert (done.keys, done.places) == (2, ())
        assert set(tmp_path.rglob("*")) == before


class TestRefusedPlaces:
    @pytest.mark.parametrize(
        ("taken", "named"),
        [
            pytest.param(".enginegate/scorecards/a.json", "'scorecards'", id="workspace"),
            pytest.param(f"{LIVE}/digits/config.pbtxt", "'live'", id="repository"),
            pytest.param("policies/digits.toml", "digits.toml is there already", id="policy"),
        ],
    )
    def test_place_that_is_not_empty_is_named(self, backup, opening, tmp_path, taken, named):
        path = tmp_path / "new" / taken
        path.parent.mkdir(parents=True)
        path.write_text("somebody's")
        before = contents(tmp_path / "new")

        with pytest.raises(InputError, match=named):
            restore_backup(backup, restored_to(tmp_path / "new"), opening)

        assert contents(tmp_path / "new") == before

    def test_repository_outside_of_the_project_needs_a_word(
        self, project, sealing, opening, tmp_path
    ):
        """A file that somebody was sent must not choose where it is written."""
        outside = RepositoryPlace("/srv/models", project.root / LIVE)
        path = tmp_path / "b"
        write_backup(path, replace(project.places, repositories=(outside,)), sealing)
        to = restored_to(tmp_path / "new")

        with pytest.raises(InputError, match="--repository /srv/models"):
            restore_backup(path, to, opening)
        assert not (tmp_path / "new").exists()

        moved = replace(to, repositories={"/srv/models": tmp_path / "elsewhere"})
        restore_backup(path, moved, opening)
        assert (tmp_path / "elsewhere/digits/2/engine.bin").read_text() == "2.0"

    def test_disk_that_is_too_small_is_refused_before_anything_is_written(
        self, backup, opening, tmp_path, monkeypatch
    ):
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("enginegate.backup.restore.shutil.disk_usage", lambda _: usage)

        with pytest.raises(EnginegateError, match="MiB free"):
            restore_backup(backup, restored_to(tmp_path / "new"), opening)
        assert not (tmp_path / "new").exists()

    def test_failure_at_the_last_place_undoes_the_others(self, backup, opening, tmp_path):
        """The policies come last: where they cannot be written, nothing else is left either."""
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "policies").write_text("a file, where a folder must be")

        with pytest.raises(EnginegateError, match="cannot be written"):
            restore_backup(backup, restored_to(tmp_path / "new"), opening)

        assert [path.name for path in (tmp_path / "new").iterdir()] == ["policies"]


class TestRefusedFiles:
    @pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.99])
    def test_truncated_file(self, backup, opening, tmp_path, share):
        """Wherever it was cut; after the last member there is only the archive's padding."""
        content = backup.read_bytes().rstrip(b"\0")
        backup.write_bytes(content[: int(len(content) * share)])

        with pytest.raises(InputError, match=r"cut short|no backup"):
            restore_backup(backup, restored_to(tmp_path / "new"), opening)
        assert nothing_at(tmp_path / "new")

    def test_flipped_bit(self, backup, opening, tmp_path):
        """In the bytes of an engine: the file is named."""
        content = bytearray(backup.read_bytes())
        content[content.index(b"plan" * 100)] ^= 1
        backup.write_bytes(content)

        with pytest.raises(TamperedError, match=r"engine\.bin' is not what its manifest says"):
            restore_backup(backup, restored_to(tmp_path / "new"), opening)
        assert nothing_at(tmp_path / "new")

    def test_another_file_than_was_meant(self, backup, opening, tmp_path):
        with pytest.raises(TamperedError, match="not the backup that was meant"):
            restore_backup(backup, restored_to(tmp_path / "new"), opening, sha256="00ff")
        assert nothing_at(tmp_path / "new")

    def test_consistent_forgery_does_not_fit_the_encrypted_part(self, backup, opening, tmp_path):
        """Members and manifest were both changed, by somebody who cannot encrypt."""

        def change(info, content):
            del info
            return content.replace(b"plan", b"evil")

        forged = rewritten(backup, change)

        with pytest.raises(TamperedError, match="encrypted part belongs to the manifest"):
            restore_backup(forged, restored_to(tmp_path / "new"), opening)
        assert nothing_at(tmp_path / "new")

    @pytest.mark.parametrize(
        "name",
        [
            "workspace/../../escaped",
            "/workspace/escaped",
            "workspace//escaped",
            "elsewhere/escaped",
            "escaped",
            "workspace/missing/escaped",
            "workspace/store/engines",
        ],
    )
    def test_name_that_would_leave_its_folder(self, backup, tmp_path, name):
        """A member is taken out only where a backup has one."""

        def change(info, content):
            if info.name.endswith("engine.bin") and "store" in info.name:
                info.name = name
            return content

        forged = rewritten(backup, change)

        with pytest.raises(InputError, match="no backup"):
            restore_backup(forged, restored_to(tmp_path / "new"), None)
        assert nothing_at(tmp_path / "new")
        assert not list(tmp_path.rglob("escaped"))

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
    def test_links_and_devices_in_the_archive(self, backup, tmp_path, kind):
        def change(info, content):
            if info.name.endswith("engine.bin") and "store" in info.name:
                info.type, info.linkname, content = kind, "/etc/passwd", b""
            return content

        with pytest.raises(InputError, match="neither a file nor a folder"):
            restore_backup(rewritten(backup, change), restored_to(tmp_path / "new"), None)
        assert nothing_at(tmp_path / "new")

    def test_member_that_would_replace_what_may_be_there(self, backup, tmp_path):
        """MLflow's database was restored before, by its own tools."""
        database = tmp_path / "new" / ".enginegate" / "mlflow.db"
        database.parent.mkdir(parents=True)
        database.write_text("restored before")

        def change(info, content):
            if info.name == "workspace/scorecards":
                return None
            if info.name.startswith("workspace/scorecards/"):
                info.name = "workspace/mlflow.db"
            return content

        forged = rewritten(backup, change)

        with pytest.raises(InputError, match=r"holds 'mlflow\.db', which the backup would replace"):
            restore_backup(forged, restored_to(tmp_path / "new"), None)
        assert database.read_text() == "restored before"
        assert [path.name for path in database.parent.iterdir()] == ["mlflow.db"]

    def test_policy_is_no_program_whatever_the_file_says(self, backup, tmp_path):
        """Nor does a time that no file system has break the restore off."""

        def change(info, content):
            if info.name == "project/policies/digits.toml":
                info.mode = 0o755
                info.pax_headers = {"mtime": "1e300"}
            if info.name.startswith("workspace/scorecards/"):
                info.pax_headers = {"mtime": "-1e300"}
            return content

        restore_backup(rewritten(backup, change), restored_to(tmp_path / "new"), None)

        policy = tmp_path / "new" / "policies" / "digits.toml"
        assert policy.stat().st_mode & 0o777 == 0o644

    def test_repository_that_climbs_out_of_the_project(self, backup, tmp_path):
        def change(info, content):
            if info.name == "backup.json":
                content = content.replace(LIVE.encode(), b"../../somewhere")
            return content

        with pytest.raises(InputError, match="no folder"):
            restore_backup(rewritten(backup, change), restored_to(tmp_path / "new"), None)
        assert nothing_at(tmp_path / "new")

    def test_keys_taken_out_of_the_file(self, backup, opening, tmp_path):
        def change(info, content):
            return None if info.name == "keys.age" else content

        with pytest.raises(InputError, match="cut short"):
            restore_backup(rewritten(backup, change), restored_to(tmp_path / "new"), opening)

    @pytest.mark.parametrize("content", [b"", b"no archive", bytes(20480)], ids=["0", "text", "0s"])
    def test_other_files(self, tmp_path, content):
        (tmp_path / "b").write_bytes(content)

        with pytest.raises(InputError, match=r"no backup|cut short"):
            restore_backup(tmp_path / "b", None, None)


def test_file_changed_between_check_and_restore_leaves_nothing(backup, opening, tmp_path):
    """It is read twice, and every byte that is written was checked while it passed."""

    def progress(done, total):
        if done == total:
            content = bytearray(backup.read_bytes())
            content[content.index(b"plan" * 100)] ^= 1
            backup.write_bytes(content)

    with pytest.raises(TamperedError, match="changed while it was restored"):
        restore_backup(backup, restored_to(tmp_path / "new"), opening, progress=progress)
    assert not (tmp_path / "new").exists()


def test_policy_that_somebody_writes_meanwhile_stays(backup, opening, tmp_path, monkeypatch):
    """Places were free when the restore began, and it may take an hour."""
    policy = tmp_path / "new" / "policies" / "digits.toml"

    def synced():
        policy.parent.mkdir(parents=True)
        policy.write_text("somebody's")

    monkeypatch.setattr("enginegate.backup.restore.os.sync", synced)

    with pytest.raises(InputError, match="by somebody else meanwhile"):
        restore_backup(backup, restored_to(tmp_path / "new"), opening)
    assert policy.read_text() == "somebody's"
    assert not (tmp_path / "new" / ".enginegate").exists()


def test_two_places_that_are_one_are_refused(project, sealing, tmp_path):
    """Two repositories would be mixed."""
    first = project.places.repositories[0]
    places = replace(
        project.places,
        repositories=(RepositoryPlace("/srv/a", first.root), RepositoryPlace("/srv/b", first.root)),
    )
    path = tmp_path / "b"
    write_backup(path, places, sealing)
    folders = {"/srv/a": tmp_path / "x", "/srv/b": tmp_path / "x"}
    to = RestorePlaces(tmp_path / "new", Workspace(tmp_path / "new/.enginegate"), folders)

    with pytest.raises(InputError, match="twice"):
        restore_backup(path, to, None)


def test_what_a_killed_restore_left_is_no_obstacle(backup, opening, tmp_path):
    """Its staging folder is removed, wherever it was; nothing had been moved in."""
    new = tmp_path / "new"
    left = new / ".enginegate-restore-killed" / "store"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    left.chmod(0o555)
    inside = new / ".enginegate" / ".enginegate-restore-killed"
    inside.mkdir(parents=True)

    restore_backup(backup, restored_to(new), opening)

    assert sorted(path.name for path in new.iterdir()) == [".enginegate", "policies"]
    assert not inside.exists()
