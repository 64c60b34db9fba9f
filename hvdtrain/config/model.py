"""Options of the model."""

from dataclasses import field

from hvdtrain.config.section import section

Scalar = bool | int | float | str


@section
class ModelConfig:
    """Which model is trained."""

    model: str = "small_cnn"
    """Name of the model family."""
    model_args: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's builder, as NAME VALUE pairs."""
