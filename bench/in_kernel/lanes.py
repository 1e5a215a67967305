"""Times grid_sync and publish/collect among the blocks of each lane, on one GPU:

    kccl topo --probe --json > F
    python -m kccl.bench.in_kernel.lanes --from F --json

The multiprocessors are divided among lanes. In the layout "halves" a lane's multiprocessors are in
one half of L2, as place_blocks() of kccl.topology has it. In the layout "flat" lanes take them in
turn by their numbers, so that each lane has some of both halves. Rows of the library's calls, which
all blocks make together, come from the same run. A row is the median over launches, each of a
kernel with thousands of calls, whose results are checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import kccl

from .. import collectives
from ..gpu.device import Gpu
from ..gpu.side import describe
from ..harness.data import count_wrong
from ..harness.document import document, machine, tell
from ..harness.forms import DELAYS_ALONE, ORDERS
from ..harness.measure import Row
from ..harness.problem import Array
from .beside import problem_of
from .contenders import CHECKED, BarrierForm, InKernel, Notebook, Runner, shape
from .exchange import Exchanging, end, exchange_bytes, exchange_shape
from .side import FOLDER
from .stream import Beside

KERNELS = FOLDER / "lanes.cuh"
LANES = (1, 2, 4, 8)
LAYOUTS = ("halves", "flat")
_BYTES = 2048
_LINE_BYTES, _PACKET_BYTES, _WORD_BYTES = 128, 16, 8
_WARP, _NO_SEAT = 32, 0xFFFFFFFF
# So many that only one block fits on a multiprocessor.
_SHARED_BYTES = 120 << 10


@dataclass(frozen=True, eq=False)
class Seats:
    """Which lane each multiprocessor serves.

    Attributes:
        table: For each multiprocessor lane << 16 | number within the lane, or _NO_SEAT.
        lanes: Number of lanes, of which all that have seats make calls.
        count: Blocks of each lane.
        layout: One of LAYOUTS.
    """

    table: Array
    lanes: int
    count: int
    layout: str

    @property
    def seated(self) -> int:
        """The number of blocks that make calls."""
        return int((self.table != _NO_SEAT).sum())


def halves_of(machine: kccl.topology.Machine) -> list[int]:
    """Returns the half of L2 of each multiprocessor of a probed machine's first GPU.

    Raises:
        ValueError: The machine does not tell.
    """
    found: dict[int, int] = {}
    names: list[str] = []
    for device in machine.devices:
        first, _, rest = device.id.partition("/")
        half = rest.partition("/")[0]
        if first != "gpu0" or not half.startswith("l2_") or device.units is None:
            continue
        if half not in names:
            names.append(half)
        found |= dict.fromkeys(device.units, names.index(half))
    if len(names) != 2 or sorted(found) != list(range(len(found))):
        raise ValueError("the machine has no probe that tells the halves of its L2 apart")
    return [found[unit] for unit in range(len(found))]


def seats(halves: Sequence[int], lanes: int, layout: str, *, one: bool = False) -> Seats:
    """Returns which lane each multiprocessor serves. Both layouts have equally many blocks a lane.

    Args:
        halves: The half of each multiprocessor.
        lanes: Number of lanes: 1, or an even number.
        layout: One of LAYOUTS.
        one: Whether only the first lane makes calls, and the others' blocks end at once.
    """
    units = range(len(halves))
    sides = [[unit for unit in units if halves[unit] == side] for side in (0, 1)]
    count = len(halves) if lanes == 1 else min(map(len, sides)) // (lanes // 2)
    if lanes == 1:
        of_lanes = [list(units)]
    elif layout == "halves":
        of_lanes = [side[i * count :][:count] for side in sides for i in range(lanes // 2)]
    else:
        of_lanes = [list(units)[lane::lanes][:count] for lane in range(lanes)]
    table = np.full(len(halves), _NO_SEAT, np.uint32)
    for lane, own in enumerate(of_lanes[:1] if one else of_lanes):
        for index, unit in enumerate(own):
            table[unit] = lane << 16 | index
    return Seats(table, lanes, count, layout)


@dataclass(frozen=True)
class _Given:
    """The arrays of one division into lanes: its table, the boards of barriers' checks, and the
    slices that blocks publish first, on the host and (`input`) on the GPU.
    """

    table: Any
    boards: Any
    slices: Array
    input: Any


class Calls:
    """Makes calls among the blocks of each lane: barriers and exchanges. Has the memory that they
    need for any division of the multiprocessors into lanes.
    """

    def __init__(self, runner: Runner, module: Any, notebook: Notebook, most: int) -> None:
        """Allocates memory.

        Args:
            runner: Where the kernels run.
            module: The compiled KERNELS.
            notebook: Where times go.
            most: The most blocks of all lanes together.
        """
        self._runner, self._module, self._notebook, self._most = runner, module, notebook, most
        self._device_comm = runner.comm.device_comm(channels=1, max_bytes=16, exchange_bytes=4096)
        lines = max(LANES)
        self._words = runner.numbers(np.zeros(lines * _LINE_BYTES // 4, np.int32))
        self._boards = runner.numbers(np.zeros(most * _LINE_BYTES // 4, np.int32))
        self._threads = max(-(-most // _WARP) * _WARP, _WARP)
        self._late = runner.numbers(np.zeros(most * self._threads, np.int32))
        self._of_seats: dict[Seats, _Given] = {}
        self._number = self._epoch = self._launches = 0
        # Slices begin on lines of their own: at most a line for each block beside their packets.
        words = lines * _BYTES // _WORD_BYTES + most
        slot_bytes = most * _LINE_BYTES + words * _PACKET_BYTES
        self._packets = runner.numbers(np.zeros(2 * slot_bytes // 8, np.int64))
        self._out = runner.numbers(np.zeros(most * (_BYTES // _WORD_BYTES + most), np.int64))

    def sync_us(self, seats: Seats, order: str, calls: int) -> tuple[Array, int]:
        """Makes barriers. Returns the microseconds of a call on each block that makes calls, and
        the number of wrong words.
        """
        runner, count = self._runner, seats.count
        given = self._given(seats)
        runner.launch(
            self._module.kernel(f"in_kernel::lane_syncs<{ORDERS[order]}>"),
            *(self._device_comm, given.table, np.uint32(count), self._words),
            *map(np.uint32, (calls // 10 + 1, calls, CHECKED)),
            *(given.boards, np.uint32(self._number)),
            *(self._notebook.delays, self._notebook.delay_stride, self._notebook.times, self._late),
            grid=self._most,
            block=self._threads,
        )
        runner.wait()
        self._number += CHECKED
        wrong = int(runner.read(self._late, self._most * self._threads, np.int32).sum())
        return self._taken(seats, calls), wrong

    def exchange_us(self, seats: Seats, order: str, calls: int) -> tuple[Array, int]:
        """Publishes and collects: as sync_us()."""
        runner, count, lanes = self._runner, seats.count, seats.lanes
        given = self._given(seats)
        each = given.slices.shape[-1]
        words = count * each
        made = calls + calls // 10 + 1
        self._launches += 1
        first = self._launches * 0x9E3779B97F4A7C15 % 2**64
        lines = -(-each * _PACKET_BYTES // _LINE_BYTES)
        runner.launch(
            self._module.kernel(f"in_kernel::lane_exchanges<{ORDERS[order]}>"),
            *(self._device_comm, given.table, np.uint32(count), self._packets),
            np.uint64(2 * count * lines * _LINE_BYTES // _PACKET_BYTES),
            *(given.input, self._out, np.uint32(each)),
            *(np.uint64(first), np.uint32(self._epoch)),
            *(np.uint32(made - calls), np.uint32(calls), self._notebook.times),
            grid=self._most,
            block=-(-words // _WARP) * _WARP,
            shared_bytes=_WORD_BYTES * (2 * words + each),
        )
        runner.wait()
        self._epoch += made
        found = runner.read(self._out, lanes * count * words, np.int64).reshape(lanes, -1)
        wrong = 0
        for lane in range(lanes):
            if lane in seats.table >> 16:
                wanted = end(given.slices[lane], first, made).ravel().view(np.int64)
                wrong += count_wrong(found[lane], np.tile(wanted, count))
        return self._taken(seats, calls), wrong

    def _given(self, seats: Seats) -> _Given:
        """Returns the arrays of these seats, which are made once."""
        if seats not in self._of_seats:
            numbers, lanes, count = self._runner.numbers, seats.lanes, seats.count
            first = self._runner.address(self._boards)
            boards = [first + lane * count * _LINE_BYTES for lane in range(lanes)]
            size = lanes, count, -(-_BYTES // (_WORD_BYTES * count))
            slices = np.random.default_rng(lanes).integers(2**64, size=size, dtype=np.uint64)
            self._of_seats[seats] = _Given(
                numbers(seats.table.view(np.int32)),
                numbers(np.array(boards, np.int64)),
                slices,
                numbers(slices.ravel().view(np.int64)),
            )
        return self._of_seats[seats]

    def _taken(self, seats: Seats, calls: int) -> Array:
        ns = self._runner.read(self._notebook.times, self._most, np.int64)
        found: Array = ns[ns > 0] / calls / 1e3
        if found.size != seats.seated:
            raise RuntimeError(
                f"{found.size} blocks made calls, and {seats.seated} multiprocessors have a seat: "
                "blocks did not run on one multiprocessor each"
            )
        return found


def kernel_names() -> list[str]:
    """Returns the name expressions of the kernels whose calls are among the blocks of a lane."""
    kinds = ("lane_syncs", "lane_exchanges")
    return [f"in_kernel::{kind}<{how}>" for kind in kinds for how in ORDERS.values()]


def librarys(runner: Runner, units: int) -> tuple[Any, list[tuple[str, str, InKernel]]]:
    """Compiles all kernels. Returns the module, and (collective, order, calls) of the library's
    grid_sync and publish of all blocks.
    """
    tables = [collectives.load(name) for name in ("grid_sync", "exchange")]
    found = [(table, form) for table in tables for form in table.forms if form.is_within]
    names = [name for _, form in found for name in form.names("int64", 1)]
    module = runner.compile(KERNELS, [*names, *kernel_names(), DELAYS_ALONE])
    notebook = Notebook(runner, module, units, None)
    exchange = exchange_shape(problem_of("exchange"), units)
    device_comm = runner.comm.device_comm(
        channels=1, max_bytes=16, exchange_bytes=exchange_bytes(exchange, 1)
    )
    made: list[tuple[str, str, InKernel]] = []
    for table, form in found:
        kernels = [module.kernel(name) for name in form.names("int64", 1)]
        call: InKernel
        if table.name == "exchange":
            call = Exchanging(notebook, kernels, exchange, form, device_comm)
        else:
            call = BarrierForm(
                notebook, kernels, shape(problem_of("grid_sync"), units), device_comm
            )
        made.append((table.name, form.order, call))
    return module, made


def timed(runner: Runner, known: kccl.topology.Machine, *, calls: int, repeats: int) -> list[Row]:
    """Times all calls in turn, and returns their rows."""
    halves = halves_of(known)
    units = len(halves)
    module, made = librarys(runner, units)
    every = [
        seats(halves, lanes, layout, one=one)
        for lanes in LANES
        for one in ([False] if lanes == 1 else [False, True])
        for layout in (LAYOUTS[:1] if lanes == 1 else LAYOUTS)
    ]
    times: dict[Any, list[tuple[float, float, int]]] = {}
    for repeat in range(repeats):
        # New memory each time: an address can be nearer to one half than to the other.
        among = Calls(runner, module, Notebook(runner, module, units, None), units)
        for name, order, call in made:
            mean_us, _ = call.time(calls, calls // 10)
            key = (name, "library", order, 1, False, units)
            times.setdefault(key, []).append((float(mean_us[0]), float(mean_us[0]), call.wrong()))
        for where in every[:: 1 if repeat % 2 == 0 else -1]:
            for name, time in (("grid_sync", among.sync_us), ("exchange", among.exchange_us)):
                for order in ORDERS:
                    us, wrong = time(where, order, calls)
                    one = where.seated < where.lanes * where.count
                    key = (name, where.layout, order, where.lanes, one, where.count)
                    times.setdefault(key, []).append((float(us.max()), float(us.min()), wrong))
    return [row(key, found) for key, found in times.items()]


def row(key: Any, found: Sequence[tuple[float, float, int]]) -> Row:
    """Returns the row of one call, from what timed() has found."""
    name, layout, order, lanes, one, count = key
    slowest, fastest, wrong = (np.array(each) for each in zip(*found, strict=True))
    q1, median, q3 = np.percentile(slowest, (25, 50, 75))
    return {
        "library": "kccl",
        "collective": name,
        "layout": layout,
        "mode": "in_kernel",
        "order": order,
        "world_size": 1,
        "lanes": lanes,
        "calling_lanes": 1 if one else lanes,
        "blocks": count,
        "bytes": _BYTES if name == "exchange" else 0,
        "time_us": round(float(median), 4),
        "q1_us": round(float(q1), 4),
        "q3_us": round(float(q3), 4),
        "fastest_block_us": round(float(np.median(fastest)), 4),
        "repeats": len(found),
        "wrong": int(wrong.sum()),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Prints a line for each call, with the flat layout beside that of halves."""
    for each in rows:
        beside = [
            other["time_us"]
            for other in rows
            if other["layout"] == "flat"
            and all(
                other[name] == each[name]
                for name in ("collective", "order", "lanes", "calling_lanes")
            )
        ]
        gain = f"  {each['time_us'] / beside[0]:5.2f} of flat" if beside else ""
        print(
            f"{each['collective']:9} {each['order']:7} {each['layout']:7} "
            f"{each['calling_lanes']} of {each['lanes']} lanes, {each['blocks']:3} blocks each "
            f"{each['time_us']:7.3f} us{gain}{'  WRONG' if each['wrong'] else ''}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Times all calls and prints a table. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kccl.bench.in_kernel.lanes", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--from", dest="file", type=Path, required=True, metavar="F")
    parser.add_argument("--calls", type=int, default=3_000, help="calls of a launch")
    parser.add_argument("--repeats", type=int, default=7, help="launches of each call")
    parser.add_argument("--json", action="store_true", help="print a document; tables to stderr")
    given = parser.parse_args(arguments)
    known = kccl.topology.Machine.from_json(given.file.read_text("utf-8"))
    facts = machine(1)
    with kccl.init(backend=kccl.gpu.backend()) as comm:
        device = kccl.gpu.device(comm.empty(1).device)
        with device.current():
            gpu = Gpu(comm)
            facts |= describe(gpu, {})
            runner = Beside(gpu, device.multiprocessors, _SHARED_BYTES)
            rows = timed(runner, known, calls=given.calls, repeats=given.repeats)
    found = document(rows, facts)
    found["command"] = "python -m kccl.bench.in_kernel.lanes"
    return tell(found, print_table, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
