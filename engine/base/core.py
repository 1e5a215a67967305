"""Gives access to the engine's part of the compiled core, which engine/abi.inc and
engine/host/api.inc declare.

This part is in the same shared library as the rest of kccl, because it uses kccl's waits on the
host.
"""

from typing import Any

import numpy as np

from kccl._core import ffi, lib

__all__ = ["ENDS", "as_argument", "ffi", "lib"]

ENDS: dict[int, str] = {
    lib.kKcclEngineGoesOn: "",
    lib.kKcclEngineStopId: "stop",
    lib.kKcclEngineMaxTokens: "max_tokens",
    lib.kKcclEngineContextFull: "context",
}
"""KcclEngineEnd -> Token.end, for ends that are no errors."""


def as_argument(struct: Any) -> np.void:
    """Returns the struct to which a cffi pointer points, as an argument that a kernel takes by
    value.
    """
    data = np.frombuffer(ffi.buffer(struct), np.uint8)
    argument: np.void = data.view(f"V{data.nbytes}")[0]
    return argument
