"""The cosines and sines that a rank rotates queries and keys by, chosen once for each request."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .program import Program


def pair_order(head_dim: int, *, is_interleaved: bool) -> NDArray[np.intp]:
    """Where the executor's element i of a head lies in the checkpoint's head."""
    order = np.arange(head_dim)
    return order if is_interleaved else order.reshape(2, -1).T.ravel()


class Rotations:
    """A rank's tables. Executors read them where they lie, so they stay in place.

    Attributes:
        cosines, sines: Of each position: float32 [context, head_dim / 2]. Rows that the last
            request cannot reach may be of a request before.
    """

    def __init__(
        self, program: Program, context: int, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Chooses for a request that fills the context.

        Args:
            program: The model's.
            context: Positions to make room for.
            changed: Called when the tables have changed, to copy them to where kernels read.
        """
        self._program, self._context, self._changed = program, context, changed
        self._reach = context
        cosines, sines = program.rotations(context)
        self.cosines: NDArray[np.float32] = np.ascontiguousarray(cosines)
        self.sines: NDArray[np.float32] = np.ascontiguousarray(sines)

    def choose(self, length: int) -> None:
        """Makes the tables those of a request of `length` positions, prompt and answer together.
        No request may run.
        """
        reach = self._program.reach(length, self._context)
        if reach != self._reach:
            # It refers to nothing until all is in place, because Ctrl-C may come in between.
            self._reach = 0
            self.cosines[:reach], self.sines[:reach] = self._program.rotations(reach)
            self._changed()
            self._reach = reach
