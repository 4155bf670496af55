"""Triton's client library: imported when first needed, so that everything else works without."""

from typing import Any, NamedTuple

from enginegate.errors import ServerError

_MISSING = "Install the client: python -m pip install 'enginegate[triton]'"


class Vendor(NamedTuple):
    """gRPC, and what Triton's client generated for it."""

    grpc: Any
    messages: Any
    stubs: Any


def vendor() -> Vendor:
    """The library.

    Raises:
        ServerError: it is not installed.
    """
    try:
        import grpc  # type: ignore[import-untyped]  # noqa: PLC0415
        from tritonclient.grpc import (  # type: ignore[import-untyped]  # noqa: PLC0415
            service_pb2,
            service_pb2_grpc,
        )
    except ImportError as error:
        raise ServerError(f"Triton's client cannot be imported: {error}.\n{_MISSING}") from error
    return Vendor(grpc, service_pb2, service_pb2_grpc)


def channel_options(address: str) -> list[tuple[str, int]]:
    """Of a connection: messages of any size, quick reconnection, no proxy to this machine."""
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # This one also limits the connection attempt itself, and a busy server takes its time.
        ("grpc.min_reconnect_backoff_ms", 5000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    if address.startswith(("127.", "localhost:", "[::1]")):
        options.append(("grpc.enable_http_proxy", 0))
    return options
