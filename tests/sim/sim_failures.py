"""The calls of a sim_programs.Script that go on behind a failure."""

import numpy as np
from sim_machine import BARRIER, BROADCAST, LL16, NUMBERS, compiled

_COUNT = 12  # elements of a call that is not refused


class Failures:
    """One of Script's base classes, with this launch."""

    def go_on(self, calls, refused, *, threads, blocks=1, coop="Block", at_a_time=0):
        """A launch of its own: coops make calls, also behind failed ones (kernels/failures.cuh).

        Args:
            calls: Names of kernels, in the order in which each coop makes them.
            refused: (rank, actor, index of the call): which calls are too long; rank None: all.
            threads, blocks, coop: As in begin().
            at_a_time: How many calls are made on one open channel; 0: each opens its own.
        """
        self._flush()
        num_actors = blocks * (1 if coop == "Block" else threads // self.machine.warp_size)
        bits = sum(1 << NUMBERS[kind] for kind in {LL16, BROADCAST, BARRIER, *calls})
        name = f"kccl::kernels::go_on<{at_a_time}, {bits}ull, kccl::{coop}>"
        kernel = compiled("failures.cuh", name, self.machine.warp_size, self.machine.csrc)
        too_long = self.machine.packet_bytes // 4 + 1
        for rank in self.ranks:
            lists = []
            for actor in range(num_actors):
                lists.append([])
                for index, kind in enumerate(calls):
                    is_refused = bool({(rank, actor, index), (None, actor, index)} & set(refused))
                    is_empty = kind == LL16 and index % 4 == 3
                    count = too_long if is_refused else 0 if is_empty else _COUNT
                    lists[-1].append(self._going_on(rank, actor, index, kind, count))
            wrong = np.zeros(num_actors, np.uint32)
            at = self.place(rank, wrong, is_written=False, what="words of coops that went wrong")
            self._watched.append((rank, at, at + wrong.nbytes))
            words = self._memory[rank][at : at + wrong.nbytes].view(np.uint32)
            arguments = self.world.device_comm(rank), self._pack(rank, lists), np.uint32(len(calls))
            launch = self.world.launch(rank, kernel, *arguments, words, grid=blocks, block=threads)
            self._launches[rank].append(launch)

    def _going_on(self, rank, actor, index, kind, count):
        """One call; all elements of its result are equal."""
        size = self.world_size
        root = index % size
        unit = index + 3 * actor + 1
        at = self.place(rank, np.full(count, unit * (rank + 1), np.float32), is_written=False)
        out = self.place(rank, np.zeros(count, np.float32), is_written=True)
        want = {BROADCAST: unit * (root + 1) * (rank != root), BARRIER: 0, "grid_sync": 0}
        share = want.get(kind, unit * size * (size + 1) // 2)
        where = {"input": self.address(rank, at), "output": self.address(rank, out)}
        return {"kernel": kind, "count": count, "share": share, "peer": root, **where}
