"""Where an engine's ranks run: the processes of a job, or threads of this process."""

import hashlib
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import kccl


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)


class Ranks(Generic[T]):
    """What this process has of the ranks.

    Attributes:
        mine: The executors of the ranks in this process.
        rank: Of the first of them.
        world_size: Number of ranks, in all processes.
        all_gather: Gives what each process gave, in rank order. Collective.
    """

    def __init__(
        self,
        mine: list[T],
        rank: int,
        world_size: int,
        all_gather: Callable[[Any], list[Any]],
        close: Callable[[], None],
    ) -> None:
        self.mine = mine
        self.rank = rank
        self.world_size = world_size
        self.all_gather = all_gather
        self._close = close

    def agree(self, request: str) -> None:
        """Collective.

        Raises:
            InvalidArgument: The processes of a job make different requests.
        """
        if len(self.mine) == self.world_size:
            return
        digests = self.all_gather(hashlib.sha256(request.encode()).hexdigest())
        if len(set(digests)) != 1:
            raise kccl.InvalidArgument(
                "the ranks make different requests, must all make the same one"
            )

    def close(self) -> None:
        """Ends the executors, then the communicators. Collective in a job."""
        for each in self.mine:
            each.close()
        self._close()


def ranks_of_job(make: Callable[[kccl.Communicator], T]) -> "Ranks[T]":
    """The rank that this process is; rank 0 of 1 outside a job. Collective."""
    comm = kccl.init(backend="host")
    try:
        mine = make(comm)
    except BaseException:
        comm.abort()
        comm.close()
        raise

    return Ranks([mine], comm.rank, comm.world_size, comm.gather_objects, comm.close)


def ranks_of_threads(ranks: int, make: Callable[[kccl.Communicator], T]) -> "Ranks[T]":
    """Ranks as threads of this process. They stay until close()."""
    made: dict[int, T] = {}
    is_ready, is_closing = threading.Event(), threading.Event()
    lock = threading.Lock()
    errors: list[BaseException] = []

    def main(comm: kccl.Communicator) -> None:
        mine = make(comm)
        with lock:
            made[comm.rank] = mine
            if len(made) == comm.world_size:
                is_ready.set()
        is_closing.wait()

    def run() -> None:
        try:
            kccl.run_threads(main, world_size=ranks)
        except BaseException as error:
            errors.append(error)
        finally:
            is_ready.set()

    # Why a daemon: an engine that nobody closes must not keep the interpreter from ending.
    thread = threading.Thread(target=run, name="kccl engine", daemon=True)
    thread.start()
    is_ready.wait()
    if errors:
        is_closing.set()
        thread.join()
        raise errors[0]

    def close() -> None:
        is_closing.set()
        thread.join()

    mine = [made[rank] for rank in range(ranks)]
    return Ranks(mine, 0, ranks, lambda value: [value], close)
