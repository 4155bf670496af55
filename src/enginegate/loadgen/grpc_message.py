"""Inference over gRPC for a load: requests made once and sent often."""

from collections.abc import Callable
from typing import Any, NamedTuple

from enginegate.data import Tensors
from enginegate.triton.codec import fill_request, reply_of, vendor
from enginegate.triton.types import Reply

INFER = "/inference.GRPCInferenceService/ModelInfer"


class Response(NamedTuple):
    """The outcome of one request; ``error`` is empty when it succeeded."""

    error: str
    version: str
    message: Any
    decode: Callable[[Any], Reply] = reply_of

    def reply(self) -> Reply:
        """The decoded answer of a request that succeeded."""
        return self.decode(self.message)


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
