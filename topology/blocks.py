"""Places the exchanges between the blocks of a GPU's kernel: on which die each block runs, which
block leads a die, where flags and buffers lie (layout.py), and which lane of a model (a share of
its work, see engine/README.md) a block serves.

The functions are pure, as in placement.py. The caller may pass what a machine's record does not
have, such as the die of each block, which a probe on the device finds. Otherwise the placement
makes an assumption, and its reasons say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import block_layouts
from .cost import CONSTANTS, ERROR
from .graph import Graph
from .layout import LINE_BYTES, Flag, Layout, time_us
from .model import Machine
from .parts import Device
from .placement import check_layout

PATTERNS = ("grid_sync", "publish")
"""The exchanges: in "grid_sync" all blocks wait for each other; in "publish" each block publishes a
slice that all blocks collect."""
BLOCK_LAYOUTS = ("topology", "counters", "flat", "copies", "leaders")
"""Layouts that can be asked for. "counters" is that of the library's grid_sync, and "flat" that of
its publish and collect. "topology" chooses the library's, unless another one is predicted to gain
more than the error of predictions. All but "topology" are values of Layout.name."""

_FITTED_BLOCKS = 132
_FLAGS = 2.84
"""Words that a relaxed grid_sync of 132 flags takes: 0.785 us on an H200, where one by a counter
takes 0.592 and a word 0.276 (bench/records/nvidia-h200_1_full_stream.json)."""
SHARES = {
    "grid_sync": (_FLAGS - 1) / _FITTED_BLOCKS,
    "publish": (CONSTANTS["exchange"] - 1) / _FITTED_BLOCKS,
}
"""The delay of a block for each further line that it polls, as a fraction of one line's latency. It
is fitted to calls of 132 blocks on H200 GPUs, in which each block polled a line of every one. The
library's grid_sync counts arrivals in one word instead, and has a constant of its own."""
_LIBRARYS = {"grid_sync": "counters", "publish": "flat"}
_HOW = {
    "grid_sync": "constants fitted to H200, where one counter and the flat layout have records",
    "publish": "constants fitted to H200, where only the flat layout has a record",
}
_BESIDE = {
    "library": (
        "Beside bulk copies of all units of an H200, at most 48 KiB in flight a unit, such calls "
        "took 0.92 to 1.21 times as long as by this rule, with memory order 1.47 to 1.74 times: a "
        "release waits for its own unit's copies. Blocks whose units make no copies do not wait "
        "for them"
    ),
    "flags": (
        "Beside bulk copies of all units of an H200, at most 48 KiB in flight a unit, such calls "
        "took 1.15 to 1.83 times as long as by this rule, with memory order 1.51 to 2.07 times"
    ),
    "other": "No call with this layout was timed beside a stream",
}
"""What the records say of calls beside a stream, of the library's layouts and of grid_sync's flags
(bench/records/nvidia-h200_1_full_stream.json, and the last document of nvidia-h200_1_beside.json).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleave:
    """The memory that each part of a buffer lies in, as a probe finds it.

    Attributes:
        granule_bytes: Bytes of a granule: neighbouring addresses that lie in one memory.
        homes: The memory of each granule from the buffer's beginning: the id of an L2 partition or
            an I/O die.
    """

    granule_bytes: int
    homes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlacement:
    """The placement of the blocks of a GPU's kernel, which place_blocks() returns.

    Attributes:
        pattern: One of PATTERNS.
        layout: The flags and slices, and the leaders of dies.
        lanes: The lane that each block serves.
        predicted_us: Name of a layout -> its predicted microseconds, for layouts with a prediction.
        reasons: Sentences that say why this placement was chosen and what it assumes.
    """

    pattern: str
    layout: Layout
    lanes: tuple[int, ...]
    predicted_us: Mapping[str, float]
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """Return the placement in words."""
        layout = self.layout
        lines = [f"{self.pattern} of {len(layout.seats)} blocks, layout {layout.name!r}"]
        leaders = dict(layout.leaders)
        for seat in dict.fromkeys(layout.seats):
            own = [block for block, at in enumerate(layout.seats) if at == seat]
            lanes = sorted({self.lanes[block] for block in own})
            memory = layout.homes[own[0]]
            led = f"; block {leaders[seat]} leads" if seat in leaders else ""
            lines.append(
                f"  {seat}: {len(own)} blocks, lane {', '.join(map(str, lanes))}, poll words in "
                f"{memory}'s memory"
                f"{led}"
            )
        words = {(flag.at, flag.offset): flag for flag in layout.flags}
        copies = len({flag.at for flag in layout.flags})
        polled = sum(0 in flag.pollers for flag in words.values())
        what = "counter" if layout.flags[0].is_counter else "flag"
        lines.append(
            f"  {len(words)} {what}{'s' * (len(words) > 1)}, a line of {LINE_BYTES} bytes or more "
            f"each, in {copies} {'memory' if copies == 1 else 'memories'}; block 0 polls {polled}"
        )
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])


def place_blocks(
    machine: Machine,
    pattern: str,
    *,
    blocks: int | None = None,
    nbytes: int = 2048,
    lanes: int = 1,
    layout: str = "topology",
    seats: Sequence[int] | None = None,
    interleave: Interleave | None = None,
) -> BlockPlacement:
    """Place the blocks of a kernel on the machine's first GPU.

    Args:
        machine: The machine.
        pattern: One of PATTERNS.
        blocks: Number of blocks. Default: one for each compute unit.
        nbytes: The bytes that all blocks together publish.
        lanes: Number of lanes that share the blocks.
        layout: One of BLOCK_LAYOUTS.
        seats: The number of the die that each block runs on, as a probe finds it.
        interleave: Where the addresses of the buffer lie, as a probe finds it.

    Raises:
        ValueError: An argument is out of range, or the machine lacks a figure.
    """
    for name, value, known in (("pattern", pattern, PATTERNS), ("layout", layout, BLOCK_LAYOUTS)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, must be one of {', '.join(known)}")
    graph = Graph(machine)
    if not graph.gpus:
        raise ValueError("the machine has no GPU, and blocks are placed on one")
    gpu = graph.gpus[0]
    count = graph.count(gpu.id, "compute_unit") if blocks is None else blocks
    if count is None:
        raise ValueError(f"the number of {gpu.id}'s compute units is not known: give the blocks")
    if not 1 <= lanes <= count:
        raise ValueError(f"lanes is {lanes}, must be 1 to {count}, the number of blocks")
    dies, word_us = _dies(graph, gpu), gpu.latency_us.value if gpu.latency_us else None
    reasons: list[str] = []
    halves = graph.readings_of(gpu.id)
    if len(dies) == 2 and halves.keys() >= {"same_half_us", "other_half_us"}:
        same, other = halves["same_half_us"], halves["other_half_us"]
        word_us = word_us or (same + other) / 2
        reasons.append(
            f"a word takes {same:.3f} us within a half of L2 and {other:.3f} to the other one, "
            "whatever its address (measured on an H200); so copies would be no nearer"
        )
    numbers = _seats(dies, count, seats, reasons)
    at = tuple(dies[number].name for number in numbers)
    # A packet of 16 bytes has 8 of a slice.
    slice_bytes = 4 if pattern == "grid_sync" else max(-(-nbytes // count // 8), 1) * 16
    near = tuple(dies[number].memory for number in numbers)
    is_sync, is_apart = pattern == "grid_sync", len(set(near)) > 1
    names = ["counters"] * is_sync + ["flat"] + ["copies"] * is_apart
    names += ["leaders"] * (is_sync and is_apart)
    if layout not in ("topology", *names):
        offered = ", ".join(("topology", *names))
        raise ValueError(f"layout is {layout!r}, must be one of {offered} for this kernel")
    made = {
        "counters": lambda: block_layouts.counters(gpu.id, at, num_counters(graph, gpu)),
        "flat": lambda: block_layouts.flat(gpu.id, at, slice_bytes),
        "copies": lambda: block_layouts.copies(at, near, slice_bytes),
        "leaders": lambda: block_layouts.leaders(at, near),
    }
    layouts = {name: made[name]() for name in names}
    predicted = _predicted(layouts, gpu.id, word_us, dies, numbers, SHARES[pattern])
    librarys = _LIBRARYS[pattern]
    chosen = layout if layout in names else librarys
    if layout == "topology" and predicted:
        best = min(names, key=lambda name: predicted[name])
        chosen = best if predicted[best] < (1 - ERROR) * predicted[librarys] else librarys
    told = ", ".join(f"{name} {us:.2f} us" for name, us in predicted.items())
    reasons.insert(
        0,
        f"predicted: {told} ({_HOW[pattern]})"
        if told
        else "nothing is predicted: no latency is known",
    )
    if told and halves.keys() >= {"unit_to_unit_us", "loaded_unit_to_unit_us"}:
        flags = "flags" if (pattern, chosen) == ("grid_sync", "flat") else "other"
        beside = _BESIDE["library" if chosen == librarys else flags]
        slower = halves["loaded_unit_to_unit_us"] / halves["unit_to_unit_us"]
        told = ", ".join(f"{name} {us * slower:.2f} us" for name, us in predicted.items())
        reasons.insert(
            1,
            f"predicted beside a full stream of reads from memory: {told}, if all takes "
            f"{slower:.1f} times as long, as a word between two units does in a probe. {beside}",
        )
    found = made[chosen]()
    if interleave is not None:
        found = _laid(found, interleave, gpu.id)
    served = _lanes(numbers, lanes)
    split = sum(
        1 for lane in range(lanes) if len({at[b] for b in range(count) if served[b] == lane}) > 1
    )
    if lanes > 1:
        reasons.append(f"{lanes - split} of {lanes} lanes have blocks of one part of the GPU only")
    return BlockPlacement(
        pattern=pattern,
        layout=found,
        lanes=served,
        predicted_us=predicted,
        reasons=tuple(reasons),
    )


def grid_counters(machine: Machine | None, layout: str = "topology") -> int | None:
    """Returns how many counters the blocks of grid_sync use on a machine's GPUs.

    Args:
        machine: The machine; None if it is not known.
        layout: One of placement.LAYOUTS. "flat" has one counter, as if a GPU had no dies.

    Returns:
        The number; None if the machine does not tell. Then a kernel uses as many as its target can
        have.

    Raises:
        ValueError: There is no such layout.
    """
    if check_layout(layout) == "flat":
        return 1
    graph = Graph(machine) if machine is not None else None
    if graph is None or not graph.gpus:
        return None
    gpu = graph.gpus[0]
    return None if graph.count(gpu.id, "compute_unit") is None else num_counters(graph, gpu)


def num_counters(graph: Graph, gpu: Device) -> int:
    """Returns how many counters the blocks of grid_sync use: one for each die that has an L2 cache
    of its own, as AMD's XCDs have. Two for the halves of an H200's L2 are slower than one
    (bench/LOG.md, 2026-11-29).
    """
    dies = [each for each in graph.of_kind("die") if each.id.startswith(f"{gpu.id}/")]
    return max(1, sum(each.count for each in dies if "/xcd" in each.id))


@dataclass(frozen=True, slots=True)
class _Die:
    """A part of a GPU with compute units: its name, the name of the memory near it, and the
    microseconds of a word within it (None if not known). Halves of an L2 cache have the GPU's
    memory: no address is nearer to one of them.
    """

    name: str
    memory: str
    near_us: float | None


def _dies(graph: Graph, gpu: Device) -> list[_Die]:
    """Returns the dies of a GPU; or its L2 partitions if it has no dies; or the GPU itself."""
    found = []
    for kind in ("die", "l2_partition"):
        for device in graph.of_kind(kind):
            if not device.id.startswith(f"{gpu.id}/"):
                continue
            parent = graph.devices[device.parent or gpu.id]
            near = device.latency_us or gpu.latency_us
            for number in range(device.count):
                name = device.id if device.count == 1 else f"{device.id}{number}"
                memory = parent.id if parent.kind == "io_die" else name
                if kind == "l2_partition":
                    memory = gpu.id
                found.append(_Die(name, memory, near.value if near else None))
        if found:
            return found
    return [_Die(gpu.id, gpu.id, gpu.latency_us.value if gpu.latency_us else None)]


def _seats(
    dies: list[_Die], blocks: int, told: Sequence[int] | None, reasons: list[str]
) -> tuple[int, ...]:
    """Returns the number of each block's die. If `told` is None, assumes it, and adds a reason."""
    if told is not None:
        if len(told) != blocks or not set(told) <= set(range(len(dies))):
            raise ValueError(
                f"seats has {len(told)} numbers up to {max(told, default=0)}, must have {blocks} "
                f"below {len(dies)}: a die for each block"
            )
        return tuple(told)
    if len(dies) > 1:
        reasons.append(
            "assumed: block i runs on die i modulo the number of dies. A probe on the device tells"
        )
    return tuple(block % len(dies) for block in range(blocks))


def _predicted(
    layouts: Mapping[str, Layout],
    gpu: str,
    word_us: float | None,
    dies: list[_Die],
    numbers: Sequence[int],
    share: float,
) -> dict[str, float]:
    """Returns the predicted microseconds of each layout; empty if `word_us` is not known: a word
    by memory anywhere in the GPU, or by that of another die. `share`: one of SHARES.
    """
    if word_us is None:
        return {}
    near = {die.memory: die.near_us or word_us for die in dies if die.memory != gpu}
    # Microseconds between a block's die and a memory.
    tables = [
        {gpu: word_us} | {each: near[each] if each == die.memory else word_us for each in near}
        for die in dies
    ]
    table_of = [tables[number] for number in numbers]

    def way(flag: Flag, poller: int) -> float:
        return (table_of[flag.writer][flag.at] + table_of[poller][flag.at]) / 2

    def read(flag: Flag, poller: int) -> float:
        return table_of[poller][flag.at]

    counted = CONSTANTS["sync relaxed"] * word_us
    return {
        name: counted if name == "counters" else time_us(layout, way, read, share)
        for name, layout in layouts.items()
    }


def _laid(layout: Layout, interleave: Interleave, anywhere: str) -> Layout:
    """Returns the layout with the offset of each flag moved to a granule that lies in the flag's
    memory. Flags at `anywhere` may lie in any granule.
    """
    per = interleave.granule_bytes // LINE_BYTES
    free: dict[str, list[int]] = {}
    for granule, home in enumerate(interleave.homes):
        lines = [granule * per + i for i in range(per)]
        free.setdefault(home, []).extend(lines)
        free.setdefault(anywhere, []).extend(lines)
    moved = []
    placed: dict[tuple[str, int], int] = {}
    for flag in layout.flags:
        if (flag.at, flag.offset) in placed:  # several blocks add to a counter
            moved.append((flag, placed[flag.at, flag.offset]))
            continue
        lines = free.get(flag.at, [])
        needed = len(flag.lines)
        # A slice needs consecutive lines. The lines of a granule are in one memory.
        at = next(
            (i for i in range(len(lines)) if lines[i : i + needed] == _run(lines[i], needed)), None
        )
        if at is None or len(lines) < needed:
            raise ValueError(
                f"the buffer has too few granules in {flag.at} for {len(layout.flags)} flags: "
                "give a longer one"
            )
        placed[flag.at, flag.offset] = lines[at] * LINE_BYTES
        moved.append((flag, lines[at] * LINE_BYTES))
        del lines[at : at + needed]
    return replace(layout, flags=tuple(replace(flag, offset=offset) for flag, offset in moved))


def _run(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def _lanes(numbers: Sequence[int], lanes: int) -> tuple[int, ...]:
    """Returns the lane of each block. Lanes get equal shares of the blocks, die by die, so that as
    few lanes as possible lie on two dies.
    """
    order = sorted(range(len(numbers)), key=lambda block: (numbers[block], block))
    served = [0] * len(numbers)
    for position, block in enumerate(order):
        served[block] = position * lanes // len(numbers)
    return tuple(served)
