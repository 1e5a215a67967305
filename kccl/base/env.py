"""Every environment variable KCCL reads, in one object; `kccl doctor` prints it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidArgument

WINDOWS = ("vmm", "ipc", "peer")


@dataclass(frozen=True)
class Env:
    """The variables with their defaults. A variable's name is `KCCL_` and the field in capitals.

    Attributes:
        timeout: Seconds one wait may last.
        first_timeout: The same for start-up and first call, when ranks may be far apart.
        check: 1: before each collective the ranks compare collective, bytes, dtype and op.
        algorithm: Name of the algorithm to use wherever it can run.
        tuning: Path of a tuning file to use in place of the installed one.
        epoch_bits: Width of epochs, 4 to 32. For tests: narrow epochs wrap soon.
        cache: Folder of kernels compiled at run time; "" for kccl in $XDG_CACHE_HOME, which is
            ~/.cache unless set.
        windows: How ranks reach each other's GPU memory, by a name of gpu_sharing.py: "vmm", "ipc"
            between processes, "peer" between threads; "" for what the machine allows. For tests.
        dependents: 0: calls that are captured behind each other are launched as all others are, not
            as programmatic dependents, and none comes onto a GPU before the last one has ended. For
            programs that ask a captured graph for its edges without their data, as PyTorch's
            allocator does with graph_capture_record_stream_reuse.
        rank, world_size, rendezvous: Set by `kccl run` for its children.
        openmpi_prefix: Environment with mpi4py and Open MPI, for `kccl bench --baselines`.
    """

    timeout: float = 30.0
    first_timeout: float = 300.0
    check: int = 0
    algorithm: str = ""
    tuning: str = ""
    epoch_bits: int = 32
    cache: str = ""
    windows: str = ""
    dependents: int = 1
    rank: int = -1
    world_size: int = 0
    rendezvous: str = ""
    openmpi_prefix: str = ""


def read(environ: Mapping[str, str] | None = None) -> Env:
    """Reads the variables.

    Raises:
        InvalidArgument: A value does not parse, or a variable that starts with `KCCL_` is unknown.
    """
    environ = os.environ if environ is None else environ
    known = {f"KCCL_{field.name.upper()}": field for field in fields(Env)}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith("KCCL_"):
            continue
        if name not in known:
            raise InvalidArgument(f"{name} is no variable of KCCL; known: {', '.join(known)}")
        field = known[name]
        kind: Any = type(field.default)
        try:
            values[field.name] = kind(text)
        except ValueError:
            raise InvalidArgument(f"{name}={text!r} is not of type {kind.__name__}") from None
    env = Env(**values)
    if env.windows not in ("", *WINDOWS):
        raise InvalidArgument(f"KCCL_WINDOWS={env.windows!r} must be one of {', '.join(WINDOWS)}")
    if not 4 <= env.epoch_bits <= 32:
        raise InvalidArgument(f"KCCL_EPOCH_BITS={env.epoch_bits} must be between 4 and 32")
    if env.timeout <= 0 or env.first_timeout <= 0:
        raise InvalidArgument(
            f"KCCL_TIMEOUT={env.timeout} and KCCL_FIRST_TIMEOUT={env.first_timeout}, "
            "must be positive"
        )
    return env
