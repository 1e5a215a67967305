"""What pyproject.toml cannot say: how each C++ file is compiled."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from threading import Lock
from typing import Any, ClassVar

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

OPTIMISED = "-O2"
# No contraction, because a fused multiply-add would change the bits of a result.
COMMON_FLAGS = [
    "-std=c++20",
    OPTIMISED,
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    # Debug information would be nine tenths of the library.
    "-g0",
    "-Wall",
    "-Wextra",
    # clang: loops over some element types have no vector form, which is known and no fault.
    "-Wno-pass-failed",
]
# gcc: the cost model of -O3, without which -O2 leaves loops over long messages scalar. clang
# vectorises at -O2, and Zig refuses gcc's name of it.
NOT_FOR_ZIG = ["-fvect-cost-model=dynamic", "-Wno-ignored-optimization-argument"]
# Python's headers define what a C library's already have.
FOR_ZIG = ["-Wno-macro-redefined"]
# prfchw: asks for lines that are about to be written (mem.cuh); where AVX2 is, it does not fault.
AVX2 = ["-mavx2", "-mbmi2", "-mf16c", "-mfma", "-mprfchw"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
FLAGS_BY_FILE = {
    "kernels_x86_64_v3.cpp": AVX2,
    "kernels_x86_64_v4.cpp": AVX512,
    # Vectors of 64 bytes never cross a call, so it does not matter how they would be passed.
    "compute_baseline.cpp": ["-Wno-psabi"],
    "compute_x86_64_v3.cpp": [*AVX2, "-Wno-psabi"],
    "compute_x86_64_v4.cpp": AVX512,
    "compute_x86_64_vnni.cpp": [*AVX512, "-mavx512vnni"],
    # cffi's generated code converts through incomplete initialisers.
    "kccl._core.cpp": ["-Wno-missing-field-initializers"],
}

# The oldest C library with which wheels of `bdist_wheel --machine` run. NumPy's and ml_dtypes' need
# no older one.
GLIBC = (2, 28)
MACHINES = ("x86_64", "aarch64")

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


# Files of the package run by themselves, because the package may not be there yet.
PACKAGE = Path(__file__).parent / "kccl"
# What most of the simulator's files include. To read it takes longer than to compile most of them.
SIM_HEADER = "csrc/sim/machine.h"
COMPILERS = run_path(str(PACKAGE / "jit" / "compilers.py"))


def find_compiler() -> None:
    """Sets CC and CXX to the compiler inside the ziglang wheel where the system has none."""
    cxx = COMPILERS["find_cxx"]()
    if cxx is None:
        extras = run_path(str(PACKAGE / "base" / "extras.py"))
        sys.exit(
            "kccl needs a C++ compiler: CXX is not set, and there is no g++, clang++ or c++. "
            f"{COMPILERS['cure'](extras['pip_install']())} 'setuptools>=77' 'cffi>=2.0', then "
            "pip install --no-build-isolation ..."
        )
    if COMPILERS["is_zig"](cxx) and "CXX" not in os.environ:
        os.environ["CC"] = shlex.join(COMPILERS["zig"]("cc"))
        os.environ["CXX"] = shlex.join(cxx)


def compiler_for(machine: str) -> list[str]:
    """Returns the ziglang wheel's C++ compiler for any Linux on a machine, as words."""
    if find_spec("ziglang") is None:
        sys.exit("a wheel for a machine is compiled by ziglang: pip install ziglang==0.17.0")
    return [*COMPILERS["zig"]("c++"), "-target", "{}-linux-gnu.{}.{}".format(machine, *GLIBC)]


def audit(wheel: str, machine: str) -> None:
    """Exits with an error unless auditwheel says that a wheel runs with the C library of GLIBC."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    told = subprocess.run(command, stdout=subprocess.PIPE)
    if told.returncode != 0:
        sys.exit(f"auditwheel cannot read {wheel}: pip install auditwheel, or see its message")
    tag = json.loads(told.stdout).get("overall_tag", "")
    oldest = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{machine}", tag)
    if oldest is None or (int(oldest[1]), int(oldest[2])) > GLIBC:
        sys.exit("{} is for {}, must be for {} and glibc {}.{}".format(wheel, tag, machine, *GLIBC))


def is_up_to_date(obj: str, command: str) -> bool:
    """Whether an object was compiled by this command from files as they are now.

    The compiler lists the files in a makefile's rule beside the object, `compile_one` the command.
    """
    rule, recorded = Path(obj).with_suffix(".d"), Path(obj).with_suffix(".command")
    if not all(path.exists() for path in (Path(obj), rule, recorded)):
        return False
    if recorded.read_text() != command:
        return False
    made = os.path.getmtime(obj)
    files = rule.read_text().replace("\\\n", " ").split()[1:]
    return all(os.path.exists(file) and os.path.getmtime(file) <= made for file in files)


class BuildExt(build_ext):
    """Compiles the files of the extension side by side, each with its own flags.

    An object stays in build/ and is compiled again only when a file that it includes has changed.
    """

    # The machine that bdist_wheel was given; None: this one, by this one's compiler.
    machine: str | None = None

    def finalize_options(self) -> None:
        super().finalize_options()
        # Why not pip's choice: that folder is a new one each time.
        self.build_temp = os.path.join("build", self.machine or "", "objects")

    def run(self) -> None:
        if self.machine is None:
            find_compiler()
        super().run()

    def build_extensions(self) -> None:
        compiler: Any = self.compiler
        if self.machine is not None:
            # Instead of the flags of this machine's Python and of the environment.
            cxx = compiler_for(self.machine)
            shown = f"-Wl,--version-script={PACKAGE / 'csrc/host/core.map'}"
            compiler.set_executables(
                compiler_so_cxx=[*cxx, "-fPIC", "-DNDEBUG"],
                # Zig compiles the C++ library, too.
                linker_so_cxx=[*cxx, OPTIMISED, "-shared", "-s", shown],
                # Otherwise its first words replace those of the linker.
                compiler_cxx=[],
            )
        compile_one = compiler._compile
        is_zig = COMPILERS["is_zig"](compiler.compiler_so_cxx)
        of_compiler = FOR_ZIG if is_zig else NOT_FOR_ZIG
        on_x86_64 = (self.machine or platform.machine()) in ("x86_64", "AMD64")
        header = Path("build", self.machine or "", "sim.h")
        precompiled = Path(f"{header}.gch")
        precompiling = Lock()

        def precompile(cc_args: list[str], flags: list[str]) -> None:
            """Lets the compiler read SIM_HEADER once for all files that include it first."""
            rule = ["-MMD", "-MF", str(precompiled.with_suffix(".d"))]
            language = ["-x", "c++-header"]
            command = [*compiler.compiler_so_cxx, *cc_args, *flags, *rule, *language]
            with precompiling:
                if is_up_to_date(str(precompiled), repr(command)):
                    return
                header.parent.mkdir(parents=True, exist_ok=True)
                header.write_text(f'#include "{SIM_HEADER}"\n')
                self.spawn([*command, str(header), "-o", str(precompiled)])
                precompiled.with_suffix(".command").write_text(repr(command))

        def compile_with_flags(
            obj: str, src: str, ext: str, cc_args: list[str], extra: list[str], pp_opts: list[str]
        ) -> None:
            own = FLAGS_BY_FILE.get(os.path.basename(src), []) if on_x86_64 else []
            rule = str(Path(obj).with_suffix(".d"))
            common = [*extra, *COMMON_FLAGS, *of_compiler, *own]
            flags = [*common, "-MMD", "-MF", rule]
            args = (cc_args, flags, pp_opts)
            command = repr((compiler.compiler_so_cxx, args))
            if is_up_to_date(obj, command):
                return

            def compile_and_record() -> None:
                # Zig's clang, which compiles wheels, reads the header in each file.
                if not is_zig and f'"{Path(SIM_HEADER).name}"' in Path(src).read_text():
                    precompile(cc_args, common)
                    compile_one(obj, src, ext, cc_args, [*flags, "-include", str(header)], pp_opts)
                    # The compiler does not list what it did not read.
                    files = precompiled.with_suffix(".d").read_text().partition(f"{header} ")[2]
                    Path(rule).write_text(Path(rule).read_text() + files)
                else:
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


class BdistWheel(bdist_wheel):
    """With --machine, a wheel for every Linux on that machine, which need not be this one."""

    user_options: ClassVar = [
        *bdist_wheel.user_options,
        ("machine=", None, f"for every Linux on this machine: {' or '.join(MACHINES)}"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.machine: str | None = None

    def finalize_options(self) -> None:
        if self.machine is not None:
            if self.machine not in MACHINES:
                sys.exit(f"--machine is {self.machine}, must be {' or '.join(MACHINES)}")
            self.plat_name = "manylinux_{}_{}_{}".format(*GLIBC, self.machine)
            self.distribution.get_command_obj("build").build_lib = f"build/{self.machine}/lib"
            self.distribution.get_command_obj("build_ext").machine = self.machine
        super().finalize_options()

    def run(self) -> None:
        if self.machine is None:
            return super().run()
        # All that lies there goes into the wheel, also what an earlier one had.
        shutil.rmtree(f"build/{self.machine}/lib", ignore_errors=True)
        super().run()
        audit(self.distribution.dist_files[-1][2], self.machine)


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
    cmdclass={
        "bdist_wheel": BdistWheel,
        "build_ext": BuildExt,
        "build_py": BuildPy,
        "editable_wheel": EditableWheel,
    },
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
