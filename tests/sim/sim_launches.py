"""The calls of a sim_programs.Script that are launches of the library's kernels."""

import numpy as np

from kccl.base.abi import lib

# What each call but the last is told of the one behind it, by the name that programs use.
_TOLD = {"": lib.kKcclNoDependent, "early": lib.kKcclEarlyDependent, "late": lib.kKcclLateDependent}


class Launches:
    """One of Script's base classes, with these calls."""

    def _launch_calls(self, threads, blocks, *, dependents=""):
        """Adds a launch for each call, an actor's calls on a stream of its own.

        Args:
            threads, blocks: Those of each launch.
            dependents: "early" or "late": each but the first is a programmatic dependent of the
                one before it, which is told so (KcclDependent).
        """
        shape = {"block": threads, "grid": blocks, "dtype": self.dtype, "op": self.op}
        for rank in self.ranks:
            for stream, calls in enumerate(self._calls[rank]):
                for number, call in enumerate(calls):
                    is_last = number == len(calls) - 1
                    launch = self.world.call(
                        *(rank, call.pop("kernel")),
                        stream=stream,
                        is_dependent=dependents != "" and number > 0,
                        dependent=_TOLD["" if is_last else dependents],
                        **shape,
                        **call,
                    )
                    self._launches[rank].append(launch)

    def exchange_of_grid(self, nbytes):
        """A launch of the kernel grid_exchange, whose blocks publish slices of `nbytes`."""
        _, blocks, _, _ = self._group
        values = self.random_bytes(nbytes * blocks)
        want = np.tile(np.concatenate(values), blocks)
        for rank in self.ranks:
            at = self.place(rank, values[rank], is_written=False)
            out = self.place(rank, want, is_written=True, what=f"slices of {nbytes} bytes")
            where = {"input": self.address(rank, at), "output": self.address(rank, out)}
            self.call(0, rank, "grid_exchange", count=nbytes, peer=0, **where)
