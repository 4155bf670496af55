"""Options about samples that cannot be meant."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import ExitCode, InputError

POLICY = Path(__file__).parents[3] / "policies" / "digits.toml"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_recording_for_no_time_is_wrong_use(seconds):
    """It is refused before anything is connected to."""
    command = ["shadow", "record", "nowhere.toml", "--endpoint", "h:1", "--seconds", seconds]

    refused = CliRunner().invoke(app, command)

    assert refused.exit_code == ExitCode.USAGE
    assert "--seconds" in refused.output


@pytest.mark.parametrize("shape", ["x", "x=", "=1", "x=a", "x=-1,8", "x=0"])
def test_shape_of_no_row_is_refused(tmp_path, shape):
    """With an example of one that is."""
    policy = shutil.copy(POLICY, tmp_path)

    refused = CliRunner().invoke(app, ["shadow", "import", policy, "x.npz", "--shape", shape])

    assert isinstance(refused.exception, InputError)
    assert "input.image=1,8,8" in str(refused.exception)
