"""How each version of the digits classifier is made."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from enginegate.records import Record


class Training(Record):
    """Everything that decides the weights, apart from the training images."""

    seed: NonNegativeInt
    epochs: PositiveInt
    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = (64, 128, 128)
    batch_size: PositiveInt = 50
    learning_rate: PositiveFloat = 4e-3
    weight_decay: NonNegativeFloat = 1e-2
    label_smoothing: NonNegativeFloat = 0.05


class Recipe(Training):
    """A version: its weights, and what is computed with them."""

    views: Literal[1, 9] = Field(
        default=9,
        description="copies of the image that are read and averaged: itself, or also moved by one "
        "pixel in every direction",
    )
    stretch: Literal["image", "features"] = Field(
        default="image",
        description="whose contrast is stretched to the full range: the image's, or what the first "
        "convolution makes of it, which is the same arithmetic in FP32",
    )

    @property
    def training(self) -> Training:
        """Recipes that share it share their weights."""
        return Training(**{name: getattr(self, name) for name in Training.model_fields})


RECIPES = {
    1: Recipe(seed=1, epochs=12),
    # More training, and a rewrite that changes nothing in FP32: a faint image stays faint until
    # after the first convolution, where int8 has a handful of steps for it.
    2: Recipe(seed=2, epochs=14, stretch="features"),
    # The weights of version 2, with the contrast stretched first again.
    3: Recipe(seed=2, epochs=14),
}
# A ninth of the arithmetic, and the same weights: for where only the path counts and not the speed.
SMALL: Mapping[int, Recipe] = MappingProxyType(
    {number: recipe.model_copy(update={"views": 1}) for number, recipe in RECIPES.items()}
)
