"""What object storage keeps, as a real S3 API server does; needs no Triton."""

import os

import pytest

from enginegate.errors import RepositoryError, TamperedError
from enginegate.repository import Layout, ReleaseSigning
from enginegate.repository.store.object_client import ObjectStore
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.store.staging import place


class TestStorage:
    """What S3 promises, and how its failures read. Needs no Triton."""

    def test_an_object_is_written_read_and_digested(self, store, tmp_path):
        """The same bytes come back by every way, and a key below is listed."""
        (tmp_path / "file").write_bytes(b"engine" * 1000)
        store.upload(tmp_path / "file", "digits/1/engine.bin")

        store.download("digits/1/engine.bin", tmp_path / "back")

        assert (tmp_path / "back").read_bytes() == b"engine" * 1000
        assert store.digest("digits/1/engine.bin").size_bytes == 6000
        assert store.keys("digits/1") == ("digits/1/engine.bin",)
        assert store.keys("digits/1/engine.bin.") == store.keys("nothing/") == ()
        assert store.read("digits/2") is None

    def test_conditions_keep_writers_apart(self, store):
        """Only one creates, and a replacement needs the tag of what is there."""
        store.check_conditions()
        assert store.create("key", b"1")
        assert not store.create("key", b"2")
        old = store.read("key").tag
        assert store.replace("key", b"3", old)
        assert not store.replace("key", b"4", old)
        assert not store.replace("key", b"5", None)
        assert not store.replace("none", b"6", old)

        assert store.read("key").content == b"3"

    def test_a_write_whose_answer_was_lost_counts(self, store):
        """The repeated request is refused because the first one was carried out."""
        store.create("key", b"mine")

        assert store.create("key", b"mine")

    @pytest.mark.parametrize(
        ("change", "url", "message"),
        [
            ({"AWS_ACCESS_KEY_ID": None}, "s3://releases/x", "Set AWS_ACCESS_KEY_ID"),
            ({}, "s3://nobody-made-this/x", "Make the bucket"),
            (
                {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
                "s3://releases/x",
                "names a server that runs",
            ),
        ],
        ids=["no-credentials", "no-bucket", "connection-refused"],
    )
    def test_what_is_wrong_is_said(self, environment, change, url, message):
        """With the remedy, and never with a secret."""
        for name, value in change.items():
            if value is None:
                environment.delenv(name)
            else:
                environment.setenv(name, value)

        with pytest.raises(RepositoryError, match=message) as caught:
            ObjectStore(url).read("a")

        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


class TestReleases:
    """Releases as objects. Needs no Triton."""

    @pytest.mark.parametrize("parts", [False, True], ids=["one-model", "ensemble"])
    def test_a_release_comes_back_as_it_was(self, store, placed, tmp_path, parts):
        """Every file with its digest, the manifest among them; and it can be forgotten."""
        root, release = placed(parts=parts)
        releases = ObjectReleases(store, "digits")
        releases.upload(root, release)
        releases.check(1)

        copy = releases.fetch(1, tmp_path / "fetched")

        assert copy.release == release
        (tmp_path / "host").mkdir()
        assert place(Layout(tmp_path / "host", "digits"), copy, 1, None) == release
        ReleaseFiles(Layout(tmp_path / "host", "digits"), release).check()
        releases.forget(1)
        assert (releases.versions(), releases.has_bytes(1)) == ((1,), False)
        assert [key for key in store.keys("digits.") if "/1/" in key] == []
        releases.remove(1)
        assert store.keys("") == ()

    @pytest.mark.parametrize(
        ("key", "content", "message"),
        [
            ("digits/1/engine.bin", b"9.0", r"digits/1/engine\.bin is not the object that was"),
            ("digits/releases/1.golden.npz", b"", r"1\.golden\.npz is not the object that was"),
            ("digits/releases/1.json", b"{}", r"releases/1\.json is not a"),
            ("digits/releases/1.files.json", b"{", r"1\.files\.json is missing or damaged"),
            (
                "digits/releases/1.files.json",
                b'{"files": {"digits/../../etc/x": {"sha256": "%s", "size_bytes": 1}}}'
                % (b"a" * 64),
                "not its own",
            ),
        ],
        ids=["engine", "golden", "manifest", "contents", "path-outside"],
    )
    def test_what_was_altered_after_the_upload_is_named(
        self, store, placed, tmp_path, key, content, message
    ):
        """When it is checked, and when another host fetches it."""
        root, release = placed()
        releases = ObjectReleases(store, "digits")
        releases.upload(root, release)

        store.write(key, content)

        with pytest.raises(TamperedError, match=message):
            releases.check(1)
        if not key.endswith("1.json"):
            with pytest.raises(TamperedError, match=message):
                releases.fetch(1, tmp_path / "fetched")
        assert not (tmp_path / "etc").exists()

    def test_a_signature_travels_with_its_release(self, store, placed, tmp_path):
        """A host that only has the public key can check it."""
        root, release = placed()
        keys = tmp_path / "keys"
        signing = ReleaseSigning(required=True, private_key=None, public_key=None, keys=keys)
        signing.sign(ReleaseFiles(Layout(root, "digits"), release).signed())
        ObjectReleases(store, "digits").upload(root, release)

        copy = ObjectReleases(store, "digits").fetch(1, tmp_path / "fetched")
        (tmp_path / "host").mkdir()
        host = Layout(tmp_path / "host", "digits")
        place(host, copy, 1, None)

        elsewhere = ReleaseSigning(
            required=True,
            private_key=None,
            public_key=keys / "release.pub",
            keys=tmp_path / "none",
        )
        signed = ReleaseFiles(host, release).signed()
        assert elsewhere.check(signed) == ""
        engine = host.version_folder(1) / "engine.bin"
        engine.chmod(0o644)
        engine.write_text("9.0")
        with pytest.raises(TamperedError, match="does not hold"):
            elsewhere.check(signed)

    def test_bytes_that_come_back_changed_end_the_upload(self, store, placed, monkeypatch):
        """Without a manifest it is no release; what is left of it can be found and removed."""
        root, release = placed(2)
        releases = ObjectReleases(store, "digits")
        upload = ObjectStore.upload

        def upload_damaged(self, path, key):
            upload(self, path, key)
            if key.endswith("engine.bin"):
                self.write(key, b"damaged")

        monkeypatch.setattr(ObjectStore, "upload", upload_damaged)
        with pytest.raises(TamperedError, match=r"2/engine\.bin"):
            releases.upload(root, release)

        assert (releases.versions(), releases.stray()) == ((), (2,))
        releases.remove(2)
        assert store.keys("digits/") == ()
