"""FP32: the format of norms and biases. No executor multiplies matrices in it."""

import numpy as np

from .base import Plain

FLOAT32 = Plain("float32", "F32", np.float32, float(np.finfo(np.float32).max), is_multiplied=False)
