"""Gives access to the engine's part of the compiled core: what engine/abi.inc and
engine/host/api.inc declare.

It is in the same shared library as the rest of kccl, because it uses the host's waits.
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
"""KcclEngineEnd -> why a request has ended, for those that are no errors."""


def as_argument(struct: Any) -> np.void:
    """Returns a struct, given as a pointer to it, as a kernel takes it by value."""
    data = np.frombuffer(ffi.buffer(struct), np.uint8)
    argument: np.void = data.view(f"V{data.nbytes}")[0]
    return argument
