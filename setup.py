"""What pyproject.toml cannot say: how each C++ file is compiled."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext

# No contraction, because a fused multiply-add would change the bits of a result.
COMMON_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]
AVX2 = ["-mavx2", "-mbmi2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
FLAGS_BY_FILE = {
    "kernels_x86_64_v3.cpp": AVX2,
    "kernels_x86_64_v4.cpp": AVX512,
    # cffi's generated code converts through incomplete initialisers.
    "kccl._core.cpp": ["-Wno-missing-field-initializers"],
}


class BuildExt(build_ext):
    """Compiles the files of the extension side by side, each with its own flags."""

    def build_extensions(self) -> None:
        compiler: Any = self.compiler
        compile_one = compiler._compile
        on_x86_64 = platform.machine() in ("x86_64", "AMD64")

        def compile_with_flags(
            obj: str, src: str, ext: str, cc_args: list[str], extra: list[str], pp_opts: list[str]
        ) -> None:
            flags = FLAGS_BY_FILE.get(os.path.basename(src), []) if on_x86_64 else []
            pending.append(
                pool.submit(
                    compile_one, obj, src, ext, cc_args, [*extra, *COMMON_FLAGS, *flags], pp_opts
                )
            )

        original_compile = compiler.compile

        def compile_all(*args: Any, **kwargs: Any) -> Any:
            objects = original_compile(*args, **kwargs)
            for future in pending:
                future.result()
            pending.clear()
            return objects

        pending: list[Any] = []
        compiler._compile = compile_with_flags
        compiler.compile = compile_all
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            super().build_extensions()


setup(
    cffi_modules=["csrc/host/build_ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
