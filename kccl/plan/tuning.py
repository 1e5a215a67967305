"""Tuning tables: which algorithm was measured as the fastest up to which size."""

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from .. import topology
from ..base.errors import InvalidArgument
from ..topology import Machine
from ..topology.discovery import recorded_names
from . import specs
from .lookup import algorithms
from .spec import MOST_BLOCKS, MOST_THREADS
from .specs import SPECS

_TABLES = Path(__file__).parent / "tables"
# Backends on which nothing is measured yet -> the backend whose table is the best guess.
_BORROWED = {"hip": "cuda"}
_MOST_SHOWN = 60  # the most characters of a value that an error shows
_UNMEASURED = "the first of the collective's kernels; nothing is measured"


def discovered() -> Machine:
    """Returns this machine with its GPUs."""
    return topology.with_gpus(topology.discover())


@dataclass(frozen=True)
class Threshold:
    """One line of a tuning table: the algorithm to use up to a size.

    Attributes:
        collective: The collective.
        up_to_bytes: The largest message, in bytes; None for any size.
        algorithm: The algorithm to use.
        blocks: On GPUs, the most blocks of a call; 0 for the backend's default.
        threads: On GPUs, the threads of a block until all blocks are used, and more for longer
            messages; 0 for the backend's default.
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
        source: Path of the table.
        thresholds: World size -> thresholds, by ascending size within a collective.
        origin: On which machines the table was measured, for Plan.reason.
        machines: World size -> the recorded machine whose table it is, if the file names one.
    """

    source: str
    thresholds: dict[int, tuple[Threshold, ...]]
    origin: str = ""
    machines: dict[int, str] = field(default_factory=dict)

    def of(self, world_size: int) -> tuple[Threshold, ...]:
        """Returns the table for a world size: its own, or else the nearest larger, or else the
        largest.
        """
        return self.thresholds[self._measured(world_size)]

    def machine_of(self, world_size: int) -> str:
        """Returns the recorded machine whose table is used for a world size; "" if the file names
        none.
        """
        return self.machines.get(self._measured(world_size), "")

    def _measured(self, world_size: int) -> int:
        larger = [size for size in self.thresholds if size >= world_size]
        return min(larger) if larger else max(self.thresholds)


def read_tuning(path: Path, here: Callable[[], Machine] = discovered) -> Tuning:
    """Reads a tuning file that `bench/tune/tune.py` wrote.

    If several machines have a table for the same world size, the nearest machine's is used.

    Args:
        path: The file.
        here: Returns a description of this machine. Called only if the file leaves a choice.

    Raises:
        InvalidArgument: The file is not a tuning table. The text names the file, the entry and what
            is wrong with it.
    """
    try:
        # Refuses NaN and Infinity, which Python would read, but which are not JSON.
        document = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
        fields = _fields(document, "the document", {"tables"}, {"backend", "origin"})
        origin = _text(fields.get("origin", ""), "origin")
        _text(fields.get("backend", ""), "backend")
        tables: dict[int, dict[str, tuple[Threshold, ...]]] = {}
        for index, entry in enumerate(_list(fields["tables"], "tables")):
            where = f"tables[{index}]"
            table = _fields(entry, where, {"world_size", "thresholds"}, {"machine"})
            name = f"{where}.world_size"
            world_size = _integer(table["world_size"], name, 1)
            machine = _text(table.get("machine", ""), f"{where}.machine")
            if machine:
                _one_of(machine, f"{where}.machine", recorded_names())
            of_size = tables.setdefault(world_size, {})
            if machine in of_size:
                raise _Wrong(f"{name} is {world_size}, and an earlier table has it already")
            lines = _list(table["thresholds"], f"{where}.thresholds")
            of_size[machine] = tuple(
                _threshold(line, f"{where}.thresholds[{number}]")
                for number, line in enumerate(lines)
            )
        if not tables:
            raise _Wrong("tables is [], must have a table for each world size measured")
        chosen = {size: _nearest(of_size, here) for size, of_size in tables.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not a tuning table: {error}") from None
    thresholds = {size: tables[size][machine] for size, machine in chosen.items()}
    machines = {size: machine for size, machine in chosen.items() if machine}
    return Tuning(str(path), thresholds, origin, machines)


def _nearest(of_size: dict[str, Any], here: Callable[[], Machine]) -> str:
    """Returns the machine whose table is used; "" for a table that names no machine. Such a table
    is the user's own, and goes before all others.
    """
    if len(of_size) == 1 or "" in of_size:
        return "" if "" in of_size else next(iter(of_size))
    known = topology.recorded()
    return topology.nearest(here(), {name: known[name] for name in of_size})


def told_of_machine(machine: str, here: Machine) -> str:
    """Returns a sentence: whose table a plan follows, and how the machine `here` differs."""
    unlike = topology.differences(here, topology.recorded()[machine])
    told = f"has {', '.join(unlike)}" if unlike else "is like it"
    return f"The table is of {machine}, the nearest recorded machine that has one; this one {told}."


class _Wrong(ValueError):
    """An entry of a tuning file is wrong. The text says how."""


def _threshold(value: Any, where: str) -> Threshold:
    fields = _fields(
        value, where, {"collective", "up_to_bytes", "algorithm"}, {"blocks", "threads"}
    )
    known = sorted({spec.collective for spec in SPECS})
    collective = _one_of(fields["collective"], f"{where}.collective", known)
    names = algorithms(collective)
    algorithm = _one_of(fields["algorithm"], f"{where}.algorithm", names)
    up_to_bytes = fields["up_to_bytes"]
    if up_to_bytes is not None:
        up_to_bytes = _integer(up_to_bytes, f"{where}.up_to_bytes", 0)
    blocks = _integer(fields.get("blocks", 0), f"{where}.blocks", 0, MOST_BLOCKS)
    threads = _integer(fields.get("threads", 0), f"{where}.threads", 0, MOST_THREADS)
    if (blocks > 0) != (threads > 0) or threads % 32 != 0:
        raise _Wrong(
            f"{where} has {blocks} blocks of {threads} threads, must have 1 to {MOST_BLOCKS} "
            f"blocks, and threads by multiples of 32 up to {MOST_THREADS}; or 0 of both, for the "
            "backend's default"
        )
    return Threshold(collective, up_to_bytes, algorithm, blocks, threads)


def _refuse_constant(text: str) -> NoReturn:
    raise _Wrong(f"the document has {text}, which JSON does not have")


def _fields(
    value: Any, where: str, needed: set[str], optional: Set[str] = frozenset()
) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where} is {_shown(value)}, must be an object")
    for name in sorted(needed - set(value)):
        raise _Wrong(f"{where} has no {name!r}, must have {', '.join(sorted(needed))}")
    for name in sorted(set(value) - needed - optional):
        known = ", ".join(sorted(needed | optional))
        raise _Wrong(f"{where} has {name!r}, must have no others than {known}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{where} is {_shown(value)}, must be a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{where} is {_shown(value)}, must be a string")
    return value


def _one_of(value: Any, where: str, names: Sequence[str]) -> str:
    if value not in names:
        raise _Wrong(f"{where} is {_shown(value)}, must be one of {', '.join(names)}")
    return str(value)


def _integer(value: Any, where: str, low: int, high: int | None = None) -> int:
    # Refuses True and False, which are integers in Python.
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise _Wrong(f"{where} is {_shown(value)}, must be an integer {bounds}")
    return int(value)


def _shown(value: Any) -> str:
    """Returns a value of a JSON file as JSON text, of which an error shows at most _MOST_SHOWN
    characters.
    """
    text = json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


@lru_cache(maxsize=8)
def tuning_for(backend: str, path: str = "") -> Tuning:
    """Returns the installed table of a backend, or the one at `path`."""
    if backend == "sim" and not path:
        return _of_simulator()
    if backend in _BORROWED and not path:
        found = read_tuning(_TABLES / f"{_BORROWED[backend]}.json")
        return replace(found, origin=f"{found.origin}; nothing is measured on {backend}")
    return read_tuning(Path(path) if path else _TABLES / f"{backend}.json")


def _of_simulator() -> Tuning:
    """Returns a table with the first kernel of each collective, because nothing is measured on the
    simulator.
    """
    first: dict[str, str] = {}
    for spec in SPECS:
        if "sim" in spec.targets:
            first.setdefault(spec.collective, spec.name)
    lines = (Threshold(collective, None, name) for collective, name in first.items())
    return Tuning(specs.__file__, {1: tuple(lines)}, _UNMEASURED)
