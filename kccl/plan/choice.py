"""Which algorithm runs a call, and why. Pure: no device, no communicator, facts and a table."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..base.dtypes import Dtype
from ..base.errors import InvalidArgument

OPS = ("sum", "prod", "min", "max", "avg")
# Of a call on a GPU.
MOST_BLOCKS, MOST_THREADS = 128, 1024
_TUNING = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Request:
    """What is to be run.

    Attributes:
        collective: "all_reduce", "reduce_scatter", "all_gather", "broadcast" or "barrier".
        nbytes: Message size in nccl-tests' sense: of the larger of a rank's arrays.
        world_size: Number of ranks.
        backend: "host", "sim" or "cuda".
        dtype: Element type; None for barrier.
        can_attach: Every rank's process may read every other's memory.
    """

    collective: str
    nbytes: int
    world_size: int
    backend: str
    dtype: Dtype | None = None
    can_attach: bool = True


@dataclass(frozen=True)
class KernelSpec:
    """An algorithm. Its name is the kernel file's, the benchmark row's and the tuning table's.

    Attributes:
        name: `<collective>_<algorithm>[_<protocol>]`.
        collective: The collective it runs.
        what_moves: One line for people.
        why_not: Says why it cannot run a request, or None when it can.
    """

    name: str
    collective: str
    what_moves: str
    why_not: Callable[[Request], str | None]


def _always(request: Request) -> str | None:
    return None


def _on_floats(request: Request) -> str | None:
    if request.dtype is None or request.dtype.is_float:
        return None
    return f"{request.dtype.name} has no bit pattern to spare for words that have not arrived"


def _on_floats_with_peers(request: Request) -> str | None:
    return _with_peers(request) or _on_floats(request)


def _on_host(request: Request) -> str | None:
    if request.backend == "host":
        return None
    return f"pulls, which is slow on {request.backend}"


def _with_peers(request: Request) -> str | None:
    return "one rank has nothing to scatter" if request.world_size == 1 else None


def _on_host_with_peers(request: Request) -> str | None:
    if request.world_size == 1:
        return "one rank has nothing to scatter"
    return _on_host(request)


def _on_host_attached(request: Request) -> str | None:
    if not request.can_attach:
        return "the ranks' processes may not read each other's memory (process_vm_readv)"
    return _on_host_with_peers(request)


def _on_gpus_with_peers(request: Request) -> str | None:
    if request.world_size == 1:
        return "one rank has nobody to push to"
    return "for GPUs: on the host peers pull" if request.backend == "host" else None


SPECS = (
    KernelSpec(
        "all_reduce_one_shot_ll16",
        "all_reduce",
        "packets to every peer; each reduces everything",
        _always,
    ),
    KernelSpec(
        "all_reduce_one_shot_sentinel",
        "all_reduce",
        "bare words to every peer; each reduces everything",
        _on_floats,
    ),
    KernelSpec(
        "all_reduce_two_shot_sentinel",
        "all_reduce",
        "bare words of each chunk to its owner, who sends every peer the result",
        _on_floats_with_peers,
    ),
    KernelSpec(
        "all_reduce_one_shot_pull_simple",
        "all_reduce",
        "each stages its input; each pulls and reduces everything",
        _on_host,
    ),
    KernelSpec(
        "all_reduce_two_shot_pull_simple",
        "all_reduce",
        "each stages its input, pulls and reduces its chunk, pulls the others' results",
        _on_host_with_peers,
    ),
    KernelSpec(
        "all_reduce_two_shot_push_simple",
        "all_reduce",
        "each sends every peer its chunk, reduces its own, sends every peer the result",
        _with_peers,
    ),
    KernelSpec(
        "all_reduce_two_shot_cma_simple",
        "all_reduce",
        "each reads its chunk of the others' memory, reduces it, reads the others' results",
        _on_host_attached,
    ),
    KernelSpec(
        "reduce_scatter_direct_ll16",
        "reduce_scatter",
        "packets of each chunk to its owner, who reduces it",
        _always,
    ),
    KernelSpec(
        "reduce_scatter_pull_simple",
        "reduce_scatter",
        "each stages its input, pulls and reduces its chunk",
        _on_host,
    ),
    KernelSpec(
        "reduce_scatter_push_simple",
        "reduce_scatter",
        "each sends every peer its chunk, reduces its own",
        _on_gpus_with_peers,
    ),
    KernelSpec("all_gather_direct_ll16", "all_gather", "packets to every peer", _always),
    KernelSpec(
        "all_gather_pull_simple",
        "all_gather",
        "each stages its input, pulls the others'",
        _on_host,
    ),
    KernelSpec(
        "all_gather_push_simple",
        "all_gather",
        "each sends every peer its input",
        _on_gpus_with_peers,
    ),
    KernelSpec(
        "broadcast_direct_ll16", "broadcast", "packets from the root to every peer", _always
    ),
    KernelSpec("broadcast_pull_simple", "broadcast", "the root stages; every peer pulls", _on_host),
    KernelSpec(
        "broadcast_push_simple",
        "broadcast",
        "the root sends each peer a chunk, which it forwards to the others",
        _on_gpus_with_peers,
    ),
    KernelSpec("barrier_direct", "barrier", "one word to every peer", _always),
)


def algorithms(collective: str) -> list[str]:
    """Names of the algorithms of a collective."""
    return [spec.name for spec in SPECS if spec.collective == collective]


@dataclass(frozen=True)
class Threshold:
    """One line of a tuning table: up to this size, this algorithm.

    Attributes:
        collective, up_to_bytes, algorithm: So; None for any size.
        blocks: On GPUs, the most blocks of a call; 0 for what suits the backend.
        threads: On GPUs, threads of a block while there are blocks for them; 0 likewise.
    """

    collective: str
    up_to_bytes: int | None
    algorithm: str
    blocks: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Tuning:
    """Measured choices for one backend, by world size.

    Attributes:
        source: Where the table came from.
        thresholds: World size -> thresholds, sizes ascending within a collective.
        merit: What the table prefers an algorithm for.
    """

    source: str
    thresholds: dict[int, tuple[Threshold, ...]]
    merit: str = "fastest"

    def of(self, world_size: int) -> tuple[Threshold, ...]:
        """The table for a world size: its own, else the nearest larger, else the largest."""
        larger = [size for size in self.thresholds if size >= world_size]
        return self.thresholds[min(larger) if larger else max(self.thresholds)]


def read_tuning(path: Path) -> Tuning:
    """Reads a tuning file as `bench/tune/tune.py` writes it.

    Raises:
        InvalidArgument: The file is not such a table.
    """
    try:
        document = json.loads(path.read_text())
        merit = str(document.get("merit", Tuning.merit))
        tables = {
            int(table["world_size"]): tuple(Threshold(**line) for line in table["thresholds"])
            for table in document["tables"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is no tuning table: {error}") from error
    for line in (line for table in tables.values() for line in table):
        is_shape = 0 < line.blocks <= MOST_BLOCKS and 0 < line.threads <= MOST_THREADS
        if (line.blocks, line.threads) != (0, 0) and not (is_shape and line.threads % 32 == 0):
            raise InvalidArgument(f"{path} has {line.blocks} blocks of {line.threads} threads")
    known = {spec.name for spec in SPECS}
    unknown = {line.algorithm for table in tables.values() for line in table} - known
    if unknown or not tables:
        raise InvalidArgument(f"{path} names {sorted(unknown)}, known are {sorted(known)}")
    return Tuning(str(path), tables, merit)


@lru_cache(maxsize=8)
def tuning_for(backend: str, path: str = "") -> Tuning:
    """The installed table of a backend, or the one at `path`."""
    return read_tuning(Path(path) if path else _TUNING / f"{backend}.json")


@dataclass(frozen=True)
class Plan:
    """A decision.

    Attributes:
        name: The algorithm.
        request: What was asked.
        reason: Why this one.
        rejected: (name, why not) of the collective's other algorithms.
        blocks, threads: As in Threshold.
    """

    name: str
    request: Request
    reason: str
    rejected: tuple[tuple[str, str], ...]
    blocks: int = 0
    threads: int = 0

    def explain(self) -> str:
        """The decision in words, one line an algorithm."""
        request = self.request
        dtype = f" {request.dtype.name}" if request.dtype else ""
        spec = next(spec for spec in SPECS if spec.name == self.name)
        shape = f", at most {self.blocks} blocks of {self.threads} threads" if self.blocks else ""
        lines = [
            f"{request.collective} of {request.nbytes} bytes{dtype} over {request.world_size} "
            f"ranks on {request.backend}",
            f"  {self.name}: {self.reason} ({spec.what_moves}){shape}",
            *(f"  not {name}: {why}" for name, why in self.rejected),
        ]
        return "\n".join(lines)


def choose(request: Request, tuning: Tuning, forced: str = "", preferred: str = "") -> Plan:
    """Picks the algorithm for a request.

    Args:
        request: What is to be run.
        tuning: Measured thresholds.
        forced: Name of the algorithm to use whatever the table says; "" for none.
        preferred: Name of the algorithm to use wherever it can run; "" for none.

    Raises:
        InvalidArgument: The forced algorithm is unknown, of another collective, or cannot run this.
    """
    candidates = [spec for spec in SPECS if spec.collective == request.collective]
    if not candidates:
        known = sorted({spec.collective for spec in SPECS})
        raise InvalidArgument(f"collective is {request.collective!r}, must be one of {known}")
    obstacles = {spec.name: spec.why_not(request) for spec in candidates}
    if forced:
        if forced not in obstacles:
            raise InvalidArgument(
                f"algorithm is {forced!r}, must for {request.collective} be one of "
                f"{', '.join(obstacles)}"
            )
        if obstacles[forced]:
            raise InvalidArgument(f"algorithm {forced!r} cannot run this: {obstacles[forced]}")
        name, reason, line = forced, "asked for by name", None
    elif preferred in obstacles and not obstacles[preferred]:
        name, reason, line = preferred, "KCCL_ALGORITHM prefers it", None
    else:
        name, reason, line = _by_tuning(request, tuning, obstacles)
    rejected = tuple(
        (other, obstacle or f"{name} was preferred")
        for other, obstacle in obstacles.items()
        if other != name
    )
    shape = (line.blocks, line.threads) if line is not None else (0, 0)
    return Plan(name, request, reason, rejected, *shape)


def _by_tuning(
    request: Request, tuning: Tuning, obstacles: dict[str, str | None]
) -> tuple[str, str, Threshold | None]:
    for line in tuning.of(request.world_size):
        fits = line.up_to_bytes is None or request.nbytes <= line.up_to_bytes
        if line.collective == request.collective and fits and not obstacles[line.algorithm]:
            bound = "any size" if line.up_to_bytes is None else f"up to {line.up_to_bytes} bytes"
            reason = f"{tuning.merit} for {bound}, by {Path(tuning.source).name}"
            return line.algorithm, reason, line
    able = [name for name, obstacle in obstacles.items() if not obstacle]
    return able[-1], "the tuning table names none that can run this", None
