"""The examples of keras.io and of Keras' guides that have a step, loss, metric or layer of their own, by name.

Each is rebuilt by its structure, tiny, with random data. A function's docstring says what its own code is.
"""

from collections.abc import Callable, Mapping

from tests.keras_io import (
    codes,
    contrastive,
    diffusion,
    distilled,
    generative,
    graphs,
    guides,
    language,
    structured,
    vision,
)
from tests.keras_io.training import Loop, Training

AREAS = (guides, generative, codes, diffusion, vision, contrastive, distilled, language, structured, graphs)
EXAMPLES: Mapping[str, Callable[[], Training | Loop]] = {
    each.__name__: each for area in AREAS for each in area.EXAMPLES
}
