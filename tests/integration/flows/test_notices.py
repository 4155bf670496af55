"""Messages of flows on a real Prefect server, whose Secret block has the addresses."""

import json
import logging

import pytest
from prefect.blocks.system import Secret
from prefect.client.orchestration import get_client
from prefect.exceptions import Pause
from prefect.settings import PREFECT_UI_URL
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import InputError, ServerError
from enginegate.policy import read_policy
from enginegate.workspace import Workspace
from flows import notices
from flows.watch import watch
from tests.fakes.authentic import keep
from tests.fakes.deployed import Deployed
from tests.fakes.evidence import scorecard
from tests.fakes.family import _POLICY as POLICY
from tests.fakes.inbox import PASSWORD, TOKEN, inbox

pytestmark = pytest.mark.xdist_group("flows")


@pytest.fixture
def room(prefect_server):
    """A receiver whose address a person saved on the server; no worker's environment has it."""
    del prefect_server  # it only has to run
    with inbox() as made:
        saved = CliRunner().invoke(app, ["notify", "save"], input=f"{made.address}\n")
        assert saved.exit_code == 0, (saved.output, saved.exception)
        assert "1 (json)" in saved.output
        yield made
    Secret.delete(notices.BLOCK)


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """One under which nothing is live."""
    monkeypatch.setenv("ENGINEGATE_HOME", str(tmp_path / "workspace"))
    path = tmp_path / "policy.toml"
    path.write_text(POLICY.format(root=tmp_path))
    return path


def everything_on(run):
    """What Prefect's pages have of a run and of the block, as anybody may read it."""
    with get_client(sync_client=True) as client:
        blocks = client.read_block_documents(include_secrets=False)
        logs = client.read_logs()
        states = client.read_flow_run_states(run.id)
        found = [client.read_flow_run(run.id), *blocks, *logs, *states]
    return " ".join(each.model_dump_json() for each in found)


def test_suspended_promotion_tells_people_where_to_answer(room, policy, caplog):
    """Once, with the page of the run; when the run goes on nobody is told again."""
    caplog.set_level(logging.DEBUG)
    rules = read_policy(policy)
    card = scorecard(model="tiny", model_uri="models:/tiny/1", policy_sha256=rules.digest)
    keep(card, rules, Workspace.here())
    run = Deployed(policy, card.digest)

    for _ in range(2):
        with pytest.raises(Pause):
            run.step()

    (told,) = room.posted
    assert told["title"] == "tiny v1 waits for an approval"
    assert f"{PREFECT_UI_URL.value()}/runs/flow-run/{run.id}" in told["message"]
    assert "means no" in told["message"]
    assert f"enginegate approve {card.digest[:12]} --reason WHY" in told["message"]
    said = f"{caplog.text} {everything_on(run)} {json.dumps(room.posted)}"
    for secret in (TOKEN, PASSWORD):
        assert secret not in said


def test_errored_watch_tells_people_once_and_when_it_is_over(room, policy, monkeypatch):
    """By the flow itself, whatever it fails of."""

    def dead(*_):
        raise ServerError("127.0.0.1:1 does not answer")

    with monkeypatch.context() as patch:
        patch.setattr("flows.watch.verify_live", dead)
        for _ in range(2):
            with pytest.raises(ServerError):
                watch(policy, 0.0)
    watch(policy, 0.0)
    watch(policy, 0.0)

    assert room.titles == [
        "tiny: what is live could not be measured",
        "tiny: the watch is well again",
    ]
    assert "/runs/flow-run/" in room.posted[0]["message"]


def test_addresses_are_tried_by_command(room):
    """As the flows of a worker find them; a receiver that refuses ends the command with 5."""
    done = CliRunner().invoke(app, ["notify", "test", "--json"])
    assert room.titles == ["Enginegate can reach you"]
    found = json.loads(done.stdout)
    assert found["receivers"] == [{"receiver": "1 (json)", "why_not": ""}]
    assert "Secret block" in found["origin"]

    room.status = 403
    refused = CliRunner().invoke(app, ["notify", "test"])

    assert refused.exit_code == 5
    assert "receiver 1 (json): refused with HTTP 403" in refused.output
    assert TOKEN not in done.output + refused.output


def test_without_addresses_the_command_says_where_they_belong(monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    done = CliRunner().invoke(app, ["notify", "test"])

    assert isinstance(done.exception, InputError)
    assert "ENGINEGATE_NOTIFY" in str(done.exception)
