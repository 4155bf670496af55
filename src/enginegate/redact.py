"""What is said of servers elsewhere: addresses without who signs in there, and a slow answer."""

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_OWN_SECRETS = frozenset({"ENGINEGATE_NOTIFY", "ENGINEGATE_BACKUP_PASSPHRASE"})
_SIGN_IN = re.compile(r"(?<=//)[^/\s]*@")
# A query's or a fragment's values: which of their names are secret is nobody's to guess.
_QUERY_VALUE = re.compile(r"([?&#;][\w.~%-]+=)[^&#\s\"'<>]+")


class MaskedError(Exception):
    """Stands for another library's exception, whose text may say how somebody signs in."""


def environment_for_others() -> dict[str, str]:
    """This process's environment for servers and builders, which run what other teams made.

    Without the secrets that this program alone needs. Credentials of registries and object storage
    stay: Triton and builders may need them.
    """
    return {name: value for name, value in os.environ.items() if name not in _OWN_SECRETS}


def masked(text: str) -> str:
    """The text without a password or a token of any address in it."""
    return _QUERY_VALUE.sub(r"\1***", _SIGN_IN.sub("***@", text))


def masked_error(error: BaseException) -> MaskedError:
    """What to raise from in its place: a log of the whole chain then holds no secret.

    The place where it was raised is kept, what it was raised from is not.
    """
    stand_in = MaskedError(f"{type(error).__name__}: {masked(str(error))}")
    return stand_in.with_traceback(error.__traceback__)


def link_base(uri: str) -> str:
    """The address that links begin with: without sign-in, query, fragment or a slash at its end."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl().rstrip("/")


_log = logging.getLogger("enginegate.waiting")


@contextmanager
def log_if_slow(sentence: str, *, after_s: float) -> Iterator[None]:
    """Log the sentence once if the block takes longer than ``after_s`` seconds."""
    timer = threading.Timer(after_s, _log.info, args=(sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
