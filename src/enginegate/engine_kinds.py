"""The engine kinds there are, by name: one registry for the whole program.

A kind is an object: what rooms below `engines` need of it is declared here, the rest is
`engines.protocol.EngineKind`. Built-in kinds are listed below; another package adds one by an entry
point of the group ``enginegate.engine_kinds`` (name = "module:object"), or by calling `register`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import ClassVar

from pydantic import ValidationError

from enginegate.candidate import EngineKindName, Precision
from enginegate.errors import EnginegateError, ModelError
from enginegate.records import Record

ENTRY_POINT_GROUP = "enginegate.engine_kinds"
_BUILT_IN = {
    "onnxruntime": "enginegate.engines.onnxruntime:KIND",
    "tensorrt": "enginegate.engines.tensorrt:KIND",
    "torch_inductor": "enginegate.engines.torch_inductor:KIND",
}


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """Triton's own backend for a kind.

    Attributes:
        backend: its name in Triton.
        filename: what it opens in a version's folder.
        platform: Triton's older name for it, as configurations still state it; may be empty.
        fixed_batch: whether an engine is loaded for one largest batch, which cannot be raised.
        names_platform: whether a configuration must state the platform too, because the backend
            alone stands for another format.
        since: the first server version that batches for it; an older server counts as without it.
    """

    backend: str
    filename: str
    platform: str = ""
    fixed_batch: bool = False
    names_platform: bool = False
    since: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """How a kind wants an ONNX graph quantised.

    Attributes:
        weights: ONNX Runtime's QuantType of weights.
        activations: likewise, of everything else.
        between: operator types that get Quantize/Dequantize pairs besides Conv, Gemm and MatMul.
            Not with attention: its masks hold infinities, which have no scale.
        symmetric: whether activations have a zero point of 0.
        options: further options of ONNX Runtime's quantiser.
    """

    weights: str
    activations: str
    between: tuple[str, ...] = ()
    symmetric: bool = True
    options: Mapping[str, bool | str | list[str]] = field(default_factory=dict)

    @property
    def is_fp8(self) -> bool:
        """Whether levels are floating point, so that entropy of equal levels means nothing."""
        return self.activations.startswith("QFLOAT8")


class KindDeclaration:
    """What an engine kind is, as far as rooms below `engines` need to know.

    Attributes:
        name: of candidates, of its key in [candidates] and of its own table in a policy.
        title: the runtime's name as people write it.
        table: the model of its policy table; every key needs a default.
        largest: largest values of the table's numbers, by key, and why.
        precisions: those that it has at all; which of them a machine can decide is asked later.
        quantised: the forms in which it takes int8 and fp8.
        takes_modelopt: whether ModelOpt's conversions suit it, too.
        takes_program: whether it compiles the model's torch program, and changes the precision
            itself, instead of taking converted ONNX.
        native: Triton's own backend for it, if there is one.
        packages: distributions whose versions belong into a scorecard.
    """

    name: ClassVar[EngineKindName]
    title: ClassVar[str]
    table: ClassVar[type[Record]] = Record
    largest: ClassVar[Mapping[str, tuple[float, str]]] = {}
    precisions: ClassVar[frozenset[Precision]] = frozenset(Precision)
    quantised: ClassVar[Mapping[Precision, QuantisedForm]] = {}
    takes_modelopt: ClassVar[bool] = False
    takes_program: ClassVar[bool] = False
    native: ClassVar[NativeBackend | None] = None
    packages: ClassVar[tuple[str, ...]] = ()

    @property
    def native_name(self) -> str | None:
        """Triton's name of its own backend for the kind, or None."""
        return None if self.native is None else self.native.backend


_registered: dict[str, KindDeclaration] = {}


def register(kind: KindDeclaration) -> None:
    """Add a kind for this process; policies that are read afterwards may name it.

    Raises:
        ModelError: its name is taken, or its policy table has a key without a default.
    """
    if kind.name in engine_kinds():
        raise ModelError(f"There is an engine kind {kind.name!r} already. Name it otherwise.")
    _registered[kind.name] = _checked(kind, "register()")


def engine_kinds() -> dict[str, KindDeclaration]:
    """Every kind by its name: built in, installed, registered.

    Raises:
        ModelError: an installed package's kind cannot be loaded, or takes a name twice.
    """
    return _installed() | _registered


def kind_named(name: str) -> KindDeclaration:
    """The kind of a name.

    Raises:
        ModelError: there is none here.
    """
    found = engine_kinds().get(name)
    if found is None:
        raise ModelError(
            f"There is no engine kind {name!r} here; there are {', '.join(engine_kinds())}. "
            f"Install the package that brings it (entry point group {ENTRY_POINT_GROUP})."
        )
    return found


def native_backends() -> dict[str, NativeBackend]:
    """Triton's own backends for engines, by name."""
    kinds = engine_kinds().values()
    return {kind.native.backend: kind.native for kind in kinds if kind.native is not None}


def is_fixed_batch(backend: str) -> bool:
    """Whether a backend, or platform, of Triton loads an engine for one largest batch."""
    natives = native_backends().values()
    return any(each.fixed_batch and backend in {each.backend, each.platform} for each in natives)


@cache
def _installed() -> dict[str, KindDeclaration]:
    points = [EntryPoint(name, place, ENTRY_POINT_GROUP) for name, place in _BUILT_IN.items()]
    found: dict[str, KindDeclaration] = {}
    for point in (*points, *entry_points(group=ENTRY_POINT_GROUP)):
        origin = f"{point.value} ({point.dist.name if point.dist else 'enginegate'})"
        try:
            kind = _checked(point.load(), origin)
        except EnginegateError:
            raise
        except Exception as error:
            raise ModelError(
                f"The engine kind {point.name!r} of {origin} cannot be loaded: "
                f"{type(error).__name__}: {error}. Mend that package, or uninstall it."
            ) from error
        if kind.name in found:
            raise ModelError(
                f"{origin} brings an engine kind {kind.name!r}, and there is one of that name "
                "already. Uninstall one of the two."
            )
        found[kind.name] = kind
    return found


def _checked(kind: object, origin: str) -> KindDeclaration:
    if not isinstance(kind, KindDeclaration):
        raise ModelError(
            f"{origin} is {type(kind).__name__}, and an engine kind is an object of a class that "
            "derives from enginegate.engines.EngineKind."
        )
    try:
        kind.table()
    except ValidationError as error:
        raise ModelError(
            f"{origin}: the policy table of engine kind {kind.name!r} has keys without a default, "
            f"and a policy may leave the whole table out: {error}"
        ) from error
    return kind
