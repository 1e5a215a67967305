"""Gives access to the engine's part of the compiled core, which engine/abi.inc and
engine/host/api.inc declare.

This part is in the same shared library as the rest of kccl, because the host executor's threads
wait for each other with kccl's wait_until() (csrc/include/kccl/wait.cuh).
"""

from pathlib import Path
from typing import Any

import numpy as np

import kccl._core
from kccl._core import ffi, lib

__all__ = ["ENDS", "FILE", "as_argument", "ffi", "lib"]

FILE = Path(kccl._core.__file__)
"""The shared library."""

ENDS: dict[int, str] = {
    lib.kKcclEngineGoesOn: "",
    lib.kKcclEngineStopId: "stop",
    lib.kKcclEngineMaxTokens: "max_tokens",
    lib.kKcclEngineContextFull: "context",
}
"""Maps a KcclEngineEnd, which says why a request has ended, to Token.end. Holds only the ends that
are no errors. "" means that the request goes on.
"""


def as_argument(struct: Any) -> np.void:
    """Returns the struct to which a cffi pointer points, as an argument that a kernel takes by
    value.
    """
    data = np.frombuffer(ffi.buffer(struct), np.uint8)
    argument: np.void = data.view(f"V{data.nbytes}")[0]
    return argument
