"""The calls of a sim_programs.Script that go on behind a failure."""

import collectives
import numpy as np
import oracle
from sim_machine import ALL_KINDS, LL16, LOCAL_EXCHANGE, MAKES, NUMBERS, compiled

from kccl.plan.spec import Counts
from kccl.plan.specs import BY_NAME

# As in kernels/failures.cuh: elements of a call that is not refused, and what `fit` says.
COUNT = 12
# Most blocks of a rank in an exchange of them.
_MOST_BLOCKS = 4
NOT_MADE, FAILS, OPENS_SECOND = 1, 2, 3
# Kernels of users make no messages: the DeviceComm that they get has no pipes.
KINDS_OF_USERS = tuple(kind for kind in ALL_KINDS if kind != "send_recv")


def go_on_kernel(kinds, at_a_time, coop, warp_size, csrc):
    """The kernel of kernels/failures.cuh, for lists of these kinds of calls."""
    bits = sum(1 << NUMBERS[kind] for kind in set(kinds))
    name = f"kccl::kernels::go_on<{at_a_time}, {bits}ull, kccl::{coop}>"
    return compiled("failures.cuh", name, warp_size, csrc, MAKES)


def going_on(kind, rank, world_size, actor, index, count, num_actors=1):
    """One call of `count` elements: its input, its right result, and fields of KcclCall.

    All elements of the first chunk of the result are equal. In an exchange an actor, one of
    `num_actors`, reads the slices of the next one.
    """
    # Signals go to the next rank. Elsewhere it is the root.
    neighbours = {"signal": (rank + 1) % world_size, "wait": (rank - 1) % world_size}
    peer = neighbours.get(kind, index % world_size)
    spec = BY_NAME["grid_exchange" if kind == LOCAL_EXCHANGE else kind]
    table = collectives.load(spec.collective) if spec.collective in collectives.NAMES else None
    size = count * world_size if table and table.HAS_CHUNKS else count
    unit = index + 3 * actor + 1
    inputs = [np.full(size, unit * (r + 1), np.float32) for r in range(world_size)]
    result = np.zeros(0, np.float32)
    if hasattr(table, "want"):
        found = table.want(inputs, rank, root=peer)
        result = result if found is None else found
        peer = peer % table.MOVES.num_peers(world_size) if spec.takes else peer
    elif kind in ("put", "get"):
        result = inputs[rank]
    elif kind == "grid_exchange":
        unit = index + 3 * ((actor + 1) % num_actors) + 1
        theirs = [np.full(size, unit * (r + 1), np.float32) for r in range(world_size)]
        result = oracle.all_reduce(theirs, "sum")
    elif kind == LOCAL_EXCHANGE:
        # The first slice is block 0's.
        result = np.full(_MOST_BLOCKS * size, (index + 1) * (rank + 1), np.float32)
    # A rank whose result is its input need not write it: the root of a broadcast.
    is_checked = result.size and not (table and np.array_equal(result, inputs[rank]))
    counts_bytes = spec.counts in (Counts.BYTES, Counts.CHUNK_BYTES)
    fields = {
        "count": count * inputs[rank].itemsize if counts_bytes else count,
        "share": int(result[0]) if is_checked else 0,
        **{"peer": peer, "channel": actor},
    }
    return inputs[rank], result, fields


class Failures:
    """One of Script's base classes, with this launch."""

    def go_on(
        self,
        calls,
        *,
        refused=(),
        absent=(),
        second=(),
        failing=(),
        threads,
        blocks=1,
        coop="Block",
        at_a_time=0,
    ):
        """A launch of its own: coops make calls, also behind failed ones (kernels/failures.cuh).

        Args:
            calls: Names of kernels, in the order in which each coop makes them.
            refused: (rank, actor, index of the call): which calls are too long; rank None: all.
            absent: Likewise: which calls are not made, nor those behind them.
            second: Likewise: which calls open a second GridBarrier or GridExchange instead.
            failing: Likewise: which calls must fail, in every thread.
            threads, blocks, coop: As in begin().
            at_a_time: How many calls are made with the same channel, GridBarrier and GridExchange
                open; 0: each opens its own.
        """
        self._flush()
        each = {"Block": threads, "Warp": self.machine.warp_size, "Thread": 1}[coop]
        num_actors = blocks * threads // each
        kernel = go_on_kernel(calls, at_a_time, coop, self.machine.warp_size, self.machine.csrc)
        for rank in self.ranks:
            lists = []
            for actor in range(num_actors):
                lists.append([])
                for index, kind in enumerate(calls):
                    is_one = {(rank, actor, index), (None, actor, index)}
                    is_empty = kind == LL16 and index % 4 == 3
                    count = 0 if is_empty else COUNT
                    if is_one & set(refused):
                        # Longer than any message and any exchange.
                        count = self.machine.exchange_bytes // 4 + 1
                    call = self._going_on(rank, actor, index, kind, count, num_actors)
                    fit = NOT_MADE if is_one & set(absent) else 0
                    fit = OPENS_SECOND if is_one & set(second) else fit
                    fit = FAILS if is_one & set(failing) else fit
                    # The blocks of a rank that lacks one cannot meet.
                    if kind == "grid_sync" and any(a[0] == rank and a[2] <= index for a in absent):
                        fit = fit or FAILS
                    lists[-1].append({**call, "fit": fit})
            wrong = np.zeros(num_actors, np.uint32)
            at = self.place(rank, wrong, is_written=False, what="words of coops that went wrong")
            self._watched.append((rank, at, at + wrong.nbytes))
            words = self._memory[rank][at : at + wrong.nbytes].view(np.uint32)
            arguments = self.world.device_comm(rank), self._pack(rank, lists), np.uint32(len(calls))
            launch = self.world.launch(rank, kernel, *arguments, words, grid=blocks, block=threads)
            self._launches[rank].append(launch)

    def _going_on(self, rank, actor, index, kind, count, num_actors):
        """One call, with its arrays."""
        which = kind, rank, self.world_size, actor, index, count, num_actors
        sent, result, fields = going_on(*which)
        at = self.place(rank, sent, is_written=False)
        out = self.place(rank, result, is_written=True)
        where = {"input": self.address(rank, at), "output": self.address(rank, out)}
        return {"kernel": kind, **fields, **where}
