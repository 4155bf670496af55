"""Every key of a policy with its value, where that comes from, and its meaning."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from enginegate.candidate import Precision
from enginegate.policy import Policy, policy_model
from enginegate.policy.defaults import default_rules
from enginegate.policy.gates import Gates, gates_for
from enginegate.policy.paths import as_written
from enginegate.policy.tolerances import EVIDENCE, REASONS, STANDARD

# stated: by the file; default: the file leaves it out; required: no file leaves it out.
Origin: TypeAlias = Literal["stated", "default", "required"]
NOT_SET = "not set"
_GATES = "gates"
_LAST_SHORT = 0xFFFF
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


class ListedKey(NamedTuple):
    """One key of a policy.

    Attributes:
        table: of which table; empty: the top of the file.
        value: as the file would have it, or ``not set``.
    """

    table: str
    key: str
    value: str
    origin: Origin
    meaning: str


class ListedLimit(NamedTuple):
    """One limit of the gates.

    Attributes:
        values: by precision, as a file would have them; ``not set`` where there is none.
        stated: precisions whose value the file states; the others' are standard tolerances.
        reason: why the standard tolerance is what it is; empty where there is none.
    """

    key: str
    values: Mapping[Precision, str]
    stated: frozenset[Precision]
    meaning: str
    reason: str


def list_keys(
    policy: Policy | None = None, stated: Mapping[str, Any] | None = None
) -> tuple[ListedKey, ...]:
    """Every key but the gates', table by table in the order of docs/policy.md.

    Args:
        policy: whose values are listed; None: what each key is where a file leaves it out.
        stated: its tables as the file has them.
    """
    model = type(policy) if policy is not None else policy_model()
    return tuple(_listed(model, policy, stated or {}))


def list_limits(
    policy: Policy | None = None, stated: Mapping[str, Any] | None = None
) -> tuple[ListedLimit, ...]:
    """Every limit of the gates for the precisions that a policy builds; None: the standard's."""
    tables = (stated or {}).get(_GATES, {})
    wanted = tuple(Precision) if policy is None else _precisions(policy)
    limits = []
    for key, field in Gates.model_fields.items():
        if key == "tolerances":
            continue
        values = {each: toml_value(_limit(policy, key, each)) for each in wanted}
        named = frozenset(p for p in wanted if key in _own(tables, p))
        limits.append(
            ListedLimit(key, values, named, field.description or "", REASONS.get(key, ""))
        )
    return tuple(limits)


def table_meanings() -> dict[str, str]:
    """What each table is about, in a sentence; the top of the file is the empty name."""
    found = {"": "Top of the file."}
    for name, field in policy_model().model_fields.items():
        table = _table_of(field)
        if table is not None:
            found[name] = (table.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    return found


def toml_value(value: Any) -> str:
    """A value as a policy's file has it; ``not set`` for None."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{_toml_key(str(key))} = {toml_value(each)}" for key, each in value.items()
        )
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if value is None or isinstance(value, bool):
        return NOT_SET if value is None else str(value).lower()
    if isinstance(value, int | float):
        return f"{value:.12g}"
    return _toml_text(str(value if isinstance(value, str) else as_written(value)))


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_text(key)


def _toml_text(text: str) -> str:
    """A text in quotes; what a terminal would not show as it is, is escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else _escaped(each) for each in quoted)


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number <= _LAST_SHORT else f"\\U{number:08x}"


def _listed(
    model: type[Policy], policy: Policy | None, stated: Mapping[str, Any]
) -> Iterator[ListedKey]:
    tables = {
        name: table for name, field in model.model_fields.items() if (table := _table_of(field))
    }
    own = {name: field for name, field in model.model_fields.items() if name not in tables}
    yield from _keys("", own, policy, stated)
    for name, table in tables.items():
        if name == _GATES:
            continue
        value, given = getattr(policy, name, None), stated.get(name, {})
        if get_origin(model.model_fields[name].annotation) is dict:
            for each, inner in (value or {}).items():
                yield from _keys(f"{name}.{each}", table.model_fields, inner, given.get(each, {}))
        elif policy is None or value is not None:
            yield from _keys(name, table.model_fields, value, given)


def _keys(
    table: str, fields: Mapping[str, FieldInfo], record: Any, stated: Mapping[str, Any]
) -> Iterator[ListedKey]:
    rules = default_rules()
    for key, field in fields.items():
        rule = rules.get(f"{table}.{key}" if table else key)
        origin: Origin = "stated" if key in stated else "default"
        if record is not None:
            value = toml_value(getattr(record, key))
        elif rule is not None:
            value = rule.replace("`", "")
        elif field.is_required():
            origin, value = "required", ""
        else:
            value = toml_value(field.get_default(call_default_factory=True))
        meaning = field.description or "version of the file's format"
        yield ListedKey(table, key, value, origin, meaning)


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The table that a field holds, also inside "or nothing" and "by name"."""
    waiting = [field.annotation]
    while waiting:
        found = waiting.pop()
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
        waiting += get_args(found)
    return None


def _precisions(policy: Policy) -> tuple[Precision, ...]:
    built = {candidate.precision for candidate in policy.candidates.all()}
    return tuple(each for each in Precision if each in built)


def _limit(policy: Policy | None, key: str, precision: Precision) -> Any:
    if policy is not None:
        return getattr(gates_for(policy.gates, precision), key)
    standard: Mapping[str, Any] = {**EVIDENCE, **STANDARD[precision]}
    return standard.get(key)


def _own(tables: Mapping[str, Any], precision: Precision) -> frozenset[str]:
    """Keys that the file states for a precision, in its own table or for all."""
    return frozenset({*tables.get("default", {}), *tables.get(precision.value, {})})
