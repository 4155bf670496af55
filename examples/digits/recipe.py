"""How each version of the digits classifier is trained."""

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from enginegate.records import Record


class Recipe(Record):
    """Everything that decides the weights, apart from the training images."""

    seed: NonNegativeInt
    epochs: PositiveInt
    contrast: NonNegativeFloat = Field(description="training images are scaled by 1 +- this")
    channels: tuple[PositiveInt, PositiveInt, PositiveInt] = (64, 128, 128)
    batch_size: PositiveInt = 50
    learning_rate: PositiveFloat = 4e-3
    weight_decay: NonNegativeFloat = 1e-2
    label_smoothing: NonNegativeFloat = 0.05


RECIPES = {
    1: Recipe(seed=1, epochs=12, contrast=0.0),
    2: Recipe(seed=2, epochs=16, contrast=0.15),
}
