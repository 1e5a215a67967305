"""Compiles device source for NVIDIA GPUs with NVRTC."""

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..base import extras
from ..base.errors import InvalidArgument
from .rtc import RuntimeCompiler

_OLDEST = 80
_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


class Nvrtc(RuntimeCompiler):
    """See RuntimeCompiler."""

    name = "NVRTC"
    prefix = "nvrtc"
    code = "CUBIN"
    target = "cuda"
    suffix = ".cubin"

    @property
    def cure(self) -> str:
        return extras.install("cuda")

    def load(self) -> Any:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
        return nvrtc

    def check_arch(self, arch: str) -> None:
        match = re.fullmatch(r"sm_(\d+)[af]?", arch)
        known = [number for number in self.call("GetSupportedArchs") if number >= _OLDEST]
        if match is None or int(match[1]) not in known:
            able = ", ".join(f"sm_{number}" for number in known)
            raise InvalidArgument(f"arch is {arch!r}, must be one of {able} with {self.full_name}")

    def flags(self, arch: str) -> list[str]:
        return [f"-arch={arch}", "-std=c++20", "-lineinfo"]

    def version(self) -> str:
        number = ".".join(map(str, self.call("Version")))
        for wheel in _WHEELS:
            try:
                return f"{number} ({wheel} {version(wheel)})"
            except PackageNotFoundError:
                continue
        return number

    def destroy(self, program: Any) -> None:
        self.call("DestroyProgram", program)


NVRTC = Nvrtc()
