"""What a message may say of an address."""

import pytest

from enginegate.masking import masked


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("GET https://ada:secret@host:42/api failed", "GET https://***@host:42/api failed"),
        ("https://ada:sec@ret@host/api", "https://***@host/api"),
        ("postgresql://ada@db/mlflow", "postgresql://***@db/mlflow"),
        ("http://host/api?by=ada@host", "http://host/api?by=ada@host"),
        ("ask ada@host", "ask ada@host"),
    ],
)
def test_an_address_keeps_its_password_for_itself(text, said):
    """Everything before its last @; what is no sign-in stays."""
    assert masked(text) == said
