"""The calls of a sim_programs.Script that copy: what other threads read at once behind a call, what
blocks write for each other between syncs, and what goes through a ring of stages.
"""

import ctypes

import numpy as np
from sim_machine import COPY, LL16, compiled

from kccl.base.abi import ffi

_STAGE_WORDS = 128  # of a stage of SumRing in kernels/stage_sum.cuh


class Copies:
    """One of Script's base classes, with these calls."""

    def read_at_once(self, actor, array):
        """Other threads of the coop read the result of the call before; of a grid, all blocks."""
        num_blocks = self._num_readers
        for rank, values in enumerate(array.values):
            nbytes = values.nbytes
            want = np.tile(values.view(np.uint8), num_blocks)
            at = self.place(rank, want, is_written=True, what="result as others read it")
            source, out = (self.address(rank, each) for each in (array.offsets[rank], at))
            self.call(actor, rank, COPY, input=source, output=out, count=nbytes, channel=nbytes)

    def overwrite(self, actor, array):
        """Other threads of the coop write the input of the call before."""
        for rank, values in enumerate(self.random_bytes(array.values[0].nbytes)):
            at = self.place(rank, values, is_written=False)
            where = array.offsets[rank]
            self._want[rank][where : where + values.nbytes] = values
            source, out = self.address(rank, at), self.address(rank, where)
            self.call(actor, rank, COPY, input=source, output=out, count=values.nbytes)

    def share_out(self, nbytes, sync, *, across=False):
        """Each block of a grid writes a part of a board, by sync() they meet, and each reads all.

        Args:
            nbytes: The bytes of a part.
            sync: Adds what comes in between.
            across: The board is that of the next rank.
        """
        num_blocks = self._num_readers
        values = self.random_bytes(nbytes * num_blocks)
        boards = [0] * self.world_size
        for rank in self.ranks:
            source = (rank - across) % self.world_size
            boards[rank] = self.place(rank, values[source], is_written=True, what="board")
        for rank in self.ranks:
            at = self.place(rank, values[rank], is_written=False)
            reader = (rank + across) % self.world_size
            source, board = self.address(rank, at), self.address(reader, boards[reader])
            each = {"count": nbytes, "peer": nbytes, "channel": nbytes, "share": 1}
            self.call(0, rank, COPY, input=source, output=board, **each)
        sync()
        for rank in self.ranks:
            want = np.tile(values[(rank - across) % self.world_size], num_blocks)
            at = self.place(rank, want, is_written=True, what="board as each block reads it")
            board, out = self.address(rank, boards[rank]), self.address(rank, at)
            each = {"count": nbytes * num_blocks, "channel": nbytes * num_blocks}
            self.call(0, rank, COPY, input=board, output=out, **each)

    @property
    def _num_readers(self):
        _, blocks, coop, _ = self._group
        return blocks if coop in ("Grid", "OpenGrid") else 1

    def stage(self, num_words, *, threads, in_flight, num_left=0):
        """A launch of its own: words go through the ring of kernels/stage_sum.cuh, on each rank.

        Args:
            num_words: How many words.
            threads: The threads of the block.
            in_flight: How many copies may be in flight.
            num_left: How many copies are made that no warp consumes: 0 or 2.
        """
        self._flush()
        warp_size = self.machine.warp_size
        name = f"kccl::kernels::{'stage_leave' if num_left else 'stage_sum'}"
        kernel = compiled("stage_sum.cuh", name, warp_size, self.machine.csrc)
        num_taken = (-(-num_words // _STAGE_WORDS) - num_left) * _STAGE_WORDS
        consumers = max(threads - warp_size, warp_size)
        place = np.arange(min(num_words, num_taken), dtype=np.uint64)
        thread = (place % _STAGE_WORDS % consumers).astype(int)
        for rank, x in enumerate(self.random_bytes(num_words * 4)):
            words = x.view(np.uint32)
            want = np.zeros(threads, np.uint64)
            np.add.at(want, thread, words[: place.size].astype(np.uint64) * (place + 1))
            begin = self.place(rank, words, is_written=False, align=16)
            end = self.place(rank, want, is_written=True, what="sums of a stream")
            call = {"kernel": LL16, "input": begin, "output": end}
            call |= {name: self.address(rank, call[name]) for name in ("input", "output")}
            data = self._pack(rank, [[call | {"count": num_words, "peer": in_flight}]])
            launch = self.world.launch(rank, kernel, _Call.from_buffer(data), block=threads)
            self._launches[rank].append(launch)


class _Call(ctypes.Structure):
    """A KcclCall, which goes by value."""

    _fields_ = (("bytes", ctypes.c_uint8 * ffi.sizeof("KcclCall")),)
