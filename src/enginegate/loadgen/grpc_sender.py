"""Inference over gRPC for a load: requests made once and sent often, from one event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from enginegate.data import Tensors
from enginegate.triton.codec import channel_options, fill_request, reply_of, vendor
from enginegate.triton.types import Reply

_INFER = "/inference.GRPCInferenceService/ModelInfer"


class Response(NamedTuple):
    """The outcome of one request; ``error`` is empty when it succeeded."""

    error: str
    version: str
    message: Any
    decode: Callable[[Any], Reply] = reply_of

    def reply(self) -> Reply:
        """The decoded answer of a request that succeeded."""
        return self.decode(self.message)


class GrpcSender:
    """One connection that sends requests made beforehand, for one event loop."""

    def __init__(self, address: str) -> None:
        """Open a connection; must be called inside a running event loop."""
        import grpc.aio  # type: ignore[import-untyped]  # noqa: PLC0415

        self._failure = grpc.aio.AioRpcError
        self._channel = grpc.aio.insecure_channel(address, options=channel_options(address))
        self._infer = self._channel.unary_unary(
            _INFER, response_deserializer=vendor().messages.ModelInferResponse.FromString
        )

    async def send(self, request: bytes, timeout_s: float) -> Response:
        """Send one request; a failure is an answer too, never an exception."""
        try:
            # Not gRPC's own deadline: that is a time of day, and the clock may be set meanwhile.
            async with asyncio.timeout(timeout_s):
                message = await self._infer(request)
        except self._failure as error:
            return Response(error.code().name, "", None)
        except TimeoutError:
            return Response("DEADLINE_EXCEEDED", "", None)
        return Response("", message.model_version, message)

    async def connect(self, timeout_s: float) -> bool:
        """Wait for the connection, so that the first request does not pay for it."""
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Close the connection; requests under way are cancelled."""
        await self._channel.close()


async def hold_queue() -> Callable[[], None]:
    """Keep the queue that gRPC shares between event loops; call the result to release it."""
    import grpc.aio  # noqa: PLC0415

    grpc.aio.init_grpc_aio()
    release: Callable[[], None] = grpc.aio.shutdown_grpc_aio
    return release


def encode_request(
    model: str, inputs: Tensors, *, version: str = "", request_id: str = ""
) -> bytes:
    """A request in wire form, made once and sent often."""
    request = vendor().messages.ModelInferRequest(
        model_name=model, model_version=version, id=request_id
    )
    fill_request(request, inputs)
    return bytes(request.SerializeToString())


def parse_request(request: bytes) -> Any:
    """The ``ModelInferRequest`` that `encode_request` made, to be sent in another form."""
    return vendor().messages.ModelInferRequest.FromString(request)
