"""NVSHMEM as a peer: its on-stream collectives within one machine, over NVLink without multicast.

The library is that of NVIDIA's wheel, which PyTorch's wheels require.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..gpu.clock import GpuClock, both_modes
from ..gpu.device import Gpu
from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Call, Problem
from .notes import PeerNotes
from .torch import NO_MULTICAST

_TYPES = {
    **{"float32": "float", "float64": "double", "float16": "half"},
    **{"bfloat16": "bfloat16", "int32": "int32", "int64": "int64"},
}
_VARIABLES = {
    **NO_MULTICAST,
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    # NVSHMEM's ranks connect over the loopback interface.
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
}
_HEAP_BYTES = 256 << 20
_UNIQUEID_BYTES, _ATTRIBUTES_BYTES = 128, 144
_VERSION_1 = 1 << 16
_WITH_UNIQUEID = 1 << 3
_WHEELS = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")


class Library:
    """libnvshmem_host through ctypes."""

    TEAM_WORLD = 0

    @staticmethod
    def type_of(dtype: str | None) -> str:
        """Returns the name of an element type in the names of NVSHMEM's functions."""
        return _TYPES[str(dtype)]

    def __init__(self) -> None:
        """Loads the library.

        Raises:
            FileNotFoundError: NVSHMEM is not installed.
        """
        spec = find_spec("nvidia")
        folders = (spec.submodule_search_locations or ()) if spec is not None else ()
        found = [
            path for at in folders for path in Path(at).glob("nvshmem/lib/libnvshmem_host.so.*")
        ]
        if not found:
            raise FileNotFoundError("no nvidia/nvshmem/lib/libnvshmem_host.so: not installed")
        self._library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    def function(self, name: str, argtypes: Sequence[Any], restype: Any = ctypes.c_int) -> Any:
        """Returns the function of this name, with these types."""
        found = getattr(self._library, name)
        found.argtypes, found.restype = argtypes, restype
        return found

    def on_stream(self, name: str, *arguments: int) -> Call:
        """Returns a call of nvshmemx_<name>_on_stream on the team of all ranks.

        It raises RuntimeError if the function does not return 0.

        Args:
            name: Such as "bfloat16_sum_reduce".
            *arguments: Addresses, counts and root, as the function takes them; last the stream.
        """
        kinds = [ctypes.c_int, *[ctypes.c_uint64] * len(arguments)]
        return partial(
            _checked,
            self.function(f"nvshmemx_{name}_on_stream", kinds),
            self.TEAM_WORLD,
            *arguments,
        )


def _checked(function: Any, *arguments: int) -> None:
    code = function(*arguments)
    if code != 0:
        raise RuntimeError(f"{function.__name__} returned {code}")


class NvshmemPeer:
    """NVSHMEM's calls as contenders.

    Attributes:
        libraries: Name -> version, once NVSHMEM has started.
    """

    def __init__(self, gpu: Gpu, clock: GpuClock) -> None:
        """Starts NVSHMEM. Collective. Does not raise if something is missing: notes() says so."""
        self.libraries: dict[str, str] = {}
        self._gpu = gpu
        self._clock = clock
        self._missing = PeerNotes(gpu.comm)
        self._library: Library | None = None
        self._heap = 0
        if gpu.comm.world_size == 1:
            return
        os.environ.update(_VARIABLES)
        made: list[Library] = []
        if self._missing.agree("nvshmem", None, lambda: made.append(Library())):
            self._start(made[0])

    def contenders(self, collective: Collective, problem: Problem) -> list[Contender]:
        """Returns its in-place call in both modes, if it has one. Collective."""
        library, gpu = self._library, self._gpu
        if library is None:
            return []
        why_not = self._why_not(collective, problem)
        if why_not:
            self._missing.add("nvshmem", why_not, problem.nbytes)
            return []
        calls: list[Call] = []

        def first() -> None:
            assert collective.nvshmem is not None
            calls.append(collective.nvshmem(library, self._heap, problem, gpu.stream))
            # The first call loads NVSHMEM's kernels, which must not happen during a capture.
            calls[0]()

        if not self._missing.agree("nvshmem", problem.nbytes, first):
            return []
        gpu.wait()
        buffers = gpu.wrap(self, self, self._heap, self._heap, problem)
        names = ("nvshmem", "on_stream", "direct")
        return both_modes(self._clock, collective, names, buffers, calls[0], gpu.capture)

    @staticmethod
    def _why_not(collective: Collective, problem: Problem) -> str:
        if collective.nvshmem is None:
            return f"its {collective.name} is not measured"
        if problem.in_place is False:
            return "measured in place only"
        if problem.op == "avg":
            return "it has no average"
        return "larger than its heap here" if problem.nbytes > _HEAP_BYTES else ""

    def notes(self) -> list[str]:
        """See PeerNotes.take()."""
        return self._missing.take()

    def close(self) -> None:
        """Shuts NVSHMEM down. Collective."""
        if self._library is not None:
            self._gpu.wait()
            self._library.function("nvshmem_free", [ctypes.c_void_p], None)(self._heap)
            self._finalize(self._library)
            self._library = None

    def _start(self, library: Library) -> None:
        comm = self._gpu.comm
        uniqueid = ctypes.create_string_buffer(_UNIQUEID_BYTES)
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        ctypes.c_int.from_buffer(uniqueid).value = _VERSION_1 + _UNIQUEID_BYTES
        ctypes.c_int.from_buffer(attributes).value = _VERSION_1 + _ATTRIBUTES_BYTES

        def name_it() -> None:
            if comm.rank == 0:
                get = library.function("nvshmemx_get_uniqueid", [ctypes.c_void_p])
                _checked(get, ctypes.addressof(uniqueid))

        if not self._missing.agree("nvshmem", None, name_it):
            return
        told = comm.gather_objects(uniqueid.raw.hex() if comm.rank == 0 else None)[0]
        uniqueid.raw = bytes.fromhex(told)

        def fill() -> None:
            kinds = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
            function = library.function("nvshmemx_set_attr_uniqueid_args", kinds)
            addresses = ctypes.addressof(uniqueid), ctypes.addressof(attributes)
            _checked(function, comm.rank, comm.world_size, *addresses)

        # NVSHMEM's start waits for all ranks without a timeout. So the ranks agree here, and none
        # starts if one cannot.
        if not self._missing.agree("nvshmem", None, fill):
            return

        def begin() -> None:
            init = library.function("nvshmemx_hostlib_init_attr", [ctypes.c_uint, ctypes.c_void_p])
            _checked(init, _WITH_UNIQUEID, ctypes.addressof(attributes))

        if not self._missing.agree("nvshmem", None, begin):
            return
        allocate = library.function("nvshmem_malloc", [ctypes.c_size_t], ctypes.c_void_p)
        self._heap = allocate(_HEAP_BYTES) or 0
        if not self._missing.agree("nvshmem", None, self._check_heap):
            self._finalize(library)
            return
        self._library = library
        self.libraries = {"nvshmem": _version()}

    @staticmethod
    def _finalize(library: Library) -> None:
        library.function("nvshmemx_hostlib_finalize", [], None)()

    def _check_heap(self) -> None:
        if not self._heap:
            raise MemoryError(f"nvshmem_malloc refused {_HEAP_BYTES} bytes")


def _version() -> str:
    for wheel in _WHEELS:
        try:
            return version(wheel)
        except PackageNotFoundError:
            continue
    return "unknown"
