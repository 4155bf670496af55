"""What a message may say of an address: everything but who signs in there, and with what."""

import re
from urllib.parse import urlsplit

_SIGN_IN = re.compile(r"(?<=//)[^/\s]*@")
# A query's or a fragment's values: which of their names are secret is nobody's to guess.
_QUERY_VALUE = re.compile(r"([?&#;][\w.~%-]+=)[^&#\s\"'<>]+")


class MaskedError(Exception):
    """Stands for another library's exception, whose text may say how somebody signs in."""


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
