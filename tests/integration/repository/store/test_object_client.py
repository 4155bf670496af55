"""What object storage keeps, as a real S3 API server does; needs no Triton."""

import os

import pytest

from enginegate.errors import RepositoryError
from enginegate.repository.store.object_client import ObjectStore


class TestStorage:
    """What S3 promises, and how its failures read. Needs no Triton."""

    def test_object_is_written_read_and_digested(self, store, tmp_path):
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

    def test_write_whose_answer_was_lost_counts(self, store):
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
    def test_errors_name_the_remedy_and_no_secret(self, environment, change, url, message):
        """With the remedy, and never with a secret."""
        for name, value in change.items():
            if value is None:
                environment.delenv(name)
            else:
                environment.setenv(name, value)

        with pytest.raises(RepositoryError, match=message) as caught:
            ObjectStore(url).read("a")

        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
