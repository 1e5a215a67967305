"""Compiles device source for NVIDIA GPUs with NVRTC. Needs no GPU and no driver.

An entry of the cache is one line of JSON with the kernels' mangled names, and then the cubin.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..base.errors import BackendError, CompileError, InvalidArgument
from . import cache

_FLAGS = ("-std=c++20", "-lineinfo")
_OLDEST = 80
_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"NVRTC cannot be loaded: {error}. pip install 'kccl[cuda]'") from error
    return nvrtc


def _call(name: str, *args: Any) -> Any:
    """Calls a function of NVRTC. Returns its result, a tuple of its results, or None.

    Raises:
        BackendError: The call failed, or NVRTC is not installed.
    """
    code, *results = getattr(_library(), name)(*args)
    if int(code) != 0:
        raise BackendError(f"{name} failed: {code.name} ({int(code)})")
    return results[0] if len(results) == 1 else tuple(results) or None


def compile_cuda(
    source: str,
    kernels: Sequence[str],
    *,
    arch: str,
    name: str = "source",
    include_dirs: Sequence[Path] = (),
    csrc: Path = cache.CSRC,
) -> Path:
    """Compiles kernels for a GPU.

    Args:
        source: Text in the dialect of platform.cuh and mem.cuh, or plain CUDA C++.
        kernels: Names or template instances.
        arch: Architecture, as in "sm_90a".
        name: Name of the source in messages.
        include_dirs: More folders to search for headers.
        csrc: Root of the device headers.

    Returns:
        The path of the entry in the cache, for read().

    Raises:
        InvalidArgument: This NVRTC does not know the architecture, or KCCL does not support it.
        CompileError: The source does not compile; has the compiler's log.
        BackendError: NVRTC is not installed, or the cache cannot be written to.
    """
    _check_arch(arch)
    folders = [csrc / "include", *include_dirs]
    flags = [f"-arch={arch}", *_FLAGS, *(f"-I{folder}" for folder in folders)]
    key = cache.key_of(
        f"// {name}: {json.dumps(list(kernels))}\n{source}",
        target=f"cuda {arch}",
        compiler=compiler_name(),
        flags=flags,
        include_dirs=folders,
    )
    return cache.cached(key, ".cubin", lambda: _make(source, kernels, name, flags))


@lru_cache(maxsize=1)
def compiler_name() -> str:
    """Name and version of NVRTC; differs between any two builds.

    Raises:
        BackendError: NVRTC is not installed.
    """
    number = ".".join(map(str, _call("nvrtcVersion")))
    for wheel in _WHEELS:
        try:
            return f"NVRTC {number} ({wheel} {version(wheel)})"
        except PackageNotFoundError:
            continue
    return f"NVRTC {number}"


def read(path: Path) -> tuple[list[str], bytes]:
    """The kernels' mangled names, and the cubin, of an entry from compile_cuda()."""
    names, _, code = path.read_bytes().partition(b"\n")
    return json.loads(names), code


def _check_arch(arch: str) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    known = [number for number in _call("nvrtcGetSupportedArchs") if number >= _OLDEST]
    if match is None or int(match[1]) not in known:
        able = ", ".join(f"sm_{number}" for number in known)
        raise InvalidArgument(f"arch is {arch!r}, must be one of {able} with {compiler_name()}")


def _make(source: str, kernels: Sequence[str], name: str, flags: Sequence[str]) -> bytes:
    program = _call("nvrtcCreateProgram", source.encode(), name.encode(), 0, [], [])
    try:
        for kernel in kernels:
            _call("nvrtcAddNameExpression", program, kernel.encode())
        options = [flag.encode() for flag in flags]
        try:
            _call("nvrtcCompileProgram", program, len(options), options)
        except BackendError as error:
            log = _text(program, "ProgramLog").partition(b"\0")[0].decode(errors="replace").strip()
            raise CompileError(
                f"{name} does not compile with {compiler_name()}:\n{log or error}", log=log
            ) from error
        names = [_call("nvrtcGetLoweredName", program, each.encode()) for each in kernels]
        return (
            json.dumps([each.decode() for each in names]).encode() + b"\n" + _text(program, "CUBIN")
        )
    finally:
        _call("nvrtcDestroyProgram", program)


def _text(program: object, what: str) -> bytes:
    """The text that nvrtcGet<what> returns."""
    size = _call(f"nvrtcGet{what}Size", program)
    buffer = bytearray(size)
    _call(f"nvrtcGet{what}", program, buffer)
    return bytes(buffer)
