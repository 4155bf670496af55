"""What the generator costs on this machine, found out once and kept."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from enginegate.benchmark.null_load import calibrate
from enginegate.errors import EnginegateError
from enginegate.loadgen.traffic import Transport
from enginegate.measurement import Generator
from enginegate.records import canonical_json, sha256_bytes
from enginegate.triton.server import Server
from enginegate.workspace import remembered

_BUDGET_S = 3.0
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class GeneratorBaseline:
    """How the generator is calibrated.

    Attributes:
        up_to_per_s: the highest rate that will be offered.
        deciding: what else the result holds for, e.g. machine and server.
        folder: where results are kept.
        said: told why there is none.
    """

    sending: Transport
    up_to_per_s: float
    deciding: tuple[str, ...]
    folder: Path
    said: Callable[[str], None]

    def of(self, server: Server) -> Generator:
        """What sending alone costs, and the highest rate that was kept up with.

        One that did not make every rate may have met a bad moment: it is made again at once, and
        not kept. Without one (no Python backend, a model that fails) nothing is known, which is no
        reason not to measure.
        """
        key = sha256_bytes(canonical_json([*self.deciding, self.up_to_per_s]))
        try:
            return remembered(
                self.folder / f"{key}.json",
                Generator,
                lambda: self._best(server),
                worth_keeping=self._made_all,
            )
        except EnginegateError as error:
            self.said(f"the generator was not calibrated: {error}")
            return Generator()

    def stated(self, made: Generator) -> Generator:
        """What goes into each measurement: short of every rate, the highest one is only a note.

        Each measurement says itself how late its requests were.
        """
        return made if self._made_all(made) else made.model_copy(update={"trusted_per_s": None})

    def _best(self, server: Server) -> Generator:
        found: list[Generator] = []
        while len(found) < _ATTEMPTS and not (found and self._made_all(found[-1])):
            found.append(
                calibrate(
                    server, sending=self.sending, up_to_per_s=self.up_to_per_s, budget_s=_BUDGET_S
                )
            )
        return max(found, key=lambda made: made.trusted_per_s or 0.0)

    def _made_all(self, made: Generator) -> bool:
        return (made.trusted_per_s or 0.0) >= self.up_to_per_s
