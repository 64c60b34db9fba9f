"""Options of numerical precision."""

from typing import Literal

PrecisionName = Literal["float32", "mixed_float16", "mixed_bfloat16"]
