"""What a policy need not state: values of whole tables that its file leaves out.

Some follow from what the file does state, such as the lowest rate of the search from the SLO. They
are filled in before the policy is checked, so a scorecard's digest covers them like stated keys.
Limits that decide are never among them: a file states those, or says ``tolerances = "standard"``
(`enginegate.policy.tolerances`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MOST_BUDGET_S = 86_400.0
_CONFIRM_REQUESTS = 10_000  # the default of [slo] confirm_requests


class Default(NamedTuple):
    """A key that may be left out.

    Attributes:
        key: its table and name, with a dot between.
        rule: its value in words, as docs/policy.md shows it.
        value: makes it from what the file states, with the tables of `_ALWAYS` added.
    """

    key: str
    rule: str
    value: Callable[[Mapping[str, Any]], Any]


def _constant(key: str, value: Any, shown: str = "") -> Default:
    return Default(key, f"`{shown or value}`", lambda _: value)


def _number(raw: Mapping[str, Any], table: str, key: str, otherwise: float) -> float:
    """A number of the file; what is no number is reported when the policy is checked."""
    found = raw.get(table)
    value = found.get(key, otherwise) if isinstance(found, Mapping) else otherwise
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and value > 0 else otherwise


def _batch_sizes(raw: Mapping[str, Any]) -> list[int]:
    load, shapes = raw.get("load"), raw.get("shapes")
    rows = load.get("rows") if isinstance(load, Mapping) else None
    batch = shapes.get("batch") if isinstance(shapes, Mapping) else None
    listed = rows if isinstance(rows, list | tuple) else [rows]
    largest = max([8, *(each for each in listed if type(each) is int)])
    most = batch.get("max") if isinstance(batch, Mapping) else None
    return [min(largest, most) if type(most) is int and most > 0 else largest]


def _lowest_rate(raw: Mapping[str, Any]) -> float:
    lowest = _number(raw, "slo", "min_throughput_per_s", 1.0)
    at = _number(raw, "search", "at_rate_per_s", lowest)
    return min(lowest, at, _number(raw, "search", "max_rate_per_s", lowest))


def _highest_rate(raw: Mapping[str, Any]) -> float:
    lowest = _number(raw, "search", "min_rate_per_s", _lowest_rate(raw))
    at = _number(raw, "search", "at_rate_per_s", lowest)
    # The ceiling only ends a search that would go on: engines' own speeds say where to start. Much
    # more than a service asks for decides nothing and takes time to generate.
    return max(1000.0, 20.0 * lowest, at)


def _budget(raw: Mapping[str, Any]) -> float:
    requests = _number(raw, "slo", "confirm_requests", _CONFIRM_REQUESTS)
    # A search of four configurations takes one to three minutes; a confirmation at the SLO's own
    # rate lasts as long as its requests do, and one may have to be made again.
    seconds = 300.0 + 2.0 * requests / _number(raw, "slo", "min_throughput_per_s", 1.0)
    return min(float(round(seconds)), _MOST_BUDGET_S)


DEFAULTS: tuple[Default, ...] = (
    _constant("schema_version", 1),
    # 299 requests, or 59 samples of a share, can show it; 0.99 takes half as many again.
    _constant("slo.confidence", 0.95),
    Default(
        "search.max_batch_sizes",
        "8, or as large as `load.rows`; never above `shapes.batch.max`",
        _batch_sizes,
    ),
    # No wait, and one that a request within a usual SLO does not notice.
    _constant("search.queue_delays_us", [0, 1000]),
    _constant("search.instances", [1, 2]),
    Default("search.min_rate_per_s", "`slo.min_throughput_per_s`", _lowest_rate),
    Default("search.max_rate_per_s", "20 times the lowest, 1,000 at least", _highest_rate),
    # Decides a p99 at 60 requests/s or more; at lower rates a trial lasts longer by itself.
    _constant("search.measurement_s", 5.0, "5"),
    Default(
        "search.budget_s",
        "300, and twice what `slo.confirm_requests` take at `slo.min_throughput_per_s`",
        _budget,
    ),
    _constant("target.repository", "model_repo", '"model_repo"'),
    # A working week's weekend and a day: evidence older than this needs another decision.
    _constant("approval.expires_hours", 72.0, "72"),
)
# Tables of which every key may be left out, and so the table itself.
_OPTIONAL = ("search", "target", "approval")


def default_rules() -> dict[str, str]:
    """What each key is where a policy leaves it out, in words, by its dotted name."""
    return {each.key: each.rule for each in DEFAULTS}


def fill_in(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A policy's tables with the values that its file left out.

    Args:
        raw: tables as TOML gives them; what is wrong with them is for the policy's check.
    """
    filled = {**{table: {} for table in _OPTIONAL}, **raw}
    for default in DEFAULTS:
        *tables, key = default.key.split(".")
        table = filled.get(tables[0]) if tables else filled
        if not isinstance(table, Mapping) or key in table:
            continue
        completed = {**table, key: default.value(filled)}
        filled = {**filled, tables[0]: completed} if tables else completed
    return filled
