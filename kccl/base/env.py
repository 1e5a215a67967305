"""All environment variables that KCCL reads. `kccl doctor` prints them."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from . import arguments
from .errors import InvalidArgument

WINDOWS = ("vmm", "ipc", "peer")
MPI = ("off", "log")
NCCL = ("off", "log")
PRELOAD = ("all", "cached", "none")
# A process has 8 connections to a GPU, unless it asks the driver for more. Streams that share one
# wait for each other.
MOST_STREAMS = 8


@dataclass(frozen=True)
class Env:
    """The variables and their defaults. Field `timeout` is the variable KCCL_TIMEOUT, and so on.

    Attributes:
        timeout: Timeout of one wait for other ranks, in seconds.
        first_timeout: Timeout of a wait at start-up and until the first call has completed, in
            seconds. Longer, because ranks may start far apart.
        check: 1: before each collective the ranks compare collective, bytes, dtype and op.
        algorithm: Name of the algorithm to use wherever it can run.
        tuning: Path of a tuning file to use in place of the installed one.
        epoch_bits: Width of epochs in bits, 4 to 32. For tests: narrow epochs wrap soon.
        seeds: How many seeds kccl.run_threads() tries on the simulator when it is given none.
        cache: Folder of the kernels compiled at run time, and of models that were fetched. ""
            means kccl in $XDG_CACHE_HOME, or in ~/.cache where that is not set.
        windows: How ranks map each other's GPU memory: "vmm", "ipc" (between processes) or "peer"
            (between threads); see kccl/gpu/sharing.py. "" takes what the machine allows. For tests.
        dependents: 0: a call captured behind another one is launched like any kernel, not as a
            programmatic dependent. So it starts only when the one before has ended. For programs
            that ask a captured graph for its edges without the edges' data, as PyTorch's allocator
            does with graph_capture_record_stream_reuse.
        streams: How many streams of calls fit on a GPU beside each other in any order, 1 to 8. The
            more, the fewer threads the calls of each may have. The same on all ranks.
        preload: The kernels that kccl.init() loads on a GPU, so that no call loads them while
            kernels wait. "all": those that move data, which are compiled if need be, and those that
            the cache has. "cached": those that the cache has. "none": none; each call loads its
            own.
        layout: How ranks and threads are placed on cores, and ranks in groups: "topology" places
            them close together, by caches and NUMA nodes; "flat" places them in the order of their
            numbers. On AMD's GPUs grid_sync has a counter for each die by "topology", one by
            "flat".
        ranks_per_node: Most ranks of a node, 1 to 8. Ranks of different nodes exchange by MPI, also
            where they are on one machine. 0: nodes are machines.
        mpi: "off": the communicators of kccl.interop.mpi leave every call to MPI. "log": lines on
            standard error say which calls KCCL makes, and why MPI makes a call.
        nccl: "off": libkccl_nccl.so leaves every call to NCCL. "log": lines on standard error say
            which calls KCCL makes, why NCCL makes a call, and why a launch failed; at the end, how
            many calls each made. The library reads this, KCCL_TIMEOUT and KCCL_DEPENDENTS itself.
            Its waits have no limit without KCCL_TIMEOUT, as NCCL's.
        rank, world_size, rendezvous, namespaces: Set by `kccl run` for its children.
        rank_process: Set by `import kccl` for the processes that a rank starts: they are no ranks.
        openmpi_prefix: An environment with mpi4py and Open MPI, for `kccl bench --baselines`.
    """

    timeout: float = 30.0
    first_timeout: float = 300.0
    check: int = 0
    algorithm: str = ""
    tuning: str = ""
    epoch_bits: int = 32
    seeds: int = 4
    cache: str = ""
    windows: str = ""
    dependents: int = 1
    streams: int = 2
    preload: str = "all"
    layout: str = "topology"
    ranks_per_node: int = 0
    mpi: str = ""
    nccl: str = ""
    rank: int = -1
    world_size: int = 0
    rendezvous: str = ""
    namespaces: str = ""
    rank_process: str = ""
    openmpi_prefix: str = ""


def read(environ: Mapping[str, str] | None = None) -> Env:
    """Reads the variables.

    Raises:
        InvalidArgument: A value is wrong, or a variable that starts with `KCCL_` is unknown.
    """
    environ = os.environ if environ is None else environ
    known = [_name(field) for field in fields(Env)]
    for name in environ:
        if name.startswith("KCCL_") and name not in known:
            raise InvalidArgument(f"{name} is unknown, must be one of {', '.join(known)}")
    values: dict[str, Any] = {}
    for field in fields(Env):
        if (text := environ.get(_name(field))) is not None:
            values[field.name] = _value(field, text)
    return Env(**values)


def read_what_is_right() -> Env:
    """Returns the variables after read() has failed. Those with wrong values have their defaults.

    A rank that cannot start uses it to tell the others.
    """
    env = Env()
    for field in fields(Env):
        with suppress(KeyError, InvalidArgument):
            env = replace(env, **{field.name: _value(field, os.environ[_name(field)])})
    return env


def _value(field: "Field[Any]", text: str) -> Any:
    """Returns the value of a variable. Raises InvalidArgument if it is of another type or out of
    range.
    """
    name = _name(field)
    kind: Any = type(field.default)
    try:
        value = kind(text)
    except ValueError:
        words = "a whole number" if kind is int else "a number"
        cure = "" if text else f"; unset it for the default, {field.default}"
        raise InvalidArgument(f"{name}={text!r} must be {words}{cure}") from None
    for word, allowed in (("windows", WINDOWS), ("mpi", MPI), ("nccl", NCCL)):
        if field.name == word and value not in ("", *allowed):
            raise InvalidArgument(f"{name}={value!r} must be one of {', '.join(allowed)}")
    if field.name == "preload" and value not in PRELOAD:
        raise InvalidArgument(f"{name}={value!r} must be one of {', '.join(PRELOAD)}")
    if field.name == "layout":
        from ..topology import LAYOUTS

        if value not in LAYOUTS:
            raise InvalidArgument(f"{name}={value!r} must be one of {', '.join(LAYOUTS)}")
    if field.name in ("check", "dependents") and value not in (0, 1):
        raise InvalidArgument(f"{name}={value} must be 0 or 1")
    if field.name == "streams" and not 1 <= value <= MOST_STREAMS:
        raise InvalidArgument(f"{name}={value} must be between 1 and {MOST_STREAMS}")
    if field.name == "epoch_bits" and not 4 <= value <= 32:
        raise InvalidArgument(f"{name}={value} must be between 4 and 32")
    if field.name == "seeds" and value < 1:
        raise InvalidArgument(f"{name}={value} must be at least 1")
    if field.name == "ranks_per_node" and not 0 <= value <= 8:
        raise InvalidArgument(f"{name}={value} must be between 1 and 8, or 0: nodes are machines")
    if field.name in ("timeout", "first_timeout"):
        arguments.nanoseconds(name, value)
    return value


def _name(field: "Field[Any]") -> str:
    return f"KCCL_{field.name.upper()}"
