"""Releases in object storage, on a real S3 API server; needs no Triton."""

import pytest

from enginegate.errors import TamperedError
from enginegate.object_storage import ObjectStore
from enginegate.repository import Layout, ReleaseSigning
from enginegate.repository.store.object_release import ObjectReleases
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.store.staging import place


class TestReleases:
    """Releases as objects. Needs no Triton."""

    @pytest.mark.parametrize("parts", [False, True], ids=["one-model", "ensemble"])
    def test_release_comes_back_as_it_was(self, store, placed, tmp_path, parts):
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
    def test_object_altered_after_the_upload_is_named(
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

    def test_signature_travels_with_its_release(self, store, placed, tmp_path):
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
        with pytest.raises(TamperedError, match="is not valid"):
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
