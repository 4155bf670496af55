"""The table of a policy that decides which sizes of inputs engines are built for."""

from typing import Self

from pydantic import Field, PositiveInt, model_validator

from enginegate.records import Record


class DimensionRange(Record):
    """Sizes that one dynamic axis may take."""

    min: PositiveInt = Field(description="smallest size that is served")
    best: PositiveInt = Field(description="size that the engine is tuned for")
    max: PositiveInt = Field(description="largest size that is served")

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        if not self.min <= self.best <= self.max:
            raise ValueError(f"min {self.min} <= best {self.best} <= max {self.max} does not hold")
        return self


class Shapes(Record):
    """Sizes of the inputs' dynamic axes. An engine takes no others."""

    batch: DimensionRange | None = Field(
        default=None,
        description="the first axis; none: 1 to the largest of search.max_batch_sizes",
    )
    sequence: DimensionRange | None = Field(
        default=None, description="every other dynamic axis, e.g. tokens of an encoder"
    )
    axes: dict[str, DimensionRange] = Field(
        default={}, description='single axes that differ, by INPUT.AXIS, e.g. "image.2"'
    )

    def of(self, name: str, axis: int) -> DimensionRange | None:
        """The range of an input's dynamic axis besides the batch, or None if none is given."""
        return self.axes.get(f"{name}.{axis}", self.sequence)
