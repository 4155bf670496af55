"""A messenger: a real HTTP server, what was posted to it, and its moods."""

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "t0ken-of-the-room"  # noqa: S105 - looked for in everything that is said
PASSWORD = "pa55word"  # noqa: S105


@dataclass
class Inbox:
    """What arrived, and how the server answers.

    Attributes:
        port: of 127.0.0.1.
        posted: each message as Apprise's json:// posts it.
        status: that is answered.
        hangs: until this is set, nothing is answered.
    """

    port: int
    posted: list[dict] = field(default_factory=list)
    status: int = 200
    hangs: threading.Event | None = None

    @property
    def address(self):
        """As somebody would write it, with secrets in it."""
        return f"json://ada:{PASSWORD}@127.0.0.1:{self.port}/{TOKEN}?rto=60"

    @property
    def titles(self):
        return [each["title"] for each in self.posted]


@contextmanager
def inbox():
    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if made.hangs is not None:
                made.hangs.wait(60)
                return
            if made.status == 200:
                made.posted.append(body)
            self.send_response(made.status)
            self.end_headers()

        def log_message(self, *_):
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    server.daemon_threads = True
    made = Inbox(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        if made.hangs is not None:
            made.hangs.set()
        server.shutdown()
        server.server_close()
        thread.join()
