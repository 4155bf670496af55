"""The Python API on a live Triton, and the live model called with a labelled sample."""

import io
import json
import subprocess
from contextlib import redirect_stdout

import pytest
from typer.testing import CliRunner

import enginegate
from enginegate.cli.app import app
from enginegate.policy import read_policy
from tests.fakes.authentic import decide

pytestmark = [pytest.mark.triton, pytest.mark.xdist_group("flows")]


def call(*arguments):
    done = CliRunner().invoke(app, ["call", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_model_goes_live_by_three_calls_and_answers(live, family, capsys):
    """Records in, records out; the lines that `call` prints get the very same answer."""
    card = enginegate.qualify(live)
    assert card.winner is not None
    with pytest.raises(enginegate.ApprovalError):
        enginegate.promote(live, card.scorecard)
    decide(family.workspace.scorecard(card.scorecard), read_policy(live), family.workspace)

    released = enginegate.promote(live, card.scorecard)
    state = enginegate.status(live).models[0]

    assert (released.action, released.release.version) == ("published", 1)
    assert (state.state, state.promised_by) == ("live", card.scorecard)
    assert capsys.readouterr().out == ""

    found = json.loads(call(live, "--sample", 3, "--sample", 5, "--json"))
    (output,) = found["samples"][0]["outputs"]
    assert [sample["sample"] for sample in found["samples"]] == [3, 5]
    assert (output["name"], output["shape"], output["agrees"]) == ("logits", [1, 4], True)
    assert output["label"] == [output["answer"]]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(found["python"], {})  # noqa: S102 - it is what a user copies
    assert printed.getvalue().startswith("logits [[")
    answer = subprocess.run(found["curl"], shell=True, capture_output=True, check=True)  # noqa: S602
    assert json.loads(answer.stdout)["outputs"][0]["data"] == pytest.approx(output["values"])

    shown = call(live, "--sample", 3)
    assert f"answer   {output['answer']}" in shown
    assert "agrees" in shown
    refused = CliRunner().invoke(app, ["call", str(live), "--sample", "100000"]).exception
    assert "--sample 100000" in str(refused)
