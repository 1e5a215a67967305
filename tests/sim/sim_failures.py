"""The calls of a sim_programs.Script that go on behind a failure."""

import numpy as np
from sim_machine import BARRIER, BROADCAST, GATHER, LL16, NUMBERS, SCATTER, compiled

_COUNT = 12  # elements of a call that is not refused
# Of a call, as in kernels/failures.cuh.
_NOT_MADE, _FAILS = 1, 2


class Failures:
    """One of Script's base classes, with this launch."""

    def go_on(self, calls, *, refused=(), absent=(), threads, blocks=1, coop="Block", at_a_time=0):
        """A launch of its own: coops make calls, also behind failed ones (kernels/failures.cuh).

        Args:
            calls: Names of kernels, in the order in which each coop makes them.
            refused: (rank, actor, index of the call): which calls are too long; rank None: all.
            absent: Likewise: which calls are not made, nor those behind them.
            threads, blocks, coop: As in begin().
            at_a_time: How many calls are made with the same channel, GridBarrier and GridExchange
                open; 0: each opens its own.
        """
        self._flush()
        num_actors = blocks * (1 if coop == "Block" else threads // self.machine.warp_size)
        bits = sum(1 << NUMBERS[kind] for kind in {LL16, BROADCAST, BARRIER, *calls})
        name = f"kccl::kernels::go_on<{at_a_time}, {bits}u, kccl::{coop}>"
        kernel = compiled("failures.cuh", name, self.machine.warp_size, self.machine.csrc)
        for rank in self.ranks:
            lists = []
            for actor in range(num_actors):
                lists.append([])
                for index, kind in enumerate(calls):
                    is_one = {(rank, actor, index), (None, actor, index)}
                    is_empty = kind == LL16 and index % 4 == 3
                    count = 0 if is_empty else _COUNT
                    if is_one & set(refused):
                        # Longer than any message and any exchange.
                        count = self.machine.exchange_bytes // 4 + 1
                    call = self._going_on(rank, actor, index, kind, count)
                    fit = _NOT_MADE if is_one & set(absent) else 0
                    # The blocks of a rank that lacks one cannot meet.
                    if kind == "grid_sync" and any(a[0] == rank and a[2] <= index for a in absent):
                        fit = fit or _FAILS
                    lists[-1].append({**call, "fit": fit})
            wrong = np.zeros(num_actors, np.uint32)
            at = self._place(rank, wrong, is_written=False, what="words of coops that went wrong")
            self._watched.append((rank, at, at + wrong.nbytes))
            words = self._memory[rank][at : at + wrong.nbytes].view(np.uint32)
            arguments = self.world.device_comm(rank), self._pack(rank, lists), np.uint32(len(calls))
            launch = self.world.launch(rank, kernel, *arguments, words, grid=blocks, block=threads)
            self._launches[rank].append(launch)

    def _going_on(self, rank, actor, index, kind, count):
        """One call; all elements of the first chunk of its result are equal."""
        size = self.world_size
        # The root; signals go to the next rank.
        peer = {"signal": (rank + 1) % size, "wait": (rank - 1) % size}.get(kind, index % size)
        unit = index + 3 * actor + 1
        sent = np.full(count * (size if kind == SCATTER else 1), unit * (rank + 1), np.float32)
        at = self._place(rank, sent, is_written=False)
        result = np.zeros(count * (size if kind == GATHER else 1), np.float32)
        out = self._place(rank, result, is_written=True)
        want = {
            BROADCAST: unit * (peer + 1) * (rank != peer),
            GATHER: unit,
            "get": unit * (rank + 1),
            **dict.fromkeys((BARRIER, "grid_sync", "signal", "wait"), 0),
        }
        share = want.get(kind, unit * size * (size + 1) // 2)
        where = {"input": self._address(rank, at), "output": self._address(rank, out)}
        fields = {"count": count, "share": share, "peer": peer, "channel": actor}
        return {"kernel": kind, **fields, **where}
