"""MPI as a peer: calls of mpi4py in this job. MPICH's algorithm is switched between repeats.

It is used in a kccl job under mpirun, and in `mpi_job.py`. The caller imports mpi4py.
"""

from __future__ import annotations

import ctypes
import re
from functools import partial
from typing import Any

from ..harness.collective import Collective
from ..harness.measure import Contender, eager
from ..harness.problem import Problem, buffers

_RESULT_IN_FRONT = (
    "MPI's reduce_scatter in place leaves the result at the front, not in the rank's chunk: no MPI "
    "rows for it. --out-of-place compares with MPI"
)
_NO_MPI_DTYPE = "MPI has no {dtype}: no MPI rows for it. -d float32 compares with MPI"


def unsupported(problem: Problem) -> str | None:
    """Returns why MPI does not support this problem, or None if it does."""
    dtype = problem.np_dtype
    is_mpi_float = dtype is not None and dtype.name in ("float32", "float64")
    if dtype is not None and dtype.kind not in "iu" and not is_mpi_float:
        return _NO_MPI_DTYPE.format(dtype=problem.dtype)
    if problem.op == "avg":
        return "MPI has no average: no MPI rows for --op avg"
    if problem.collective == "reduce_scatter" and problem.in_place:
        return _RESULT_IN_FRONT
    return None


def library(mpi: Any) -> str:
    """Returns the name of the loaded MPI library in rows: "mpich", "openmpi", "impi", or the first
    word of the library's own name.
    """
    name: str = mpi.get_vendor()[0]
    return {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "impi"}.get(
        name, name.split()[0].lower()
    )


def contenders(mpi: Any, comm: Any, collective: Collective, problem: Problem) -> list[Contender]:
    """Returns MPI's contenders for the problem: the library's default and, in MPICH, the
    collective's second algorithm if it has one; otherwise the default and the table's mpi_others.
    All use the same buffers.
    """
    mine = buffers(problem)
    call = collective.mpi(mpi, comm, mine, problem)
    name = library(mpi)
    if collective.mpi_algorithm is None or name != "mpich":
        others = {
            algorithm: make(mpi, comm, mine, problem)
            for algorithm, make in collective.mpi_others.items()
        }
        calls = {collective.mpi_default: call, **others}
        return [eager(name, each, "direct", mine, run) for each, run in calls.items()]
    variable, value = collective.mpi_algorithm
    switch = ControlVariable(variable)
    return [
        eager(name, "default", "direct", mine, call, enter=partial(switch.select, "auto")),
        eager(name, value, "direct", mine, call, enter=partial(switch.select, value)),
    ]


class ControlVariable:
    """One of MPICH's enumerated control variables, changed at run time through the MPI tool
    interface (MPI_T).

    Each rank sets its own copy. All ranks must set the same value before a collective call.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Opens the library that mpi4py has loaded by its path: by name, another might be found.
        self._mpi = ctypes.CDLL(_loaded_library())
        self._call("MPI_T_init_thread", ctypes.c_int(0), ctypes.byref(ctypes.c_int()))
        index = ctypes.c_int()
        self._call("MPI_T_cvar_get_index", name.encode(), ctypes.byref(index))
        self._values = self._read_values(index)
        self._handle = ctypes.c_void_p()
        count = ctypes.c_int()
        self._call(
            "MPI_T_cvar_handle_alloc", index, None, ctypes.byref(self._handle), ctypes.byref(count)
        )

    def select(self, value: str) -> None:
        """Set the variable and read it back.

        Raises:
            ValueError: MPICH knows no such value.
            RuntimeError: the variable did not take the value.
        """
        if value not in self._values:
            raise ValueError(
                f"{self.name} has no value {value!r}; MPICH lists {', '.join(self._values)}"
            )
        wanted = ctypes.c_int(self._values.index(value))
        self._call("MPI_T_cvar_write", self._handle, ctypes.byref(wanted))
        seen = ctypes.c_int(-1)
        self._call("MPI_T_cvar_read", self._handle, ctypes.byref(seen))
        if seen.value != wanted.value:
            raise RuntimeError(
                f"{self.name} reads {seen.value} after {wanted.value} ({value}) was written"
            )

    def _read_values(self, index: ctypes.c_int) -> list[str]:
        """Returns the names in the order of their numbers: MPICH lists them as "name - meaning", a
        line each, in the description.
        """
        name_size, text_size = ctypes.c_int(256), ctypes.c_int(8192)
        name, text = ctypes.create_string_buffer(256), ctypes.create_string_buffer(8192)
        unused = [ctypes.c_int() for _ in range(3)]
        datatype, enumeration = ctypes.c_void_p(), ctypes.c_void_p()
        self._call(
            "MPI_T_cvar_get_info",
            index,
            name,
            ctypes.byref(name_size),
            ctypes.byref(unused[0]),
            ctypes.byref(datatype),
            ctypes.byref(enumeration),
            text,
            ctypes.byref(text_size),
            ctypes.byref(unused[1]),
            ctypes.byref(unused[2]),
        )
        return re.findall(r"^(\w+)\s+- ", text.value.decode(), re.MULTILINE)

    def _call(self, function: str, *arguments: object) -> None:
        code = getattr(self._mpi, function)(*arguments)
        if code != 0:
            raise RuntimeError(f"{function} for {self.name} failed: MPI error {code}")


def _loaded_library() -> str:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if re.search(r"/libmpi\.so[.\d]*$", line.rstrip()):
                return line.split(maxsplit=5)[5].rstrip()
    raise RuntimeError("no libmpi.so is loaded in this process")
