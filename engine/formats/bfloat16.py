"""BF16: the upper half of FP32's bits. The matrix unit multiplies it directly."""

import ml_dtypes
import numpy as np

from .base import Plain

BFLOAT16 = Plain(
    "bfloat16",
    "BF16",
    ml_dtypes.bfloat16,
    float(np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16)),
    is_multiplied=True,
)
