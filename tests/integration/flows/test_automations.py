"""The automations that are shipped, on a real Prefect server, up to the message that arrives."""

import json
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prefect import flow
from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Suspended
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import EnginegateError, InputError
from flows.automations import BLOCK, SHIPPED, apply_automations
from tasks.watch import alert

pytestmark = pytest.mark.xdist_group("flows")

NAMES = {
    "enginegate-approval-waiting",
    "enginegate-promise-broken",
    "enginegate-watch-silent",
}
_PATIENCE_S = 60.0


@pytest.fixture
def inbox():
    """A webhook: its address, and what was posted to it."""
    posted = queue.Queue()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/secret", posted
    server.shutdown()
    server.server_close()


@pytest.fixture
def applied(prefect_server, inbox):
    """The shipped automations on the server, by the command, twice; taken away afterwards."""
    del prefect_server  # it only has to run
    said = [CliRunner().invoke(app, ["automations", "--webhook", inbox[0]]) for _ in range(2)]
    yield said
    for name in NAMES:
        Automation.read(name=name).delete()
    Webhook.delete(BLOCK)


def arrives(posted, act, word):
    """The message with a word; the act is repeated: the server may not look for it at once."""
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s:
        act()
        try:
            while word not in (text := posted.get(timeout=5.0)["text"]):
                pass
        except queue.Empty:
            continue
        return text
    pytest.fail(f"no message about {word}")


def suspended_promotion():
    """A run of a flow that is called like ours, as it is while it waits."""

    @flow(name="promote")
    def promote(scorecard):
        del scorecard

    with get_client(sync_client=True) as client:
        run = client.create_flow_run(promote, parameters={"scorecard": "4f1c6ab21d05aaaa"})
        client.set_flow_run_state(run.id, Suspended(timeout_seconds=600), force=True)


def test_automations_are_applied_and_post_messages(applied, inbox):
    """Twice is once; a broken promise and a promotion that waits are posted, in words."""
    first, second = applied
    assert first.exit_code == second.exit_code == 0, (first.output, first.exception)
    assert first.output.count("was created") == len(NAMES)
    assert second.output.count("was updated") == len(NAMES)
    with get_client(sync_client=True) as client:
        there = {each.name: each for each in client.read_automations()}
    assert set(there) == NAMES
    assert all(each.enabled for each in there.values())
    assert inbox[0] not in str(there)

    why = 'Release 2 of tiny broke "its promise"'
    broken = arrives(inbox[1], lambda: alert.fn("tiny", why, version=2), "broke")
    waits = arrives(inbox[1], suspended_promotion, "waits")

    assert broken == f"tiny: {why}"
    assert "enginegate approve 4f1c6ab21d05 --reason WHY" in waits


def test_every_file_is_an_automation_that_was_applied():
    """A file that nobody looks at is no automation."""
    assert {path.stem for path in SHIPPED.glob("*.yaml")} == {
        name.removeprefix("enginegate-") for name in NAMES
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "cannot be read as YAML"),
        ("- 1", "holds no automation"),
        ("name: x\nactions: []", "is no automation"),
        (None, "holds no"),
    ],
)
def test_malformed_automation_file_is_named(prefect_server, tmp_path, text, said):
    """Before anything is changed on the server."""
    del prefect_server  # it only has to run
    if text is not None:
        (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(InputError, match=said) as raised:
        apply_automations("http://127.0.0.1:1", tmp_path)

    assert str(tmp_path) in str(raised.value)


def test_without_an_address_or_a_server_it_says_what_to_give(prefect_server):
    """No block, no address; no server; an address that is none; a server that is away."""
    del prefect_server  # it only has to run
    with pytest.raises(InputError, match="--webhook URL"):
        apply_automations(None)
    with pytest.raises(InputError, match="http://"):
        apply_automations("slack")
    with temporary_settings({PREFECT_API_URL: ""}), pytest.raises(InputError, match="API_URL"):
        apply_automations("http://127.0.0.1:1")
    away = {PREFECT_API_URL: "http://127.0.0.1:9/api"}
    with temporary_settings(away), pytest.raises(EnginegateError, match="did not take"):
        apply_automations("http://127.0.0.1:1")
