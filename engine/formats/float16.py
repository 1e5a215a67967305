"""FP16: IEEE 754's binary16. The matrix unit multiplies it directly."""

import numpy as np

from .base import Plain

FLOAT16 = Plain("float16", "F16", np.float16, 65504.0, is_multiplied=True)
