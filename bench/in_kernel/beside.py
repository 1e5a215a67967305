"""Times grid_sync and publish/collect beside a stream of reads from memory, on one GPU:

    python -m kccl.bench.in_kernel.beside --json

The stream is a kernel of its own, with a block of up to four warps on each multiprocessor
(beside.cuh). It begins before the calls and ends when the host tells it, which is after they have
ended. So a row beside it is valid if each of its blocks ran on a multiprocessor of its own and was
told to end. Both are checked. Its bandwidth is that from just before the launch of the calls to
just after, and the table says which share that is of its bandwidth alone.

Both kernels ask for as much shared memory, although the calls need little of it: a multiprocessor
that is divided differently would have to become idle before it could run the other kernel too.

A row is the median over launches, each of a kernel with thousands of calls. 5 launches of 3,000
calls took 41 s on an H200 (bench/LOG.md, 2026-11-30). 7, the default, have not been timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import kccl

from .. import collectives
from ..gpu.device import Gpu
from ..gpu.side import describe
from ..harness.document import document, machine, tell
from ..harness.forms import DELAYS_ALONE, ORDERS, Form, of_barriers
from ..harness.measure import Row
from ..harness.problem import Comm, Problem
from .contenders import BarrierForm, InKernel, Notebook, shape
from .exchange import Exchanging, exchange_bytes, exchange_shape
from .side import FOLDER
from .stream import (
    MOST_IN_FLIGHT,
    SETTLE_S,
    STAGE_BYTES,
    STREAM,
    Beside,
    Stream,
    Word,
    gbps,
)

KERNELS = FOLDER / "beside.cuh"
IN_FLIGHT = (0, 2, 4, 5, 6, 8, 12)
"""The copies in flight of a multiprocessor; 0: no stream."""
APART = 32
"""How many multiprocessors make the calls if the stream runs on the others."""
# Two blocks fit on a multiprocessor, one of each kernel, and three do not.
_SHARED_BYTES = 100 << 10
# A stream on multiprocessors of its own takes so much that no other block fits beside it.
_SHARED_ALONE, _SHARED_APART = 200 << 10, 120 << 10
_BYTES = 2048
_LIBRARYS = "library"  # grid_sync with a counter, and publish with a line or more a block
# Layout -> class of the kernel.
_OTHERS = {
    "flags": "Flagged<{order}>",
    "2 polls in flight": "Counted<{order}, 1, 2>",
    "4 polls in flight": "Counted<{order}, 1, 4>",
    "2 counters": "Counted<{order}, 2, 1>",
    "4 counters": "Counted<{order}, 4, 1>",
}


def forms() -> list[tuple[str, Form]]:
    """Returns (layout, form) of all calls that are timed."""
    found = [
        (_LIBRARYS, form)
        for name in ("grid_sync", "exchange")
        for form in collectives.load(name).forms
        if form.is_within
    ]
    return found + [
        (
            layout,
            of_barriers(layout, how.format(order=ORDERS[order]), order, is_within=True),
        )
        for layout, how in _OTHERS.items()
        for order in ORDERS
    ]


def kernel_names() -> list[str]:
    """Returns the name expressions of all kernels of KERNELS."""
    return [*(name for _, form in forms() for name in form.names("int64", 1)), DELAYS_ALONE, STREAM]


class Bench:
    """All calls of one number of blocks, and one stream."""

    def __init__(self, comm: Comm, *, apart: bool, calls: int) -> None:
        """Compiles the kernels and allocates memory.

        Args:
            comm: A communicator of one rank on a GPU.
            apart: Whether the calls run on multiprocessors of their own, and not on all.
            calls: Calls of a launch.
        """
        self.gpu = Gpu(comm)
        self._calls, self._apart = calls, apart
        units = self.gpu.device.multiprocessors
        blocks = APART if apart else units
        self.runner = Beside(self.gpu, blocks, _SHARED_APART if apart else _SHARED_BYTES)
        module = self.runner.compile(KERNELS, kernel_names())
        exchange = exchange_shape(problem_of("exchange"), blocks)
        # Half is for slices, and the rest for the words of Counted and Flagged.
        room = max(2 * exchange_bytes(exchange, 1), 32 << 10)
        device_comm = comm.device_comm(channels=1, max_bytes=16, exchange_bytes=room)
        notebook = Notebook(self.runner, module, blocks, None)
        self._made: list[tuple[str, Form, int, InKernel]] = []
        for layout, form in forms():
            kernels = [module.kernel(name) for name in form.names("int64", 1)]
            made: InKernel
            if form.algorithm == "grid_exchange":
                made = Exchanging(notebook, kernels, exchange, form, device_comm)
            else:
                how = shape(problem_of("grid_sync"), blocks)
                made = BarrierForm(notebook, kernels, how, device_comm)
            nbytes = _BYTES if form.algorithm == "grid_exchange" else 0
            self._made.append((layout, form, nbytes, made))
        self._word = Word(self.runner, comm, max(calls // 4, 10))
        count, shared = (units - APART, _SHARED_ALONE) if apart else (units, _SHARED_BYTES)
        self._stream = Stream(self.gpu, module, count, shared)
        # The driver may have to wait for an idle GPU when it first loads a kernel.
        with self._stream.running(1):
            pass
        self._word.time(self.gpu.stream)
        for *_, made in self._made:
            made.time(2, 1)

    def rows(self, in_flight: int, times: dict[Any, list[Any]]) -> None:
        """Times each call once.

        Args:
            in_flight: As in IN_FLIGHT.
            times: (layout, form, bytes, in_flight) -> (microseconds of a call, 99th percentile,
                gigabytes a second of the stream, wrong elements) of each repeat; extended.
        """
        if not in_flight:
            self._once(0, times)
            return
        with self._stream.running(in_flight):
            self.runner.beside = self._stream
            try:
                self._once(in_flight, times)
            finally:
                self.runner.beside = None

    def _once(self, in_flight: int, times: dict[Any, list[Any]]) -> None:
        runner = self.runner
        where = APART if self._apart else 0
        alone = None
        if runner.beside:
            before = runner.beside.sample()
            time.sleep(SETTLE_S)
            alone = gbps(before, runner.beside.sample())
        runner.bandwidths.clear()
        us = self._word.time(self.gpu.stream)
        stream = runner.bandwidths[0] if in_flight else 0.0
        key: Any = (_LIBRARYS, None, 0, in_flight, where)
        times.setdefault(key, []).append((us, us, stream, alone or 0.0, 0))
        for layout, form, nbytes, made in self._made:
            runner.bandwidths.clear()
            mean_us, each_us = made.time(self._calls, max(self._calls // 10, 5))
            stream = runner.bandwidths[0] if in_flight else 0.0
            key = (layout, form, nbytes, in_flight, where)
            p99_us = float(np.percentile(each_us, 99))
            found = (float(mean_us[0]), p99_us, stream, alone or 0.0, made.wrong())
            times.setdefault(key, []).append(found)


def problem_of(name: str) -> Problem:
    table = collectives.load(name)
    dtype = table.dtype or "int64"  # grid_sync has none, and does not look at it
    (found,) = table.problems(
        [_BYTES],
        dtype=dtype,
        np_dtype=kccl.dtypes.to_numpy(dtype),
        op="sum",
        root=0,
        in_place=False,
        world_size=1,
    )
    return found


def row(key: Any, times: Sequence[Any], units: int) -> Row:
    """Returns the row of one call, from what Bench.rows() has found."""
    layout, form, nbytes, in_flight, apart = key
    us, p99_us, stream, alone, wrong = (np.array(each) for each in zip(*times, strict=True))
    q1, median, q3 = np.percentile(us, (25, 50, 75))
    name = "word" if form is None else "exchange" if nbytes else "grid_sync"
    blocks = 2 if form is None else apart or units
    return {
        "library": "kccl",
        "collective": name,
        "algorithm": "ping_pong" if form is None else form.algorithm,
        "layout": layout,
        "mode": "in_kernel",
        "order": "relaxed" if form is None else form.order,
        "world_size": 1,
        "blocks": blocks,
        "bytes": nbytes,
        "stream_blocks": (units - apart) if in_flight else 0,
        "in_flight_bytes": in_flight * STAGE_BYTES,
        "stream_gbps": round(float(np.median(stream)), 1),
        "stream_alone_gbps": round(float(np.median(alone)), 1),
        "time_us": round(float(median), 4),
        "q1_us": round(float(q1), 4),
        "q3_us": round(float(q3), 4),
        "p99_us": round(float(np.median(p99_us)), 4),
        "repeats": len(times),
        "wrong": int(wrong.sum()),
    }


def print_table(rows: Sequence[Row]) -> None:
    """Prints the times of each call and layout beside the streams, over that without one."""
    calls = dict.fromkeys(
        (row["collective"], row["layout"], row["order"], row["blocks"]) for row in rows
    )
    for call in calls:
        found = [
            row
            for row in rows
            if (row["collective"], row["layout"], row["order"], row["blocks"]) == call
        ]
        idle = next((row["time_us"] for row in found if not row["in_flight_bytes"]), None)
        print(f"{' '.join(map(str, call))} blocks")
        for each in found:
            ratio = f"{each['time_us'] / idle:6.2f}" if idle else ""
            wrong = "  WRONG" if each["wrong"] else ""
            alone = each["stream_alone_gbps"]
            share = f" ({each['stream_gbps'] / alone:4.0%} of it alone)" if alone else " " * 20
            print(
                f"  {each['in_flight_bytes'] >> 10:4} KiB in flight {each['stream_gbps']:6.0f} GB/s"
                f"{share}{each['time_us']:9.3f} us{ratio}{wrong}"
            )


def copies(text: str) -> int:
    """Returns the number of copies in flight that an argument names.

    Raises:
        argparse.ArgumentTypeError: A block of the stream cannot have so many.
    """
    if not text.isdecimal() or int(text) > MOST_IN_FLIGHT:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of copies from 0 to {MOST_IN_FLIGHT}: a block of the "
            "stream has no room for more"
        )
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Times all calls and prints a table. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kccl.bench.in_kernel.beside", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--calls", type=int, default=3_000, help="calls of a launch")
    parser.add_argument("--repeats", type=int, default=7, help="launches of each call")
    parser.add_argument(
        "--in-flight",
        type=copies,
        nargs="+",
        default=IN_FLIGHT,
        help=f"copies of {STAGE_BYTES} bytes in flight, at most {MOST_IN_FLIGHT}; 0: no stream",
    )
    parser.add_argument("--json", action="store_true", help="print a document; tables to stderr")
    given = parser.parse_args(arguments)
    facts = machine(1)
    times: dict[Any, list[Any]] = {}
    with kccl.init(backend=kccl.gpu.backend()) as comm:
        device = kccl.gpu.device(comm.empty(1).device)
        with device.current():
            for apart in (False, True):
                bench = Bench(comm, apart=apart, calls=given.calls)
                facts |= describe(bench.gpu, {})
                for repeat in range(given.repeats):
                    for in_flight in list(given.in_flight)[:: 1 if repeat % 2 == 0 else -1]:
                        bench.rows(in_flight, times)
    order = sorted(times, key=lambda key: (key[4], key[3]))
    rows = [row(key, times[key], device.multiprocessors) for key in order]
    found = document(rows, facts)
    found["command"] = "python -m kccl.bench.in_kernel.beside"
    return tell(found, print_table, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
