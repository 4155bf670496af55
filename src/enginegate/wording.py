"""Numbers and counts as people write them: one way, everywhere."""

import math

_MOST_DECIMALS = 6


def short_number(value: float, digits: int = 3) -> str:
    """A number with at least ``digits`` digits that count, whole thousands apart, no exponent.

    1234.5 is ``1,235``, 53.7965 is ``53.8``, 0.004213 is ``0.00421``; trailing zeros are left out.
    What is smaller than a millionth keeps its exponent: it has no other short form.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -_MOST_DECIMALS:
        return f"{value:.{digits}g}"
    text = f"{value:,.{max(0, digits - 1 - magnitude)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def per_second(per_s: float) -> str:
    """A rate of requests, for example ``53.8/s``."""
    return f"{short_number(per_s, 4)}/s"


def counted(count: int, one: str, many: str = "") -> str:
    """``1 configuration``, ``2 configurations``; ``many`` where it is not ``one`` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
