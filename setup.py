"""What pyproject.toml cannot say: how each C++ file is compiled."""

import os
import platform
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

# No contraction, because a fused multiply-add would change the bits of a result.
COMMON_FLAGS = [
    "-std=c++20",
    "-O2",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    # Debug information would be nine tenths of the library.
    "-g0",
    "-Wall",
    "-Wextra",
    # gcc: the cost model of -O3, without which -O2 leaves loops over long messages scalar. clang
    # vectorises at -O2.
    "-fvect-cost-model=dynamic",
    "-Wno-ignored-optimization-argument",
    # clang: loops over some element types have no vector form, which is known and no fault.
    "-Wno-pass-failed",
]
# prfchw: asks for lines that are about to be written (mem.cuh); where AVX2 is, it does not fault.
AVX2 = ["-mavx2", "-mbmi2", "-mfma", "-mprfchw"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
FLAGS_BY_FILE = {
    "kernels_x86_64_v3.cpp": AVX2,
    "kernels_x86_64_v4.cpp": AVX512,
    # Vectors of 64 bytes never cross a call, so it does not matter how they would be passed.
    "compute_baseline.cpp": ["-Wno-psabi"],
    "compute_x86_64_v3.cpp": [*AVX2, "-Wno-psabi"],
    "compute_x86_64_v4.cpp": AVX512,
    # cffi's generated code converts through incomplete initialisers.
    "kccl._core.cpp": ["-Wno-missing-field-initializers"],
}

# Tools of the checkout: they need its records and its tests.
ONLY_IN_CHECKOUT = {
    ("kccl.bench", "readme"),
    ("kccl.bench", "summary"),
    ("kccl.bench.gpu", "__main__"),
    ("kccl.bench.gpu", "make_gpu"),
    ("kccl.bench.gpu", "steps"),
    ("kccl.bench.gpu", "suite"),
    ("kccl.bench.gpu", "warm"),
}


def find_compiler() -> None:
    """Sets CC and CXX to the compiler inside the ziglang wheel where the system has none."""
    # By itself, because the package may not be there yet.
    package = Path(__file__).parent / "kccl"
    compilers = run_path(str(package / "jit" / "compilers.py"))
    cxx = compilers["find_cxx"]()
    if cxx is None:
        extras = run_path(str(package / "base" / "extras.py"))
        sys.exit(
            "kccl needs a C++ compiler: CXX is not set, and there is no g++, clang++ or c++. "
            f"{compilers['cure'](extras['pip_install']())} 'setuptools>=77' 'cffi>=2.0', then "
            "pip install --no-build-isolation ..."
        )
    if compilers["is_zig"](cxx) and "CXX" not in os.environ:
        os.environ["CC"] = shlex.join(compilers["zig"]("cc"))
        os.environ["CXX"] = shlex.join(cxx)


def is_up_to_date(obj: str, command: str) -> bool:
    """Whether an object was compiled by this command from files as they are now.

    The compiler lists the files in a makefile's rule beside the object, `compile_one` the command.
    """
    rule, recorded = Path(obj).with_suffix(".d"), Path(obj).with_suffix(".command")
    if not (rule.exists() and recorded.exists() and recorded.read_text() == command):
        return False
    made = os.path.getmtime(obj)
    files = rule.read_text().replace("\\\n", " ").split()[1:]
    return all(os.path.exists(file) and os.path.getmtime(file) <= made for file in files)


class BuildExt(build_ext):
    """Compiles the files of the extension side by side, each with its own flags.

    An object stays in build/ and is compiled again only when a file that it includes has changed.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        # Why not pip's choice: that folder is a new one each time.
        self.build_temp = os.path.join("build", "objects")

    def run(self) -> None:
        find_compiler()
        super().run()

    def build_extensions(self) -> None:
        compiler: Any = self.compiler
        compile_one = compiler._compile
        on_x86_64 = platform.machine() in ("x86_64", "AMD64")

        def compile_with_flags(
            obj: str, src: str, ext: str, cc_args: list[str], extra: list[str], pp_opts: list[str]
        ) -> None:
            flags = FLAGS_BY_FILE.get(os.path.basename(src), []) if on_x86_64 else []
            rule = str(Path(obj).with_suffix(".d"))
            args = (cc_args, [*extra, *COMMON_FLAGS, *flags, "-MMD", "-MF", rule], pp_opts)
            command = repr((compiler.compiler_so_cxx, args))
            if is_up_to_date(obj, command):
                return

            def compile_and_record() -> None:
                compile_one(obj, src, ext, *args)
                Path(obj).with_suffix(".command").write_text(command)

            pending.append(pool.submit(compile_and_record))

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


class EditableWheel(editable_wheel):
    """An editable install by a line in a .pth file, which mypy and editors follow.

    Setuptools' own choice is an import hook, because of the symbolic links in the package.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.mode = "compat"


class BuildPy(build_py):
    """Copies the package without the checkout's tools, and writes the version for CMake."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] not in ONLY_IN_CHECKOUT]

    def run(self) -> None:
        super().run()
        # An editable install has no copy: it is the checkout.
        if not self.editable_mode:
            self._version_file.write_text(
                f'set(PACKAGE_VERSION "{self.distribution.get_version()}")\n'
            )

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, str(self._version_file)]

    @property
    def _version_file(self) -> Path:
        return Path(self.build_lib, "kccl", "csrc", "cmake", "kcclVersion.cmake")


setup(
    # Through the package's symbolic link, because an sdist has only what lies in the package.
    cffi_modules=["kccl/csrc/host/build_ffi.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "editable_wheel": EditableWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
