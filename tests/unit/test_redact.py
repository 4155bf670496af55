"""What a message may say of an address."""

import pytest

from enginegate.redact import environment_for_others, masked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("GET https://ada:secret@host:42/api failed", "GET https://***@host:42/api failed"),
        ("https://ada:sec@ret@host/api", "https://***@host/api"),
        ("postgresql://ada@db/mlflow", "postgresql://***@db/mlflow"),
        ("http://host/api?by=ada@host", "http://host/api?by=***"),
        ("http://host?token=abc: refused", "http://host?token=*** refused"),
        ("http://h/p?a=1&access_key=x%2F#/runs", "http://h/p?a=***&access_key=***#/runs"),
        ("with url: /?token=abc/api/2.0/get (Caused by", "with url: /?token=*** (Caused by"),
        ("'http://h?token=abc'", "'http://h?token=***'"),
        ("http://h/#access_token=abc", "http://h/#access_token=***"),
        ("is it a = b? yes; c=1", "is it a = b? yes; c=1"),
        ("ask ada@host", "ask ada@host"),
    ],
)
def test_address_is_shown_without_credentials(text, said):
    """Everything before its last @, and what a query says; what is no sign-in stays."""
    assert masked(text) == said


def test_servers_and_builders_do_not_get_what_only_this_program_needs(monkeypatch):
    """Receivers' addresses and the passphrase stay; a registry's credentials go along."""
    monkeypatch.setenv("ENGINEGATE_NOTIFY", "slack://TOKEN")
    monkeypatch.setenv("ENGINEGATE_BACKUP_PASSPHRASE", "correct horse battery")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "registry")
    found = environment_for_others()
    assert not {"ENGINEGATE_NOTIFY", "ENGINEGATE_BACKUP_PASSPHRASE"} & found.keys()
    assert found["MLFLOW_TRACKING_PASSWORD"] == "registry"  # noqa: S105 - no password
