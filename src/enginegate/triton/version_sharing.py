"""Whether versions of one model can be loaded side by side: Triton has one configuration for all.

A version whose files do not fit the configuration is worse than one that fails: Triton 2.51 never
ends the load of a Python model without its file, and then answers no other load of that model.
"""

from typing import Any

from enginegate.triton.config import Config

# What may differ between versions that share a configuration: how much of a model is served, not
# how its files are opened.
_FREE = (
    "name",
    "version_policy",
    "max_batch_size",
    "dynamic_batching",
    "model_warmup",
    "response_cache",
    "metric_tags",
)
# Of the rest of ``optimization``, none changes what can be loaded.
_DECIDING_OPTIMIZATION = {"graph", "execution_accelerators"}
_FIXED_LARGEST_BATCH = {"tensorrt", "tensorrt_plan"}


def cannot_share(old: Config, new: Config) -> str:
    """Why files that were published with ``old`` cannot be loaded with ``new``; empty: they can.

    Batching, the number of instances, the queue and the warm-up may differ. Backend, kind of
    device, tensors, parameters and what the engine's runtime is told may not.

    Args:
        old: the configuration that a version was published with.
        new: the one that is to load it beside a newer version.
    """
    was, now = _deciding_fields(old), _deciding_fields(new)
    for field in sorted({*was, *now}):
        if was.get(field) != now.get(field):
            return f"{was.get(field, f'no {field}')} became {now.get(field, f'no {field}')}"
    before, after = old.serving.max_batch_size, new.serving.max_batch_size
    if after > before and {old.backend, old.message.platform} & _FIXED_LARGEST_BATCH:
        return f"max_batch_size: {before} became {after}, which the older plan may not take"
    return ""


def _deciding_fields(config: Config) -> dict[str, str]:
    """Every field that decides how a version's files are opened, as one line of text each."""
    message = type(config.message)()
    message.CopyFrom(config.message)
    for field in _FREE:
        message.ClearField(field)
    kinds = sorted({group.Kind.Name(group.kind) for group in message.instance_group})
    message.ClearField("instance_group")
    for field in message.optimization.DESCRIPTOR.fields_by_name:
        if field not in _DECIDING_OPTIMIZATION:
            message.optimization.ClearField(field)
    if not message.optimization.ListFields():
        message.ClearField("optimization")
    found = {field.name: _line_of(message, field.name) for field, _ in message.ListFields()}
    return found | ({"kind of device": f"kind: {' and '.join(kinds)}"} if kinds else {})


def _line_of(message: Any, field: str) -> str:
    """One field of a message as text, in one line."""
    from google.protobuf import text_format  # type: ignore[import-untyped]  # noqa: PLC0415

    alone = type(message)()
    alone.CopyFrom(message)
    for other, _ in message.ListFields():
        if other.name != field:
            alone.ClearField(other.name)
    return str(text_format.MessageToString(alone, as_one_line=True, use_index_order=True))
