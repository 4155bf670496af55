"""Object storage as real servers of S3 and of Azure's Blob API keep it, also through faults."""

import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

import pytest

from enginegate.errors import InputError, RepositoryError
from enginegate.object_storage import ObjectStore, client
from tests.fakes.fault_proxy import Fault


class TestStorage:
    """What each provider promises."""

    def test_object_is_written_read_and_digested(self, any_store, tmp_path):
        """The same bytes come back by every way, and a key below is listed."""
        (tmp_path / "file").write_bytes(b"engine" * 1000)
        any_store.upload(tmp_path / "file", "digits/1/engine.bin")

        any_store.download("digits/1/engine.bin", tmp_path / "back")

        assert (tmp_path / "back").read_bytes() == b"engine" * 1000
        assert any_store.digest("digits/1/engine.bin").size_bytes == 6000
        assert any_store.keys("digits/1") == ("digits/1/engine.bin",)
        assert any_store.keys("digits/1/engine.bin.") == any_store.keys("nothing/") == ()
        assert any_store.read("digits/2") is None
        any_store.delete("digits/1/engine.bin")
        any_store.delete("digits/1/engine.bin")
        assert any_store.keys("") == ()

    def test_conditions_keep_writers_apart(self, any_store):
        """Only one creates, and a replacement needs the tag of what is there."""
        any_store.check_conditions()
        assert any_store.create("key", b"1")
        assert not any_store.create("key", b"2")
        old = any_store.read("key").tag
        assert any_store.replace("key", b"3", old)
        assert not any_store.replace("key", b"4", old)
        assert not any_store.replace("key", b"5", None)
        assert not any_store.replace("none", b"6", old)

        assert any_store.read("key").content == b"3"

    @pytest.mark.parametrize(
        ("kind", "words"), [(str, "where there is no object yet"), (dict, "over one version")]
    )
    def test_storage_that_ignores_a_condition_is_refused(self, any_store, kind, words):
        """Whether it ignores that of a first write or that of a replacement."""
        backend = any_store._backend

        class Careless:
            def __getattr__(self, name):
                return getattr(backend, name)

            def put(self, key, content, mode="overwrite"):
                ignored = isinstance(mode, kind)
                return backend.put(key, content, mode="overwrite" if ignored else mode)

        any_store.__dict__["_backend"] = Careless()
        with pytest.raises(RepositoryError, match=words):
            any_store.check_conditions()

    def test_write_whose_answer_was_lost_counts(self, any_store):
        """The repeated request is refused because the first one was carried out."""
        any_store.create("key", b"mine")

        assert any_store.create("key", b"mine")


class TestFaults:
    """Through a proxy that loses answers, is slow, or says that the server is overloaded."""

    def test_carried_out_write_whose_connection_was_reset_counts_once(self, faulty):
        """Ours is found there; somebody else's is not taken for ours."""
        store, proxy = faulty
        proxy.add(Fault("lost"))
        assert store.create("journal", b"mine")
        tag = store.read("journal").tag
        proxy.add(Fault("lost"))
        assert store.replace("journal", b"mine, later", tag)
        proxy.add(Fault("lost"))
        assert not store.create("journal", b"somebody else's")
        proxy.add(Fault("lost"))
        assert not store.replace("journal", b"too late", tag)

        assert store.read("journal").content == b"mine, later"

    def test_write_that_arrives_after_its_connection_was_reset_changes_nothing(self, faulty):
        """It was repeated on its condition meanwhile, which the late one no longer meets."""
        store, proxy = faulty
        store.create("pointer", b"first")
        tag = store.read("pointer").tag
        proxy.add(Fault("late", seconds=0.3))

        assert store.replace("pointer", b"second", tag)
        assert store.replace("pointer", b"third", store.read("pointer").tag)

        assert proxy.done.wait(10)
        assert store.read("pointer").content == b"third"

    @pytest.mark.parametrize("status", [500, 503])
    def test_single_refusal_is_asked_again(self, faulty, status):
        """A server that fails once costs a repeated request, whatever is asked."""
        store, proxy = faulty
        for method in ("PUT", "GET"):
            proxy.add(Fault("status", method=method, status=status, retry_after_s=1))
        assert store.create("key", b"1")
        assert store.read("key").content == b"1"
        assert [fault for _, _, fault in proxy.seen].count("status") == 2

    def test_overloaded_storage_is_given_the_seconds_it_asks_for(self, faulty, monkeypatch):
        """The library alone gives up after four attempts in half a second."""
        store, proxy = faulty
        monkeypatch.setattr(client, "_WAITS_S", (0.01, 0.02))
        proxy.add(Fault("status", status=503, retry_after_s=2, times=9))
        assert store.create("key", b"1")
        assert [fault for _, _, fault in proxy.seen] == ["status"] * 9 + [""]

        proxy.add(Fault("status", status=503, times=99))
        with pytest.raises(RepositoryError, match=r"Cannot write .*/other: (?s:.*)503"):
            store.create("other", b"1")

    def test_reading_goes_on_where_the_connection_was_cut(self, faulty, tmp_path):
        """A download and a digest that end in the middle of the body are whole all the same."""
        store, proxy = faulty
        content = os.urandom(1 << 20)
        store.write("engine", content)
        for _ in range(2):
            proxy.add(Fault("cut", method="GET"))

        store.download("engine", tmp_path / "engine")

        assert (tmp_path / "engine").read_bytes() == content
        assert store.digest("engine").size_bytes == len(content)

    def test_large_upload_survives_lost_answers(self, faulty, tmp_path):
        """Of a part, and of the request that makes one object of all parts."""
        store, proxy = faulty
        (tmp_path / "engine").write_bytes(os.urandom(6 << 20))
        proxy.add(Fault("lost", path="engine"))
        proxy.add(Fault("lost", path="comp=blocklist"))
        proxy.add(Fault("lost", method="POST", path="engine?uploadId"))

        store.upload(tmp_path / "engine", "engine")

        assert store.digest("engine").size_bytes == 6 << 20
        assert [fault for _, _, fault in proxy.seen].count("lost") == 2

    def test_deletion_and_list_survive_a_lost_answer(self, faulty):
        """Deleting twice is deleting once."""
        store, proxy = faulty
        store.write("key", b"1")
        proxy.add(Fault("lost", method="GET"))
        assert store.keys("") == ("key",)
        proxy.add(Fault("lost", method="DELETE"))
        proxy.add(Fault("lost", method="POST"))
        store.delete("key")
        assert store.keys("") == ()

    def test_slow_storage_is_waited_for(self, faulty):
        """Its answer counts whenever it comes within the time that silence may last."""
        store, proxy = faulty
        proxy.add(Fault("slow", seconds=0.3))
        started = time.monotonic()
        assert store.create("key", b"1")
        assert time.monotonic() - started >= 0.3


class TestErrors:
    """Each names its remedy, and no secret."""

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
    def test_s3(self, environment, change, url, message):
        for name, value in change.items():
            if value is None:
                environment.delenv(name)
            else:
                environment.setenv(name, value)

        with pytest.raises(RepositoryError, match=message) as caught:
            ObjectStore(url).read("a")

        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "url", "message"),
        [
            ({"AZURE_STORAGE_ACCOUNT_NAME": None}, "az://releases/x", "Set AZURE_STORAGE_ACCOUNT"),
            ({}, "az://nobody-made-this/x", "Make the container"),
            ({"AZURE_STORAGE_ACCOUNT_KEY": "AAAA"}, "az://releases/x", "AZURE_STORAGE_ACCOUNT_KEY"),
            (
                {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9/devstoreaccount1"},
                "az://releases/x",
                "names a server that runs",
            ),
        ],
        ids=["no-account", "no-container", "wrong-key", "connection-refused"],
    )
    def test_azure(self, request, monkeypatch, change, url, message):
        from tests.fakes.object_servers import azure_settings

        settings = azure_settings(request.getfixturevalue("azure_endpoint"))
        for name, value in {**settings, **change}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

        with pytest.raises(RepositoryError, match=message) as caught:
            ObjectStore(url).read("a")

        assert settings["AZURE_STORAGE_ACCOUNT_KEY"] not in str(caught.value)

    @pytest.mark.parametrize("url", ["ftp://bucket/x", "s3://b", "gs://bucket/../x y"])
    def test_address_of_nothing_known(self, url):
        with pytest.raises(InputError, match="gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"):
            ObjectStore(url)


def test_google_conditions_are_on_generations(monkeypatch):
    """A first write asks for generation 0, a replacement for the generation that was read.

    No server of Google's protocol can be had here: this one only notes what it is asked.
    """
    asked = []

    class Noting(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers["x-goog-if-generation-match"]))
            self.answer(412 if len(asked) == 3 else 200)

        def do_GET(self):
            self.answer(200, b"content")

        def answer(self, status, body=b""):
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"tag"')
            self.send_header("x-goog-generation", "1712")
            self.send_header("Last-Modified", "Sun, 22 Nov 2026 10:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Noting)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv(
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        f'{{"gcs_base_url": "{address}", "disable_oauth": true, "client_email": "", '
        '"private_key": "", "private_key_id": ""}',
    )
    monkeypatch.setenv("GOOGLE_BASE_URL", address)
    store = ObjectStore("gs://releases/live")

    assert store.create("current.json", b"1")
    assert store.replace("current.json", b"2", store.read("current.json").tag)
    assert not store.replace("current.json", b"3", "1711")
    server.shutdown()
    server.server_close()

    assert [match for _, match in asked] == ["0", "1712", "1711"]
    assert {unquote(path) for path, _ in asked} == {"/releases/live/current.json"}
