"""What messages are made of: numbers and counts as people write them, and what a file has wrong.

A file's faults are listed key by key, in words that do not need pydantic's.
"""

import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, Field, ValidationError

_MOST_DECIMALS = 6
_UNIT = 1024


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


def byte_size(size_bytes: int) -> str:
    """A number of bytes in the largest unit of which there is one, for example ``1.2 GiB``."""
    size, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= _UNIT and len(units) > 1:
        size, units = size / _UNIT, units[1:]
    return f"{short_number(size)} {units[0]}"


def first_line(error: BaseException) -> str:
    """An error's first line; libraries put traces and advice of their own below it."""
    return str(error).strip().partition("\n")[0]


Place: TypeAlias = tuple[int | str, ...]

_SAID = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text in quotes",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "path_type": "must be a path in quotes",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters or fewer",
    "too_short": "must have {min_length} or more, and has {actual_length}",
    "too_long": "must have {max_length} or fewer, and has {actual_length}",
}
_UNKNOWN = "extra_forbidden"
_ONE_OF = frozenset({"literal_error", "enum"})
_PATTERNS: dict[str, str] = {}


def matching(
    pattern: str, words: str, *, default: Any = ..., description: str | None = None
) -> Any:
    """A text's field that must match ``pattern``; ``words`` say in a message what that is."""
    _PATTERNS[pattern] = words
    return Field(default, pattern=pattern, description=description)


def explain_validation(
    error: ValidationError, model: type[BaseModel] | None = None, *, same_as: Place = ()
) -> str:
    """One line for each problem: where, what, and the value that was given.

    Args:
        error: what pydantic found.
        model: what was read, for what a misspelt key may have meant.
        same_as: a table whose keys its sisters inherit: what is wrong there is said once.
    """
    problems = error.errors(include_url=False)
    said = {(tuple(p["loc"]), p["type"]) for p in problems}
    lines = []
    for problem in problems:
        place = tuple(problem["loc"])
        sister = (*same_as, *place[len(same_as) :])
        inherits = same_as and place[: len(same_as) - 1] == same_as[:-1] and sister != place
        if inherits and (sister, problem["type"]) in said:
            continue
        lines.append(_line(place, dict(problem), model))
    return "\n".join(lines)


def _line(place: Place, problem: Mapping[str, Any], model: type[BaseModel] | None) -> str:
    where = ".".join(str(part) for part in place if not _is_pydantics(part)) or "(top level)"
    # A file that is no JSON at all may be anybody's: nothing of it belongs in a message; and of a
    # whole file the words say what is wrong.
    hidden = problem["type"] in {"missing", "json_invalid"} or not place
    given = "" if hidden else f" (given: {problem['input']!r:.80})"
    return f"  {where}: {_words(place, problem, model)}{given}"


def _is_pydantics(part: str | int) -> bool:
    """Whether Pydantic added this: a key that is itself the fault, or one type of several."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-"))


def _words(place: Place, problem: Mapping[str, Any], model: type[BaseModel] | None) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == _UNKNOWN:
        key = str(place[-1])
        hint = _suggestion(key, _keys_at(model, place[:-1])) or _elsewhere(key, model)
        return f"there is no such key{hint}"
    if kind in _ONE_OF:
        expected = str(context["expected"])
        options = [option for option in expected.split("'")[1::2] if option]
        return f"must be {expected}{_suggestion(str(problem['input']), options)}"
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return f"must be {_PATTERNS.get(pattern, f'a text that matches {pattern}')}"
    if kind in _SAID:
        return _SAID[kind].format(**context)
    return str(problem["msg"]).removeprefix("Value error, ")


def _suggestion(given: str, known: list[str]) -> str:
    close = get_close_matches(given.lower(), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _elsewhere(key: str, model: type[BaseModel] | None) -> str:
    """In which tables there is a key of that name."""
    fields = model.model_fields.items() if model is not None else ()
    named = [
        name
        for name, field in fields
        if any(key in table.model_fields for table in _tables(field.annotation))
    ]
    return f" here; it is one of {' and '.join(named)}" if named else ""


def _keys_at(model: type[BaseModel] | None, place: Place) -> list[str]:
    """The keys of the table at a place of a model; none where that is not known."""
    tables = [model] if model is not None else []
    for part in place:
        fields = [t.model_fields[str(part)] for t in tables if str(part) in t.model_fields]
        if fields:
            tables = [table for field in fields for table in _tables(field.annotation)]
    return sorted({name for table in tables for name in table.model_fields})


def _tables(annotation: Any) -> Iterator[type[BaseModel]]:
    """The tables inside "or nothing", a list, or "by name"."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _tables(inner)


def escape_markdown(text: str) -> str:
    """One line of text that Markdown must not read as table cells, emphasis, links or HTML."""
    joined = " ".join(text.splitlines())
    return re.sub(r"([\\|*`\[\]]|<(?=[A-Za-z/!?]))", r"\\\1", joined)
