"""The device compilers of two wheels: NVRTC by ctypes, and ziglang's clang for AMD GPUs."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def find_nvrtc() -> Path | None:
    """The library of the nvidia-cuda-nvrtc wheel, or None when the wheel is not installed."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("cu13/lib/libnvrtc.so.*")]
    return found[0] if found else None


def find_cuda_headers() -> Path | None:
    """The folder of cuda.h, in the nvidia-cuda-runtime wheel or a toolkit; None without either."""
    spec = find_spec("nvidia")
    folders = (
        [Path(each) / "cu13/include" for each in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        told = subprocess.run(
            [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        folders += map(Path, re.findall(r'"-I([^"]+)"', told.stderr))
    return next((folder for folder in folders if (folder / "cuda.h").is_file()), None)


def has_zig() -> bool:
    return find_spec("ziglang") is not None


def compile_cuda(
    library: Path, source: str, expressions: list[str], arch: str, include_dir: Path
) -> tuple[str, str]:
    """Compiles with NVRTC the kernels that the name expressions name.

    Returns:
        The PTX, and what ptxas -v said.
    """
    # NVRTC opens this library by its bare name, which the loader finds only if it is loaded.
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    nvrtc = ctypes.CDLL(str(library))

    def call(name: str, *args: object) -> int:
        return int(getattr(nvrtc, f"nvrtc{name}")(*args))

    def text(name: str) -> str:
        size = ctypes.c_size_t()
        assert call(f"Get{name}Size", program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert call(f"Get{name}", program, buffer) == 0
        return buffer.value.decode()

    program = ctypes.c_void_p()
    created = call(
        "CreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    assert created == 0
    try:
        for expression in expressions:
            assert call("AddNameExpression", program, expression.encode()) == 0
        options = [
            f"-arch={arch}",
            "-std=c++20",
            "--ptxas-options=-v",
            f"-I{include_dir}",
        ]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = call("CompileProgram", program, len(options), array)
        log = text("ProgramLog")
        assert not failed, log
        return text("PTX"), log
    finally:
        call("DestroyProgram", ctypes.byref(program))


def compile_hip(
    source: str, arch: str, folder: Path, include_dir: Path, options: Sequence[str] = ()
) -> str:
    """Compiles with clang for an AMD GPU; returns the assembly, metadata included.

    Args:
        source: The translation unit.
        arch: As in "gfx942".
        folder: Where the source is written.
        include_dir: The headers' folder.
        options: More of clang's.
    """
    path = folder / "kernels.hip"
    path.write_text(source)
    command = [sys.executable, "-m", "ziglang", "clang", "-x", "hip", "--cuda-device-only"]
    command += ["-nogpulib", "-nogpuinc", "-O3", "-std=c++20", "-Wall", "-Wextra", "-Werror"]
    command += [f"--offload-arch={arch}", f"-I{include_dir}", *options]
    command += ["-S", str(path), "-o", "-"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ptx_entries(ptx: str) -> dict[str, str]:
    """Body of each kernel by its name; device functions that are called are not part of it."""
    bodies = re.findall(r"\.entry (\w+)\(.*?\)\n.*?^\{(.*?)^\}", ptx, re.DOTALL | re.MULTILINE)
    return dict(bodies)


def amd_functions(assembly: str) -> dict[str, str]:
    """Body of each function by its name."""
    bodies = re.findall(
        r"^(\w+):[^\n]*; @\1\n(.*?)^\.Lfunc_end", assembly, re.DOTALL | re.MULTILINE
    )
    return dict(bodies)


def amd_metadata(assembly: str) -> dict[str, dict[str, int]]:
    """The numbers in the code object's metadata of each kernel, by the kernel's name."""
    kernels = {}
    metadata = assembly[assembly.index(".amdgpu_metadata") :]
    for block in metadata.split("  - .agpr_count:")[1:]:
        name = re.search(r"\.name: +(\w+)", block)
        assert name is not None
        kernels[name[1]] = {key: int(n) for key, n in re.findall(r"\.(\w+): +(\d+)\n", block)}
    return kernels
