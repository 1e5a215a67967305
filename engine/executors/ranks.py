"""The ranks of an engine, which are processes of a job or threads of this process."""

import hashlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import kccl

from ..base.owner import Owner
from ..model.executor import BEGINNING, Executor, Place
from .drafting import is_drafting

T = TypeVar("T", bound=Executor)
# While ranks open, their waits for each other time out after at least this many seconds. That is
# long, because one rank may read its weights from a disk and another from memory.
_OPENING_S = 300.0


class Agreed(NamedTuple):
    """The start of a request, on which all ranks have agreed.

    Attributes:
        place: Where the request lies in the KV cache. Every rank has its num_cached positions.
        seed: The seed that rank 0 proposed.
    """

    place: Place
    seed: int


class Wanted(NamedTuple):
    """A request as this process wants it, before the ranks agree.

    Attributes:
        what: Describes the request. The ranks compare it, to refuse different requests.
        find: Returns where the request should lie in the KV cache, and how many of its first
            positions each slot has. Called when no other request runs.
        seed: The seed that this process proposes.
        waits: Whether this request waits while another one runs. If not, it is refused.
    """

    what: str
    find: Callable[[], tuple[Place, Sequence[int]]] = lambda: (BEGINNING, [0])
    seed: int = 0
    waits: bool = False


class Ranks(Generic[T]):
    """The ranks in this process, and the connection to the others.

    Attributes:
        mine: The executors of the ranks in this process.
        rank: The rank of the first executor.
        world_size: Number of ranks, in all processes.
        owner: The process that made the ranks. A fork of it must not use them.
        wait_s: The timeout of all_gather, in seconds.
    """

    def __init__(
        self,
        mine: list[T],
        rank: int,
        world_size: int,
        all_gather: Callable[[Any], list[Any]],
        close: Callable[[], None],
        wait_s: float = math.inf,
    ) -> None:
        self.mine = mine
        self.rank = rank
        self.world_size = world_size
        self.owner = Owner()
        self._all_gather = all_gather
        self.wait_s = wait_s
        self._close = close
        self._is_closed = False
        # True if a thread that calls a drafter has ended the last request (see _end()). Then
        # threads may still work on that request.
        self._ends_late = False
        self._helper: threading.Thread | None = None
        self._lock = threading.Lock()

    def request(self, wanted: Wanted) -> "Request[T]":
        """Returns a context in which one request must run."""
        return Request(self, wanted)

    def helped_by(self, thread: threading.Thread) -> None:
        """Records a thread that reads the running request's tokens and ends with the request. The
        next request waits for the thread's end. Otherwise the thread could take that request's
        tokens.
        """
        self._helper = thread

    def all_gather(self, value: Any) -> list[Any]:
        """Gathers a value from each process, and returns all of them in rank order. Collective: all
        processes must call it.
        """
        self.owner.check()
        return self._all_gather(value)

    def of_rank_0(self, value: Any) -> Any:
        """Broadcasts rank 0's value, which must be representable as JSON. Collective."""
        return self.all_gather(value)[0]

    def _agree(self, wanted: Wanted) -> Agreed:
        """Agrees on a request's place in the KV cache. Rank 0 chooses the slots. The number of
        cached positions is the least of all ranks, because a rank that stopped reading an answer
        early knows fewer. Collective.
        """
        place, shared = wanted.find()
        if len(self.mine) == self.world_size:
            return Agreed(place, wanted.seed)
        digest = hashlib.sha256(wanted.what.encode()).hexdigest()
        found = self.all_gather([digest, place.slot, place.source, list(shared), wanted.seed])
        if len({each[0] for each in found}) != 1:
            raise kccl.InvalidArgument(
                "the ranks make different requests, must all make the same one"
            )
        _, slot, source, _, seed = found[0]
        return Agreed(Place(slot, source, min(each[3][source] for each in found)), seed)

    def _begin(self, wanted: Wanted) -> Agreed:
        self.owner.check()
        if self._is_closed:
            raise kccl.InvalidArgument("the engine is closed")
        if not self._lock.acquire(blocking=wanted.waits):
            raise kccl.InvalidArgument("the engine is answering another request")
        try:
            if self._ends_late:
                self._ends_late = False
                for error in self._end_all():
                    raise error
            if self._helper is not None and self._helper.is_alive():
                self._helper.join()
            self._helper = None
            return self._agree(wanted)
        except BaseException:
            self._lock.release()
            raise

    def _end(self) -> list[BaseException]:
        """Ends the request on every rank of this process, and returns the errors. A thread in a
        drafter only cancels the request, because it cannot wait for itself. Then the next request
        waits for the end.
        """
        try:
            if not self.owner.is_here:
                # In a fork of the process nothing is ended: the request belongs to the parent
                # process, and goes on there.
                return []
            if not is_drafting(self.mine):
                return self._end_all()
            self._ends_late = True
            for each in self.mine:
                each.cancel()
            return []
        finally:
            self._lock.release()

    def _end_all(self) -> list[BaseException]:
        """Waits for the end of the request on every rank of this process. Returns errors instead of
        raising the first one, so that all ranks are ended. A thread that still ran could write to
        memory that is freed by then.
        """
        errors: list[BaseException] = []
        for each in self.mine:
            while not self._is_closed:
                try:
                    each.end()
                except Exception as error:
                    errors.append(error)
                except BaseException as error:
                    # Ctrl-C interrupted end(), and the rank's threads may still work. So end() is
                    # called again. It returns in time, because the threads' waits have a timeout.
                    # But a drafter has none: this waits until it returns.
                    errors.append(error)
                    continue
                break
        return errors

    def check_closable(self) -> None:
        """Raises kccl.Error if a drafter calls it: close() would wait for the drafter's end."""
        if is_drafting(self.mine):
            raise kccl.Error("a drafter cannot close its engine")

    def close(self) -> None:
        """Closes the executors, even during a request, and then the communicators. Does nothing in
        a fork of the process that made them.

        Raises:
            kccl.Error: A drafter calls it.
        """
        self.check_closable()
        self._is_closed = True
        if not self.owner.is_here:
            return
        try:
            for each in self.mine:
                each.close()
        finally:
            self._close()


class Request(Generic[T]):
    """A context in which one request runs. Only one can be entered at a time, and all ranks of a
    job must enter the same one. Entering returns what the ranks agree on.

    When the context has ended, no thread works on the request any more.

    Raises:
        InvalidArgument: The ranks make different requests; or the engine is closed, or has another
            request.
        kccl.Error: The request failed on some rank, and nothing was raised inside.
    """

    def __init__(self, ranks: Ranks[T], wanted: Wanted) -> None:
        self._ranks, self._wanted = ranks, wanted

    def __enter__(self) -> Agreed:
        return self._ranks._begin(self._wanted)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        errors = self._ranks._end()
        # GeneratorExit: the caller has closed the iterator of tokens before it saw the failure.
        if errors and (error is None or isinstance(error, GeneratorExit)):
            raise errors[0]


def check_same(comm: kccl.Communicator, settings: Mapping[str, Any]) -> None:
    """Compares settings, which JSON must represent, with those of the other ranks. Collective.

    Raises:
        InvalidArgument: A setting differs; the text names it.
    """
    found = comm.gather_objects(dict(settings))
    for name, value in settings.items():
        if any(of_rank[name] != value for of_rank in found):
            raise kccl.InvalidArgument(f"{name} differs between the ranks, must be the same on all")


def _open(make: Callable[[kccl.Communicator], T], comm: kccl.Communicator) -> T:
    """Makes a rank's executor. While ranks open, they wait longer for each other than in
    requests.
    """
    usual, comm.timeout = comm.timeout, max(comm.timeout, _OPENING_S)
    try:
        return make(comm)
    finally:
        comm.timeout = usual


def ranks_of_job(
    init: Callable[[], kccl.Communicator], make: Callable[[kccl.Communicator], T]
) -> "Ranks[T]":
    """Opens the rank that this process is in its job. Outside a job it is rank 0 of 1. Collective:
    all processes of the job must call it.
    """
    comm = init()
    try:
        mine = _open(make, comm)
    except BaseException:
        comm.abort()
        comm.close()
        raise

    return Ranks([mine], comm.rank, comm.world_size, comm.gather_objects, comm.close, comm.timeout)


def ranks_of_threads(
    ranks: int, backend: str, make: Callable[[kccl.Communicator], T]
) -> "Ranks[T]":
    """Makes ranks as threads of this process. The threads run until close()."""
    made: dict[int, T] = {}
    comms: list[kccl.Communicator] = []
    errors: list[BaseException] = []
    is_ready, is_closing, has_ended = (threading.Event() for _ in range(3))

    def main(comm: kccl.Communicator) -> None:
        comms.append(comm)
        if is_closing.is_set():
            # Ctrl-C came, or another rank failed, before this communicator was in `comms`. So
            # nobody else aborts it.
            comm.abort()
        try:
            mine = made[comm.rank] = _open(make, comm)
        except BaseException:
            # Ranks that are open already close when this event is set.
            is_closing.set()
            raise
        if len(made) == comm.world_size:
            is_ready.set()
        is_closing.wait()
        mine.close()

    def run() -> None:
        try:
            # Without a seed, the simulator would run main() again under other seeds. But the engine
            # opens its ranks once.
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

    # A daemon thread, so that the process can exit although nobody closes the engine.
    thread = threading.Thread(target=run, name="kccl engine", daemon=True)
    try:
        thread.start()
        is_ready.wait()
    except BaseException:
        # Ctrl-C interrupts this thread only. Aborting the communicators makes make() fail in the
        # ranks' threads. Threads that have no communicator yet find is_closing set.
        is_closing.set()
        for comm in list(comms):
            comm.abort()
        if thread.ident is not None:
            has_ended.wait()
        raise
    if errors:
        raise errors[0]
    mine = [made[rank] for rank in range(ranks)]
    return Ranks(mine, 0, ranks, lambda value: [value], close)
