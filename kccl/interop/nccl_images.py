"""Compiles the kernels of libkccl_nccl.so, and writes how it embeds them (csrc/nccl/images.cpp)."""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from ..base.errors import BackendError, InvalidArgument
from ..jit import cache, names, rtc
from ..jit.nvrtc import Nvrtc
from .nccl_tables import Line, kernels

ARCHS = ("sm_80", "sm_90a", "sm_100", "compute_90")
"""The architectures that the library has code for. Of "compute_90", PTX: GPUs of other ones compile
it. PTX for compute_80 would not wait for the kernels before it, as programmatic dependents must.
"""


class _Cubin(Nvrtc):
    """Compiles without line numbers, which are two thirds of a file. A failed call in a graph does
    not end by itself (failure_latch.cuh).
    """

    def flags(self, arch: str) -> list[str]:
        return [f"-arch={arch}", "-std=c++20", "-DKCCL_HOLDS_FAILED=1"]


class _Ptx(_Cubin):
    """Compiles to PTX, for an architecture "compute_90"."""

    code: ClassVar[str] = "PTX"
    suffix: ClassVar[str] = ".ptx"

    def check_arch(self, arch: str) -> None:
        super().check_arch(arch.replace("compute_", "sm_"))


_CUBIN, _PTX = _Cubin(), _Ptx()


def images(lines: Sequence[Line], folder: Path, archs: Sequence[str]) -> tuple[str, str]:
    """Compiles what is not in the cache. Returns the content of images.inc, and of image_bytes.inc.

    Args:
        lines: The tables, which say which kernels there are.
        folder: Where the compiled files go.
        archs: As in ARCHS.

    Raises:
        BackendError, CompileError, InvalidArgument: As in RuntimeCompiler.compile().
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    expressions = {spec.name: _expressions(spec.name, lines) for spec in kernels(lines)}
    wanted = [(kernel, arch) for kernel in expressions for arch in archs]
    with ThreadPoolExecutor(min(len(wanted), len(os.sched_getaffinity(0)))) as pool:
        names_of = [expressions[kernel] for kernel, _ in wanted]
        made = list(pool.map(_compile, *zip(*wanted, strict=True), names_of))
    assembly, table = [], []
    mangled: dict[str, list[str]] = {}
    for number, ((kernel, arch), path) in enumerate(zip(wanted, made, strict=True)):
        found, code = rtc.read(path)
        if mangled.setdefault(kernel, found) != found:
            raise BackendError(f"the names of {kernel} differ between architectures")
        file = folder / "images" / f"{kernel}.{arch}{path.suffix}"
        file.write_bytes(code)
        assembly.append(_embedded(number, file))
        table.append(_row(number, kernel, arch, lines))
    rows = []
    for spec in kernels(lines):
        for (dtype, world_size), name in _instances(spec.name, lines):
            index = expressions[spec.name].index(name)
            rows.append(
                f'    {{{spec.constant}, {dtype}, {world_size}, "{mangled[spec.name][index]}"}},'
            )
    lists = ["constexpr Image kImages[] = {", *table, "};"]
    lists += ["constexpr Instance kInstances[] = {", *rows, "};", ""]
    return "\n".join(lists), "\n".join([*assembly, ""])


def _instances(kernel: str, lines: Sequence[Line]) -> list[tuple[tuple[str, int], str]]:
    """Returns (type's constant, number of ranks) and C++ name of a kernel's instances."""
    found = {
        (line.dtype.constant, line.world_size): names.expression(
            kernel, line.dtype.name, "sum", cache.CSRC, line.world_size
        )
        for line in lines
        if line.kernel.name == kernel
    }
    return list(found.items())


def _expressions(kernel: str, lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(name for _, name in _instances(kernel, lines)))


def _compile(kernel: str, arch: str, expressions: list[str]) -> Path:
    compiler = _PTX if arch.startswith("compute_") else _CUBIN
    source = names.source(kernel, cache.CSRC)
    return compiler.compile(source, expressions, arch=arch, name=kernel)


def _row(number: int, kernel: str, arch: str, lines: Sequence[Line]) -> str:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)", arch)
    if match is None:
        raise InvalidArgument(f"arch is {arch!r}, must be as 'sm_90a' or 'compute_90'")
    constant = next(spec.constant for spec in kernels(lines) if spec.name == kernel)
    is_exact, is_ptx = str(bool(match[4])).lower(), str(match[1] == "compute").lower()
    facts = f"{constant}, {match[2]}, {match[3]}, {is_exact}, {is_ptx}"
    return f"    {{{facts}, kccl_nccl_image_{number}}},"


def _embedded(number: int, file: Path) -> str:
    """Returns the definition of an image's bytes. The zero behind them ends PTX."""
    name = f"kccl_nccl_image_{number}"
    return (
        f'__asm__(".section .rodata\\n.balign 64\\n.globl {name}\\n.hidden {name}\\n{name}:\\n"\n'
        f'        ".incbin \\"{file.resolve()}\\"\\n.byte 0\\n.previous\\n");\n'
        f'extern "C" const unsigned char {name}[];'
    )
