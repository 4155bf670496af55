"""What a message may say of an address: everything but who signs in there, and with what."""

import re


def masked(text: str) -> str:
    """The text without the password of any address in it."""
    return re.sub(r"(?<=//)[^/\s]*@", "***@", text)
