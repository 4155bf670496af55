"""Messages arrive at a real server, or it is said why not; addresses are said nowhere."""

import logging
import socket
import threading

import pytest

from enginegate.errors import InputError
from enginegate.notifications import (
    SETTING,
    Message,
    Receivers,
    combined,
    receivers,
    receivers_of_environment,
    receivers_of_text,
)
from tests.fakes.inbox import PASSWORD, TOKEN, inbox
from tests.fakes.notices import notice


@pytest.fixture(name="inbox")
def _inbox():
    with inbox() as made:
        yield made


def dead_address():
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"json://ada:{PASSWORD}@127.0.0.1:{free.getsockname()[1]}/{TOKEN}"


def test_one_receiver_gets_it_while_others_are_dead_or_refuse(inbox, caplog):
    """Each by itself; and nothing of an address is in an answer, a log or a representation."""
    caplog.set_level(logging.DEBUG)
    found = receivers_of_text(
        f"# my room\n{dead_address()}\n{inbox.address} unknown://{TOKEN}\n", SETTING
    )
    message = Message("digits broke", 'Its p99 is "9 ms" \\n é', "failure")

    answers = found.send(dict.fromkeys(found.labels, message))

    assert {each.receiver: each.why for each in answers} == {
        "1 (json)": "could not be reached",
        "2 (json)": "",
        "3 (unknown)": "Apprise does not take this address",
    }
    (got,) = inbox.posted
    assert (got["title"], got["message"], got["type"]) == (message.title, message.body, "failure")
    said = f"{answers} {found!r} {found.labels} {caplog.text}"
    assert TOKEN not in said
    assert PASSWORD not in said


def test_refusal_is_told_by_its_status(inbox):
    """A wrong token is the fault that people make; 403 says so, Apprise's own words would tell."""
    inbox.status = 403
    found = receivers_of_text(inbox.address, SETTING)

    (answer,) = found.send({"1 (json)": Message("a", "b")})

    assert answer.why == "refused with HTTP 403"


def test_receiver_that_never_answers_is_given_up(inbox, monkeypatch):
    """Its address asks for a minute's patience; a flow has less."""
    inbox.hangs = threading.Event()
    monkeypatch.setattr(receivers, "_DEADLINE_S", 1.0)

    (answer,) = receivers_of_text(inbox.address, SETTING).send({"1 (json)": Message("a", "b")})

    assert answer.why == "no answer in 1 s"


def test_receiver_without_a_message_gets_none(inbox):
    """Only those that lack something are asked."""
    assert receivers_of_text(inbox.address, SETTING).send({}) == ()
    assert inbox.posted == []


@pytest.mark.parametrize(
    ("text", "said"),
    [(TOKEN, "number 1 of 1"), (f"json://h/ {TOKEN}", "number 2 of 2"), ("# none", "holds none")],
)
def test_what_is_no_address_is_refused_without_repeating_it(monkeypatch, text, said):
    """Somebody may have pasted the token alone."""
    monkeypatch.setenv(SETTING, text)

    with pytest.raises(InputError, match=said) as raised:
        receivers_of_environment()

    assert TOKEN not in str(raised.value)


def test_environment_may_name_a_file(monkeypatch, tmp_path):
    """As a mounted secret is; one that cannot be read is named, and nothing set means nobody."""
    path = tmp_path / "addresses"
    path.write_text(f"json://host/{TOKEN}\n")
    monkeypatch.setenv(SETTING, str(path))
    assert receivers_of_environment() == Receivers(
        (f"json://host/{TOKEN}",), f"{path}, which {SETTING} names"
    )

    path.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        receivers_of_environment()

    monkeypatch.setenv(SETTING, " ")
    assert receivers_of_environment() is None


def test_several_notices_are_one_message_of_the_worst_mood():
    """A run that finds a hundred things sends one message that a messenger takes."""
    few = combined([notice(2, mood="failure"), notice(1, mood="success")])
    assert few.title == "title 2, and 1 more"
    assert few.body == "title 2\nbody 2\n\ntitle 1\nbody 1"
    assert few.mood == "failure"

    many = combined([notice(number) for number in range(500)])

    assert many.title == "title 0, and 499 more"
    assert len(many.body) <= 1800
    assert combined([notice(3)]) == Message("title 3", "body 3", "info")
