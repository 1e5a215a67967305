"""Programs for the simulator: calls of several kinds, in one launch or in several, and what memory
must hold after them.

    script = Script(4, Machine(epoch_bits=4))
    script.begin(threads=64)
    for _ in range(20):
        script.all_reduce(0, "all_reduce_one_shot_ll16", 37)
        script.broadcast(0, 100, root=2)
    outcome = script.run(seed=1)
    assert not outcome.kind, outcome

The launches of a rank are ordered more strongly than the calls within one launch. So most programs
make their calls in one launch, of the kernel in kernels/sequence.cuh. An actor is a coop of that
launch, a block or a warp, with a channel of its own.
"""

from dataclasses import dataclass
from functools import cached_property

import _support  # noqa: F401  # so that oracle and worlds are found
import collectives
import ml_dtypes  # noqa: F401  # names bfloat16 to NumPy
import numpy as np
import oracle
from sim_copies import Copies
from sim_exchanges import Exchanges
from sim_failures import Failures
from sim_launches import Launches
from sim_machine import (
    ALL_KINDS,
    NUMBERS,
    UNTOUCHED,
    Outcome,
    sequence,
)
from sim_messages import Messages
from sim_parts import Parts
from worlds import World

from kccl.base import abi
from kccl.base.abi import ffi

_CAPACITY = 1 << 23  # bytes of a rank's memory; pages that are not used cost nothing
# KcclCall's, of calls with parts or messages.
_OF_MESSAGES = ("sends", "receives", "repeats", "send_from", "receive_to", "messages")
_GAP = 16  # bytes between arrays, so that a write beyond an end shows


@dataclass(frozen=True)
class Array:
    """An array of every rank: where it lies in the rank's memory, and what it holds in the end."""

    offsets: tuple
    values: tuple


class Script(Copies, Exchanges, Failures, Launches, Messages, Parts):
    """A program, made call by call. A method adds a call of all ranks: each gets its part of it.

    Each collective has a method of its name, from its file in tests/support/collectives.
    """

    def __init__(
        self,
        world_size,
        machine,
        *,
        dtype="float32",
        op="sum",
        salt=0,
        kinds=ALL_KINDS,
        is_exact=True,
    ):
        self.machine = machine
        self.world = World(world_size, machine.simulation(), machine.settings(), csrc=machine.csrc)
        self.world_size = world_size
        self.dtype, self.op, self.kinds = dtype, op, kinds
        self._salt = salt * 1000
        self._is_exact = is_exact
        self._memory = [np.zeros(_CAPACITY, np.uint8) for _ in self.ranks]
        self._initial = [np.zeros(_CAPACITY, np.uint8) for _ in self.ranks]
        self._want = [np.zeros(_CAPACITY, np.uint8) for _ in self.ranks]
        self._used = [0] * world_size
        self._what = [[] for _ in self.ranks]
        self._launches = [[] for _ in self.ranks]
        self._group = None
        self._windows = None
        # What ranks may end with if they fail; empty: anything.
        self.failures = ()
        # (rank, begin, end) of memory that must be right also then.
        self._watched = []
        self._window_stride = 0

    @property
    def ranks(self):
        return range(self.world_size)

    def close(self):
        self.world.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- Memory ------------------------------------------------------------------------------

    def place(self, rank, values, *, is_written, shift=0, align=8, what=""):
        """Finds room for an array in the rank's memory, and returns its offset.

        Args:
            values: What the array holds in the end.
            is_written: By a call; else it holds the values from the start.
            shift: Bytes behind an aligned address.
            what: Names the array in messages.
        """
        data = np.frombuffer(values.tobytes(), np.uint8)
        at = -(-(self._used[rank] + _GAP) // align) * align + shift
        end = at + data.size
        assert end + _GAP <= _CAPACITY
        before = slice(self._used[rank], at)
        self._initial[rank][before] = self._want[rank][before] = UNTOUCHED
        self._initial[rank][at:end] = UNTOUCHED if is_written else data
        self._want[rank][at:end] = data
        self._used[rank] = end
        self._what[rank].append((at, what))
        return at

    def place_over(self, rank, want, before, **options):
        """Room for an array that holds `before` until it is written."""
        at = self.place(rank, want, is_written=True, **options)
        self._initial[rank][at : at + before.nbytes] = before.view(np.uint8)
        return at

    def address(self, rank, offset):
        return self._memory[rank].ctypes.data + offset

    def inputs(self, count, *, armed=False):
        """Each rank's elements, different in every call. `armed`: some words are the sentinel."""
        self._salt += 1
        if self._is_exact:
            inputs = [oracle.exact(self.dtype, self.op, count, r, self._salt) for r in self.ranks]
        else:
            rng = np.random.default_rng(self._salt)
            inputs = [oracle.random_floats(self.dtype, count, rng) for _ in self.ranks]
        if armed:
            for rank, x in enumerate(inputs):
                words = oracle.bits(x[: count * x.itemsize // 8 * 8 // x.itemsize]).view(np.uint64)
                words[(rank + self._salt) % 3 :: 3] = ~np.uint64(0)
        return inputs

    def random_bytes(self, nbytes):
        """Each rank's bytes, different in every call."""
        self._salt += 1
        rng = np.random.default_rng(self._salt)
        return list(rng.integers(0, 256, (self.world_size, nbytes), dtype=np.uint8))

    def array(self, inputs, **options):
        """Puts the ranks' inputs of a call into memory."""
        offsets = [self.place(r, x, is_written=False, **options) for r, x in enumerate(inputs)]
        return self.arrays(offsets, inputs)

    @staticmethod
    def arrays(offsets, values):
        """The ranks' arrays at these offsets of their memory."""
        return Array(tuple(offsets), tuple(values))

    # ---- Launches ----------------------------------------------------------------------------

    def begin(
        self, *, threads=64, blocks=1, coop="Block", at_a_time=3, style="kernel", streams=1, **more
    ):
        """The next calls are made by a new launch.

        Args:
            threads: The threads of a block.
            blocks: Each an actor, or each of their warps, or all together.
            coop: "Block", "Warp", "Grid" or "OpenGrid", which keeps a GridBarrier open.
            at_a_time: How many calls are made before the channel is closed and opened again.
            style: "kernel": all in one launch; "calls": each by a launch of the library's kernel,
                whose blocks share the message.
            streams: With "calls" each stream is an actor.
            more: With "calls", as Launches._launch_calls() takes them.
        """
        self._flush()
        warps = threads // self.machine.warp_size
        num_actors = {"Block": blocks, "Warp": blocks * warps}.get(coop, 1)
        num_actors = streams if style == "calls" else num_actors
        self._group = (threads, blocks, coop, style)
        self._at_a_time = np.uint32(at_a_time)
        self._chain = more
        self._calls = [[[] for _ in range(num_actors)] for _ in self.ranks]
        self._forms = set()  # of exchanges

    def _flush(self):
        if self._group is None:
            return
        threads, blocks, coop, style = self._group
        self._group = None
        if style == "calls":
            self._launch_calls(threads, blocks, **self._chain)
            return
        kernel = sequence(self.machine, coop, self.kinds, self._forms, self.dtype, self.op)
        for rank in self.ranks:
            lists = self._calls[rank]
            (count,) = {len(calls) for calls in lists}
            array = self._pack(rank, lists)
            comm = self.world.device_comm(rank)
            launch = self.world.launch(
                *(rank, kernel, comm, array, np.uint32(count), self._at_a_time),
                **{"grid": blocks, "block": threads},
            )
            self._launches[rank].append(launch)

    def _pack(self, rank, lists):
        """The calls of all actors as an array of KcclCall."""
        comm = ffi.from_buffer("KcclDeviceComm *", self.world.device_comm(rank).data)
        calls = ffi.new("KcclCall[]", sum(map(len, lists)) or 1)
        flat = (call for calls_of_one in lists for call in calls_of_one)
        for at, fields in zip(calls, flat, strict=False):
            at.comm = comm[0]
            at.kernel = NUMBERS[fields["kernel"]]
            at.dtype, at.op = abi.DTYPES[self.dtype], abi.OPS[self.op]
            for name in ("input", "output", "count", "peer", "channel", "share", "fit"):
                setattr(at, name, fields.get(name, 0))
            for name in _OF_MESSAGES:
                if name in fields:
                    setattr(at, name, fields[name])
        return np.frombuffer(bytearray(ffi.buffer(calls)), np.uint8)

    def call(self, actor, rank, kernel, **fields):
        """One rank's part of a call, as KcclCall has it."""
        assert kernel in self.kinds
        self._calls[rank][actor].append({"kernel": kernel, "channel": actor, **fields})
        if kernel == "grid_exchange":
            self._forms.add(fields["peer"])

    def call_on(self, actor, rank, kernel, source, result, count):
        """call() on the arrays at these offsets of the rank's memory."""
        where = {"input": self.address(rank, source), "output": self.address(rank, result)}
        self.call(actor, rank, kernel, count=count, **where)

    # ---- Calls -------------------------------------------------------------------------------

    def grid_sync(self, times=1):
        """`times` syncs of all blocks; the call has the same index in each block's list."""
        for rank in self.ranks:
            for actor in range(len(self._calls[rank])):
                self.call(actor, rank, "grid_sync", count=times)

    def window(self, nbytes, num_actors=1):
        """Memory that peers may use: `nbytes` for each actor."""
        self._window_stride = -(-nbytes // 128) * 128
        self._windows = self.world.window(self._window_stride * num_actors)

    def _in_window(self, rank, actor):
        return self._windows[rank].ctypes.data + actor * self._window_stride

    def _put(self, actor, rank, peer, values):
        assert values.nbytes <= self._window_stride
        at = self.place(rank, values, is_written=False)
        self.call(
            *(actor, rank, "put"),
            input=self.address(rank, at),
            output=self._in_window(peer, actor),
            count=values.nbytes,
            peer=peer,
        )

    def _get(self, actor, rank, peer, values, what):
        at = self.place(rank, values, is_written=True, what=what)
        self.call(
            *(actor, rank, "get"),
            input=self._in_window(peer, actor),
            output=self.address(rank, at),
            count=values.nbytes,
            peer=peer,
        )

    def signal_ring(self, actor, nbytes, *, anyone=False):
        """Puts bytes to the right neighbour and signals; a signal back says that they were read."""
        values = self.random_bytes(nbytes)
        there, back = 2 * actor, 2 * actor + 1
        for rank in self.ranks:
            right, left = (rank + 1) % self.world_size, (rank - 1) % self.world_size
            self._put(actor, rank, right, values[rank])
            self.call(actor, rank, "signal", peer=right, channel=there)
            peer = -1 if anyone else left
            self.call(actor, rank, "wait", peer=peer, channel=there, count=1)
            self._get(actor, rank, rank, values[left], "bytes that were put and signalled")
            self.call(actor, rank, "signal", peer=left, channel=back)
            self.call(actor, rank, "wait", peer=right, channel=back, count=1)

    def barrier_ring(self, actor, nbytes, *, pulls=False):
        """Bytes to the right neighbour's window, or pulled out of it, between barriers."""
        values = self.random_bytes(nbytes)
        for rank in self.ranks:
            right, left = (rank + 1) % self.world_size, (rank - 1) % self.world_size
            self._put(actor, rank, rank if pulls else right, values[rank])
        self.barrier(actor)
        for rank in self.ranks:
            right, left = (rank + 1) % self.world_size, (rank - 1) % self.world_size
            seen = values[right if pulls else left]
            self._get(actor, rank, right if pulls else rank, seen, "bytes of a neighbour")
        self.barrier(actor)

    # ---- Runs --------------------------------------------------------------------------------

    @cached_property
    def program(self):
        """The launches of all ranks. Once it is read, no call can be added."""
        self._flush()
        return self._launches

    def run(self, seed):
        """Runs the program under one seed and checks what memory holds then."""
        program = self.program
        self.reset()
        return self.judge(self.world.run(program, seed))

    def explore(self, deviations, limit):
        """The outcomes of all schedules that World.explore() knows."""
        program = self.program
        self.reset()
        for report in self.world.explore(program, deviations=deviations, limit=limit):
            yield self.judge(report)
            self.reset()

    def reset(self):
        """Memory as before the first call."""
        for rank, end in enumerate(self._used):
            self._memory[rank][:end] = self._initial[rank][:end]

    def judge(self, report):
        """The outcome of a run, from the World's report and from memory."""
        kind = message = ""
        if report.findings:
            kind, message = report.findings[0].kind, str(report.findings[0])
        elif any(report.statuses):
            are_right = not self.failures or all(s in self.failures for s in report.statuses if s)
            kind = "failed_call" if are_right else "wrong_status"
            message = f"statuses {report.statuses}"
            for rank, begin, end in self._watched:
                if not np.array_equal(*(m[rank][begin:end] for m in (self._memory, self._want))):
                    kind, message = "failure_lost", f"rank {rank}: {message}"
        else:
            message = self._difference()
            kind = "wrong_data" if message else ""
        return Outcome(kind, message, report.stats, report.statuses)

    def _difference(self):
        for rank, end in enumerate(self._used):
            got, want = self._memory[rank][:end], self._want[rank][:end]
            if np.array_equal(got, want):
                continue
            first = int(np.flatnonzero(got != want)[0])
            at, what = max(each for each in self._what[rank] if each[0] <= first)
            return (
                f"wrong data: rank {rank}, byte {first - at} of the {what or 'input'}: "
                f"{got[first]:#x}, must be {want[first]:#x}"
            )
        return ""


def _as_method(call):
    return lambda script, *args, **options: call(script, *args, **options)


for _name in collectives.NAMES:
    setattr(Script, _name, _as_method(collectives.load(_name).on_simulator))
