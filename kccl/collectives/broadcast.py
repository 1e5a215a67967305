"""broadcast: every rank gets the root's array."""

from typing import Any

from ..base import arguments
from .collective import ArrayT, Case, Collective
from .prepared import Empty, Prepared


class Broadcast(Collective):
    """Every rank gets the root's array."""

    _NAME, _OPTIONS = "broadcast", (("root", 0),)

    def __call__(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
    ) -> ArrayT:
        """Every rank's `x` gets the root's `x`, bit by bit.

        Args:
            x: Array of any shape, strided ones as in all_reduce, of any type without Python
                objects. The same size and type on every rank.
            root: The rank whose array is copied.
            stream, channel, algorithm: As in all_reduce.

        Returns:
            x.

        Raises:
            InvalidArgument: An argument is wrong; nothing was sent.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        result: ArrayT = self._call(self._case(x, root), stream, channel, algorithm)
        return result

    def prepare(
        self,
        x: ArrayT,
        root: int = 0,
        *,
        stream: Any = None,
        channel: int = 0,
        algorithm: str = "",
        blocks: int = 0,
        threads: int = 0,
    ) -> Prepared | Empty:
        """Plans the call once. Calling the returned object, `op()`, runs it, any number of times.

        Arguments, result and errors are those of the call itself and of all_reduce.prepare. The
        object keeps the array alive.
        """
        return self._prepare(self._case(x, root), stream, channel, algorithm, blocks, threads)

    def _case(self, x: Any, root: Any) -> Case:
        root = arguments.between("root", root, 0, self._context.world_size - 1)
        view = self._context.backend.view(x, "x", writable=self._context.rank != root)
        return Case(
            view,
            view,
            x,
            x,
            nbytes=view.nbytes,
            count=view.nbytes,
            fields={"peer": root},
            options=(root,),
            what=f"root {root}",
        )
