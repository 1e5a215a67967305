"""The HIP runtime of the tests (tests/hip_runtime): builds it, and lets hip-python load it.

`load()` is for this process. `environment()` is for others, which find it by LD_LIBRARY_PATH.
"""

import ctypes
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from built_objects import object_of
from source_tree import ROOT

from kccl.base import abi
from kccl.jit import cache, compilers

HERE = ROOT / "tests" / "hip_runtime"
SIM = ROOT / "csrc" / "sim"
_DRIVER = ("devices.cpp", "memory.cpp", "streams.cpp", "graphs.cpp", "kernels.cpp")
LIBRARIES = {
    "libamdhip64.so": [*map(HERE.joinpath, _DRIVER), *sorted(SIM.glob("*.cpp"))],
    "libhiprtc.so": [HERE / "rtc.cpp"],
}
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_HIPRTC = (
    f'-DHIP_RUNTIME_PYTHON="{sys.executable}"',
    f'-DHIP_RUNTIME_COMPILER="{HERE / "compile_sim.py"}"',
)


@lru_cache(maxsize=1)
def folder():
    """The folder with the libraries. They stay in the cache of compiled kernels."""
    cxx = compilers.find_cxx()
    unit = "\n".join(f'#include "{path}"' for paths in LIBRARIES.values() for path in paths)
    key = cache.key_of(
        unit,
        target="the tests' HIP runtime",
        compiler=shlex.join(cxx),
        flags=[*FLAGS, *_HIPRTC],
        # The files have absolute paths; a folder makes the key follow them.
        include_dirs=[ROOT],
    )
    where = cache.cache_folder() / f"hip-{key[:16]}"
    cache.cached(key, ".hip", lambda: _build(cxx, where))
    return where


def _build(cxx, where):
    where.mkdir(parents=True, exist_ok=True)

    def compiled(path):
        known = object_of(path)
        if known is not None:
            return str(known)
        made = where / f"{path.parent.name}-{path.stem}.o"
        subprocess.run([*cxx, *FLAGS, *_HIPRTC, "-c", str(path), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, paths in LIBRARIES.items():
            parts = list(pool.map(compiled, paths))
            aside = where / f".{name}.{os.getpid()}"
            link = [*cxx, "-shared", f"-Wl,-soname,{name}", *parts, "-o", str(aside), "-ldl"]
            subprocess.run([*link, "-pthread"], check=True)
            os.replace(aside, where / name)
    return b"built"


@lru_cache(maxsize=1)
def load():
    """The libraries by name. From now on hip-python finds these, because their names are loaded."""
    return {name: ctypes.CDLL(str(folder() / name), ctypes.RTLD_GLOBAL) for name in LIBRARIES}


def fail(function, code):
    """Lets a function of the driver or of hipRTC return this code from now on; 0: it works."""
    library = load()["libhiprtc.so" if function.startswith("hiprtc") else "libamdhip64.so"]
    library.hip_runtime_fail(function.encode(), code)


def quicken():
    """Lets waiting kernels of this process look at the clock at each poll: the simulated machine
    polls every 2 ms, and a GPU a million times as often.
    """
    abi.GPU_POLLS_PER_CHECK = 1


def environment():
    """Variables for processes that shall use the runtime."""
    paths = [str(folder()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(paths)}
