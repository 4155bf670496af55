"""Reads the Prometheus endpoint of a Triton server (text exposition format 0.0.4)."""

from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import NamedTuple

from enginegate.errors import ServerError

_PATH = "/metrics"
_MOST_BYTES = 64 << 20


class Series(NamedTuple):
    """One line of the exposition: a name, its labels, and the value now."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """All series of one reading, in the server's order."""

    series: tuple[Series, ...]

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Read the text format; comments, types and time stamps are dropped.

        Raises:
            ServerError: a line is no sample, or a series stands there twice.
        """
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

        series: dict[tuple[str, frozenset[tuple[str, str]]], Series] = {}
        # Without the comments, whose types make the parser rename counters, a line is a family.
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        for line in lines:
            try:
                families = list(text_string_to_metric_families(line))
                found = [
                    Series(sample.name, sample.labels, float(sample.value))
                    for family in families
                    for sample in family.samples
                ]
            except (ValueError, OverflowError) as error:
                raise ServerError(
                    f"This is no Prometheus metric: {line[:120]!r}.\n"
                    "The server at this address is not Triton's metrics port."
                ) from error
            for each in found:
                key = (each.name, frozenset(each.labels.items()))
                if key in series:
                    raise ServerError(
                        f"{each.name}{each.labels} stands twice in the metrics, so neither value "
                        "is believed. See what answers at this address besides Triton."
                    )
                series[key] = each
        return cls(tuple(series.values()))

    def matching(self, name: str, **labels: str) -> Iterator[Series]:
        """The series of that name that carry these labels; they may carry others too."""
        for series in self.series:
            if series.name == name and labels.items() <= series.labels.items():
                yield series

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the one series that matches; None when none does.

        Raises:
            ServerError: several match, so no single value is meant.
        """
        matches = list(self.matching(name, **labels))
        if len(matches) > 1:
            raise ServerError(
                f"{len(matches)} series of {name} carry {labels or 'no particular label'}, so none "
                f"is the value asked for. Name more labels: {matches[0].labels} is one of them."
            )
        return matches[0].value if matches else None


def read_metrics(address: str, *, timeout_s: float = 5.0) -> Metrics:
    """Read the metrics endpoint at ``HOST:PORT`` once.

    Raises:
        ServerError: nothing answers there in time, or what answers is no metrics endpoint.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = HTTPConnection(host, int(port), timeout=timeout_s)
    except (ValueError, HTTPException) as error:
        raise ServerError(f"{address!r} is no HOST:PORT of a metrics endpoint.") from error
    try:
        connection.request("GET", _PATH)
        answer = connection.getresponse()
        status, content = answer.status, answer.read(_MOST_BYTES)
    except (OSError, HTTPException) as error:
        raise ServerError(
            f"Triton's metrics at http://{address}{_PATH} did not answer within {timeout_s:g} s "
            f"({type(error).__name__}: {error}).\nCheck that the server runs with metrics allowed "
            "and that this is its metrics port, not its HTTP or gRPC port."
        ) from error
    finally:
        connection.close()
    if status != 200:  # noqa: PLR2004 - HTTP's OK
        raise ServerError(
            f"http://{address}{_PATH} answered with HTTP status {status}.\n"
            "Give the address of Triton's metrics port (8002 by default)."
        )
    return Metrics.parse(content.decode(errors="replace"))
