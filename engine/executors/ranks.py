"""Where an engine's ranks run: the processes of a job, or threads of this process."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import kccl

from ..model.executor import Executor

T = TypeVar("T", bound=Executor)
# A rank may read its weights from a disk, and another one from memory.
_OPENING_S = 300.0


class Agreed(NamedTuple):
    """What all ranks have for a request.

    Attributes:
        num_cached: Positions whose keys and values all have.
        seed: That of rank 0.
    """

    num_cached: int
    seed: int


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
        self._is_closed = False
        self._lock = threading.Lock()

    def request(self, what: str, num_cached: int = 0, seed: int = 0) -> "Request[T]":
        """A context for one request.

        Args:
            what: The request in words, the same on all ranks.
            num_cached: Of how many positions this process has the keys and values.
            seed: What this process would take as the seed.
        """
        return Request(self, what, num_cached, seed)

    def _agree(self, what: str, num_cached: int, seed: int = 0) -> Agreed:
        """Collective. The least num_cached is that of all ranks, because one that stopped to read
        an answer early knows of fewer positions.
        """
        if len(self.mine) == self.world_size:
            return Agreed(num_cached, seed)
        found = self.all_gather([hashlib.sha256(what.encode()).hexdigest(), num_cached, seed])
        if len({digest for digest, _, _ in found}) != 1:
            raise kccl.InvalidArgument(
                "the ranks make different requests, must all make the same one"
            )
        return Agreed(min(cached for _, cached, _ in found), found[0][2])

    def _begin(self, what: str, num_cached: int, seed: int) -> Agreed:
        if self._is_closed:
            raise kccl.InvalidArgument("the engine is closed")
        if not self._lock.acquire(blocking=False):
            raise kccl.InvalidArgument("the engine is answering another request")
        try:
            return self._agree(what, num_cached, seed)
        except BaseException:
            self._lock.release()
            raise

    def _end(self) -> list[BaseException]:
        """Ends the request on every rank of this process. Returns the errors instead of raising
        them, because threads that go on would write to memory that is no longer theirs.
        """
        errors: list[BaseException] = []
        try:
            for each in self.mine:
                while not self._is_closed:
                    try:
                        each.end()
                    except Exception as error:
                        errors.append(error)
                    except BaseException as error:
                        # Ctrl-C: the rank's threads may still work. Their waits have limits.
                        errors.append(error)
                        continue
                    break
        finally:
            self._lock.release()
        return errors

    def close(self) -> None:
        """Ends the executors, also in the midst of a request, then the communicators."""
        self._is_closed = True
        try:
            for each in self.mine:
                each.close()
        finally:
            self._close()


class Request(Generic[T]):
    """A context: one request at a time, the same on all ranks of a job. It gives what they agree
    on.

    At its end no thread works on the request any more, whatever ended it.

    Raises:
        InvalidArgument: The ranks make different requests; or the engine is closed, or has another
            request.
        kccl.Error: The request failed on some rank, and nothing was raised inside.
    """

    def __init__(self, ranks: Ranks[T], what: str, num_cached: int, seed: int) -> None:
        self._ranks, self._what = ranks, what
        self._num_cached, self._seed = num_cached, seed

    def __enter__(self) -> Agreed:
        return self._ranks._begin(self._what, self._num_cached, self._seed)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        errors = self._ranks._end()
        # GeneratorExit: who closes an iterator has not seen what failed.
        if errors and (error is None or isinstance(error, GeneratorExit)):
            raise errors[0]


def check_same(comm: kccl.Communicator, settings: Mapping[str, Any]) -> None:
    """Compares settings, which JSON must represent, with those of the other ranks. Collective.

    Raises:
        InvalidArgument: One differs; names it.
    """
    found = comm.gather_objects(dict(settings))
    for name, value in settings.items():
        if any(of_rank[name] != value for of_rank in found):
            raise kccl.InvalidArgument(f"{name} differs between the ranks, must be the same on all")


def _open(make: Callable[[kccl.Communicator], T], comm: kccl.Communicator) -> T:
    """Makes a rank's executor. Meanwhile ranks wait longer for each other than in requests."""
    usual, comm.timeout = comm.timeout, max(comm.timeout, _OPENING_S)
    try:
        return make(comm)
    finally:
        comm.timeout = usual


def ranks_of_job(
    init: Callable[[], kccl.Communicator], make: Callable[[kccl.Communicator], T]
) -> "Ranks[T]":
    """The rank that this process is; rank 0 of 1 outside a job. Collective."""
    comm = init()
    try:
        mine = _open(make, comm)
    except BaseException:
        comm.abort()
        comm.close()
        raise

    return Ranks([mine], comm.rank, comm.world_size, comm.gather_objects, comm.close)


def ranks_of_threads(
    ranks: int, backend: str, make: Callable[[kccl.Communicator], T]
) -> "Ranks[T]":
    """Ranks as threads of this process. They stay until close()."""
    made: dict[int, T] = {}
    comms: list[kccl.Communicator] = []
    errors: list[BaseException] = []
    is_ready, is_closing, has_ended = (threading.Event() for _ in range(3))

    def main(comm: kccl.Communicator) -> None:
        comms.append(comm)
        try:
            mine = made[comm.rank] = _open(make, comm)
        except BaseException:
            # The others may have theirs already, and wait for the end.
            is_closing.set()
            raise
        if len(made) == comm.world_size:
            is_ready.set()
        is_closing.wait()
        mine.close()

    def run() -> None:
        try:
            # What the ranks make lives in one run.
            once = 0 if backend == "sim" else None
            kccl.run_threads(main, world_size=ranks, backend=backend, seed=once)
        except BaseException as error:
            errors.append(error)
        finally:
            has_ended.set()
            is_ready.set()

    def close() -> None:
        is_closing.set()
        has_ended.wait()

    # Why a daemon: an engine that nobody closes must not keep the interpreter from ending.
    threading.Thread(target=run, name="kccl engine", daemon=True).start()
    try:
        is_ready.wait()
    except BaseException:
        # Only this thread gets Ctrl-C. `make` notices that its communicator failed.
        for comm in list(comms):
            comm.abort()
        close()
        raise
    if errors:
        raise errors[0]
    mine = [made[rank] for rank in range(ranks)]
    return Ranks(mine, 0, ranks, lambda value: [value], close)
