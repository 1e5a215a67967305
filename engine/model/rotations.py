"""The tables of cosines and sines by which a rank rotates queries and keys. They are chosen once
for each request.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .program import Program


def pair_order(head_dim: int, *, is_interleaved: bool) -> NDArray[np.intp]:
    """Returns the order of a head's elements in an executor, where the elements of a RoPE pair are
    neighbours. Entry i is the index, in the checkpoint's head, of the executor's element i.
    """
    order = np.arange(head_dim)
    return order if is_interleaved else order.reshape(2, -1).T.ravel()


class Rotations:
    """A rank's tables of cosines and sines. The arrays are only filled anew, never replaced,
    because executors keep pointers to them.

    Attributes:
        cosines, sines: float32 [context, head_dim / 2]: the cosines and sines of each position's
            angles. Rows after the last request's Program.reach() may be an earlier request's.
    """

    def __init__(
        self, program: Program, context: int, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Makes the tables for a request that fills the context.

        Args:
            program: The model's program.
            context: The number of positions to make room for.
            changed: Called when the tables have changed. On a GPU it copies them to the memory that
                kernels read.
        """
        self._program, self._context, self._changed = program, context, changed
        self._reach = context
        cosines, sines = program.rotations(context)
        self.cosines: NDArray[np.float32] = np.ascontiguousarray(cosines)
        self.sines: NDArray[np.float32] = np.ascontiguousarray(sines)

    def choose(self, length: int) -> None:
        """Fills the tables for a request of `length` positions, prompt and answer together. Must
        not be called while a request runs.
        """
        reach = self._program.reach(length, self._context)
        if reach != self._reach:
            # The reach is 0 until both tables are written. If Ctrl-C comes in between, the next
            # call fills them again.
            self._reach = 0
            self.cosines[:reach], self.sines[:reach] = self._program.rotations(reach)
            self._changed()
            self._reach = reach
