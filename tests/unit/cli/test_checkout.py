"""What is told before Prefect is started, and what Prefect may not tell while it ends."""

import importlib
import logging
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from enginegate.cli import checkout
from enginegate.cli.app import app
from enginegate.errors import PolicyError

_ROOT = Path(__file__).parents[3]
_DIGITS = str(_ROOT / "policies" / "digits.toml")


@pytest.mark.parametrize(
    "command",
    [
        ["qualify", "absent.toml"],
        ["qualify", _DIGITS, "--model", "../digits"],
        ["promote", "absent.toml", "d3e7"],
        ["watch", "absent.toml"],
        ["scan", "absent.toml"],
    ],
)
def test_policy_error_is_found_before_prefect_starts(monkeypatch, command):
    """It takes ten seconds to start, and keeps a failed run of what was a typing error."""

    def start(name):
        raise AssertionError(f"{name} was started")

    for module in ("app", "live.release", "live.watch"):
        monkeypatch.setattr(f"enginegate.cli.{module}.of_checkout", start)

    assert isinstance(CliRunner().invoke(app, command).exception, PolicyError)


def test_prefect_does_not_count_its_events_on_the_terminal(monkeypatch):
    """It does so while the process ends; what goes wrong there is told still."""
    monkeypatch.chdir(_ROOT)
    monkeypatch.syspath_prepend(str(_ROOT))
    monkeypatch.setattr(checkout, "_PREFECT", {})
    monkeypatch.setattr(importlib, "import_module", ModuleType)
    loggers = [logging.getLogger(name) for name in ("EventsWorker", "APILogWorker")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    logging.getLogger().manager._clear_cache()

    checkout.of_checkout("flows.answer")

    assert not any(logger.isEnabledFor(logging.WARNING) for logger in loggers)
    assert all(logger.isEnabledFor(logging.ERROR) for logger in loggers)
