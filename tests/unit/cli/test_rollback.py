"""What going back refuses before it looks at anything."""

import pytest
from typer.testing import CliRunner

from enginegate.cli.app import app
from enginegate.errors import EnginegateError, ExitCode


@pytest.mark.parametrize("number", ["0", "-1"])
def test_unknown_release_number_is_bad_input(number):
    """It is the option that is wrong, whatever is live."""
    refused = CliRunner().invoke(app, ["rollback", "nowhere.toml", "--to", number]).exception

    assert isinstance(refused, EnginegateError)
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert f"--to {number} is no release number" in str(refused)
