"""Whether versions of one model can be loaded side by side: Triton has one configuration for all.

A version whose files do not fit the configuration is worse than a load that fails: Triton 2.51
never ends the load of a Python model without its file, and then answers no other load of the model.
"""

from enginegate.engine_kinds import is_fixed_batch
from enginegate.serving import STREAMS_PARAMETER
from enginegate.triton.config import Config

# These may differ between versions that share a configuration: they say how much of a model is
# served, not how its files are opened.
_FREE = (
    "name",
    "version_policy",
    "max_batch_size",
    "dynamic_batching",
    "model_warmup",
    "response_cache",
    "metric_tags",
)
# No other field of ``optimization`` changes what can be loaded.
_DECIDING_OPTIMIZATION = {"graph", "execution_accelerators"}


def sharing_obstacle(old: Config, new: Config) -> str:
    """Why files that were published with ``old`` cannot be loaded with ``new``; empty: they can.

    Batching, the number of instances, the queue and the warm-up may differ. Backend, kind of
    device, tensors, parameters and the settings of the engine's runtime may not.

    Args:
        old: the configuration that a version was published with.
        new: the configuration that is to load that version beside a newer one.
    """
    before, after = _deciding_fields(old), _deciding_fields(new)
    for field in sorted({*before, *after}):
        if before.get(field) != after.get(field):
            return f"{before.get(field, f'no {field}')} became {after.get(field, f'no {field}')}"
    old_batch, new_batch = old.serving.max_batch_size, new.serving.max_batch_size
    if new_batch > old_batch and is_fixed_batch(old.backend or old.message.platform):
        return f"max_batch_size: {old_batch} became {new_batch}, which the older plan may not take"
    return ""


def _deciding_fields(config: Config) -> dict[str, str]:
    """Every field that decides how a version's files are opened, as one line of text each."""
    from google.protobuf import text_format  # type: ignore[import-untyped]  # noqa: PLC0415

    message = type(config.message)()
    message.CopyFrom(config.message)
    for field in _FREE:
        message.ClearField(field)
    # Our runner's word for a number of instances.
    if STREAMS_PARAMETER in message.parameters:
        del message.parameters[STREAMS_PARAMETER]
    kinds = sorted({group.Kind.Name(group.kind) for group in message.instance_group})
    message.ClearField("instance_group")
    for field in message.optimization.DESCRIPTOR.fields_by_name:
        if field not in _DECIDING_OPTIMIZATION:
            message.optimization.ClearField(field)
    if not message.optimization.ListFields():
        message.ClearField("optimization")
    lines: dict[str, str] = {}
    for field, _ in message.ListFields():
        single = type(message)()
        single.CopyFrom(message)
        for other, _ in message.ListFields():
            if other.name != field.name:
                single.ClearField(other.name)
        lines[field.name] = text_format.MessageToString(
            single, as_one_line=True, use_index_order=True
        )
    return lines | ({"kind of device": f"kind: {' and '.join(kinds)}"} if kinds else {})
