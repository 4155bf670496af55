"""Loopback ports for one server."""

import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from enginegate.errors import InputError, ServerError

LOOPBACK = "127.0.0.1"
LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Ports:
    """Where a server listens; 0 asks for any free port."""

    http: int = 0
    grpc: int = 0
    metrics: int = 0

    def chosen(self) -> "Ports":
        """The same with every 0 replaced by a port that is free now.

        Raises:
            InputError: that is no port, or one is asked for twice.
            ServerError: a port that was asked for cannot be used.
        """
        asked = [port for port in (self.http, self.grpc, self.metrics) if port]
        if wrong := [port for port in asked if not 0 < port <= LAST_PORT]:
            raise InputError(
                f"{wrong[0]} is no port: they are 1 to {LAST_PORT:,}, and 0 takes any free one."
            )
        if len(set(asked)) < len(asked):
            raise InputError(
                "HTTP, gRPC and metrics each need a port of their own, and two of them were asked "
                f"to listen on the same (http {self.http}, gRPC {self.grpc}, metrics "
                f"{self.metrics}). 0 takes any free one."
            )
        with ExitStack() as stack:
            return Ports(
                http=_bound(stack, "HTTP", self.http),
                grpc=_bound(stack, "gRPC", self.grpc),
                metrics=_bound(stack, "metrics", self.metrics),
            )

    def all_free(self) -> bool:
        """Whether nobody holds any of them."""
        with suppress(ServerError):
            self.chosen()
            return True
        return False


def _bound(stack: ExitStack, name: str, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        raise ServerError(
            f"Port {port} on {LOOPBACK}, asked for as Triton's {name} port, cannot be used: "
            f"{error.strerror}.\n`ss -ltnp 'sport = :{port}'` shows who holds it. Stop that, or "
            "ask for another port (0 takes any free one)."
        ) from error
    return int(listener.getsockname()[1])
