"""Compiles device source for AMD GPUs with hipRTC.

Nothing here has run with AMD's hipRTC. tests/hip runs it on a library of the tests' own.
"""

import re
from importlib import import_module
from typing import Any

from ..base import extras
from ..base.errors import InvalidArgument
from .rtc import RuntimeCompiler

# The GPUs that KCCL supports. They have warps of 64, and the memory model that mem.cuh is written
# for.
ARCHS = ("gfx942", "gfx950")


class Hiprtc(RuntimeCompiler):
    """See RuntimeCompiler."""

    name = "hipRTC"
    prefix = "hiprtc"
    code = "Code"
    target = "hip"
    suffix = ".hsaco"

    @property
    def cure(self) -> str:
        return f"{extras.install('amd')}, and install ROCm"

    def load(self) -> Any:
        hiprtc = binding_of("hiprtc")
        try:
            hiprtc.hiprtcVersion()
        except RuntimeError as error:
            raise RuntimeError(said(error)) from error
        return hiprtc

    def check_arch(self, arch: str) -> None:
        check_arch(arch)

    def flags(self, arch: str) -> list[str]:
        return [f"--offload-arch={arch}", "-std=c++20", "-O3"]

    def version(self) -> str:
        number = ".".join(map(str, self.call("Version")))
        # The binding's version tells builds of ROCm apart that have the same number.
        from rocm.version import ROCM_VERSION_NAME

        return f"{number} (hip-python for ROCm {ROCM_VERSION_NAME})"

    def destroy(self, program: Any) -> None:
        self.call("DestroyProgram", program.createRef())


def binding_of(library: str) -> Any:
    """Returns hip-python's module for a library of ROCm, as in "hiprtc".

    Raises:
        ImportError: hip-python is missing, or older than 10, whose functions take other arguments.
    """
    # hip-python has this module from version 10 on. The import fails if it is older.
    import_module("rocm.version")
    return getattr(import_module("hip"), library)


def said(error: RuntimeError) -> str:
    """Returns hip-python's message about a library that it cannot open, without b'' at names."""
    text = re.sub(r"\bb'([^']*)'", r"\1", str(error))
    return text.replace("''", "'")


def check_arch(arch: str) -> None:
    """Checks that KCCL supports an architecture.

    Raises:
        InvalidArgument: KCCL does not support it.
    """
    if arch not in ARCHS:
        raise InvalidArgument(f"arch is {arch!r}, must be one of {', '.join(ARCHS)}")


HIPRTC = Hiprtc()
