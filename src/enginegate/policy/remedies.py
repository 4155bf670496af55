"""What to add to a policy that lacks what only its owner can say, with an example of each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_LINE = "  {key}: is missing"
REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "name": 'what clients call the model, e.g. name = "credit"',
        "task": 'what the outputs mean, e.g. task = "classification"',
        "model": 'where the model comes from, e.g. [model] uri = "file:model.onnx"',
        "model.uri": 'where the model comes from, e.g. uri = "file:model.onnx"',
        "data": 'labelled samples that training never saw, e.g. [data] evaluation = "data.npz"',
        "data.evaluation": 'labelled samples that training never saw, e.g. evaluation = "data.npz"',
        "candidates": 'what is built and compared, e.g. [candidates] onnxruntime = ["fp32"]',
        "gates": "how far a candidate may be from FP32: [gates.default] with every limit, or with "
        'tolerances = "standard"',
        "slo": "what serving must deliver, e.g. [slo] p99_ms = 50 and min_throughput_per_s = 100",
        "slo.p99_ms": "99th percentile of latency at the client, e.g. p99_ms = 50",
        "slo.min_throughput_per_s": "requests a second that traffic needs, e.g. "
        "min_throughput_per_s = 100",
    }
)
_STANDARD = (
    'State each limit, or add tolerances = "standard" under [gates.default]; `enginegate policy '
    "show --table gates` prints what that means."
)
_WHOLE = "`enginegate init MODEL --data FILE` writes a whole policy."
_SHOW = "`enginegate policy show` lists every key with its meaning and unit."
_MANY = 3


def with_remedies(listed: str, raw: Mapping[str, Any]) -> str:
    """The lines that say what is wrong with a policy, with what to add where something is missing.

    Args:
        listed: one line for each problem, as `messages.explain_validation` makes them.
        raw: the policy's tables as its file has them.
    """
    lines, lacks = [], 0
    for line in listed.splitlines():
        key = line.strip().removesuffix(": is missing")
        remedy = REMEDIES.get(key) if line == _LINE.format(key=key) else None
        lacks += remedy is not None
        lines.append(f"{line}: {remedy}" if remedy else line)
    if any(line.startswith("  gates.") and line.endswith(": is missing") for line in lines):
        gates = raw.get("gates")
        default = gates.get("default") if isinstance(gates, Mapping) else None
        if not (isinstance(default, Mapping) and default.get("tolerances") == "standard"):
            lines.append(_STANDARD)
    return "\n".join([*lines, _WHOLE if lacks >= _MANY else _SHOW])
